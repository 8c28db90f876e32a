"""Interventions of the study: noise in place of rounding, and another run's choice of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from page4.kernels.codecs import decode_kv, encode_int8_rows, encode_kv
from page4.kvcache.intervention import Intervention

Deviation = Callable[[Tensor], Tensor]
"""Standard deviation of the noise of every value ``[N, Hkv, D]``, in a shape that broadcasts to it."""


def round_trip(x: Tensor, kv_format: str, scale: float = 1.0) -> Tensor:
    """What a format makes of values ``[..., D]``, FP32 of the same shape."""
    if kv_format == "int8":
        codes, scales = encode_int8_rows(x)
        return decode_kv(codes, kv_format) * scales[..., None]
    return decode_kv(encode_kv(x, kv_format, scale), kv_format) * scale


def rounding_of(kv_format: str, scale: float) -> Deviation:
    """Each value's own rounding error: the noise keeps its size and loses its sign and its repetition."""
    return lambda x: (round_trip(x, kv_format, scale) - x.float()).abs()


def constant(deviation: float) -> Deviation:
    """The same for all values."""
    return lambda x: torch.full((1, 1, 1), deviation, device=x.device)


class GaussianNoise(Intervention):
    """Stores ``x + deviation(x) * g`` with new standard normal ``g`` for every value written.

    The numbers depend on the seed and on the order of writing.
    """

    def __init__(self, k: Deviation, v: Deviation, seed: int) -> None:
        self._k, self._v, self._seed = k, v, seed
        self._generator: torch.Generator | None = None

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V with their noise, FP32."""
        if self._generator is None:
            self._generator = torch.Generator(k.device).manual_seed(self._seed)
        return self._noisy(k, self._k), self._noisy(v, self._v)

    def _noisy(self, x: Tensor, deviation: Deviation) -> Tensor:
        noise = torch.randn(x.shape, generator=self._generator, device=x.device)
        return x.float() + deviation(x) * noise


class ChoiceRecorder(Intervention):
    """Keeps which blocks every row chose, and changes nothing."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def chosen(self, blocks: Tensor) -> Tensor:
        """The rows' own choice."""
        self.recorded.append(blocks)
        return blocks


class ChoiceReplay(Intervention):
    """Gives rows the blocks that a recorded run over the same steps chose."""

    def __init__(self, recorder: ChoiceRecorder) -> None:
        self._left: Iterator[Tensor] = iter(recorder.recorded)

    def chosen(self, blocks: Tensor) -> Tensor:
        """The recorded run's choice.

        Raises:
            RuntimeError: the steps are not those of the recorded run.
        """
        recorded = next(self._left, None)
        if recorded is None or recorded.shape != blocks.shape:
            raise RuntimeError("the steps differ from those of the run whose choice of blocks is replayed")
        return recorded
