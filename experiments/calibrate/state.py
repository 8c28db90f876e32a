"""What a calibration has counted so far, in one file that is complete at every moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from page4.kernels.errors import InputError
from page4.kvcache.magnitudes import MAGNITUDES, Magnitudes
from page4.kvcache.tensor_file import save_tensors
from page4.spec_decode import KVObservation

STATE_FILE = "observed.safetensors"
"""Int64 `[Hkv, 31744]` per layer and part, `3.k`, `3.v`, ...: how often each FP16 magnitude occurred."""


@dataclass(frozen=True)
class Observed:
    """An observation and what it is of.

    Attributes:
        observation: None before the first window.
        windows, tokens: Seen so far.
        total: Windows that the run is to see.
    """

    observation: KVObservation | None
    windows: int
    tokens: int
    total: int

    def plus(self, observation: KVObservation, tokens: int) -> Observed:
        """With one window more."""
        summed = observation if self.observation is None else self.observation + observation
        return Observed(summed, self.windows + 1, self.tokens + tokens, self.total)


def save(folder: Path, observed: Observed) -> None:
    """Write the state atomically."""
    assert observed.observation is not None
    layers = observed.observation.layers
    tensors = {
        f"{name}.{part}": torch.from_numpy(m.counts)
        for name, pair in layers.items()
        for part, m in zip("kv", pair, strict=True)
    }
    numbers = {"windows": observed.windows, "tokens": observed.tokens, "total": observed.total}
    metadata = {name: str(number) for name, number in numbers.items()} | {"layers": " ".join(layers)}
    save_tensors(folder / STATE_FILE, tensors, metadata)


def load(folder: Path) -> Observed | None:
    """Read the state; None when there is none yet.

    Raises:
        InputError: The file is damaged.
    """
    file = folder / STATE_FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            layers = {
                name: (_counts(opened.get_tensor(f"{name}.k")), _counts(opened.get_tensor(f"{name}.v")))
                for name in metadata["layers"].split()
            }
            windows, tokens, total = (int(metadata[name]) for name in ("windows", "tokens", "total"))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{file} is not the state of a calibration: {error}") from error
    return Observed(KVObservation(layers), windows, tokens, total)


def _counts(tensor: NDArray[np.int64]) -> Magnitudes:
    if tensor.dtype != np.int64 or tensor.ndim != 2 or tensor.shape[1] != len(MAGNITUDES):
        raise ValueError(f"counts are {tensor.dtype} {list(tensor.shape)}")
    return Magnitudes(tensor)
