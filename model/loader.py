"""Reading safetensors checkpoints into a model built on the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from page4.kernels.errors import InputError

# Tensors of the vision tower and K/V scales beside a text checkpoint are not weights of this model.
_IGNORED_PREFIXES = ("model.visual.", "visual.")
_INDEX = "model.safetensors.index.json"


def load_weights(model: nn.Module, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a meta-device model from a checkpoint folder.

    Every tensor the model names must be there with its shape, and nothing else may be. Floating-point weights are
    converted to ``dtype``, except the recurrence's ``A_log`` and ``dt_bias``, which stay FP32.

    Raises:
        InputError: a shard is missing or truncated, a tensor is missing, unknown, or of another shape.
    """
    expected = model.state_dict()
    loaded: dict[str, Tensor] = {}
    for shard in shards(folder):
        for name, tensor in _read(shard):
            if name.startswith(_IGNORED_PREFIXES):
                continue
            name = name.replace("model.language_model.", "model.", 1)
            if name == "lm_head.weight" and name not in expected:
                continue  # a tied checkpoint may still carry a copy of the embedding
            if name not in expected:
                raise InputError(f"{shard}: tensor {name} is not part of this model")
            if tensor.shape != expected[name].shape:
                raise InputError(
                    f"{shard}: {name} has shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
                )
            loaded[name] = _convert(name, tensor, dtype).to(device)
    missing = sorted(set(expected) - set(loaded))
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(f"{folder}: checkpoint lacks {listed}")
    model.load_state_dict(loaded, assign=True)


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, as its index names them.

    Raises:
        InputError: no checkpoint there, or a shard the index names is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise InputError(f"{index}: not a safetensors index ({error})") from error
        for name in names:
            if not (folder / name).is_file():
                raise InputError(f"{folder}: shard {name} is missing")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise InputError(f"{folder}: no checkpoint there (expected {_INDEX} or model.safetensors)")


def _read(shard: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{shard}: not a readable safetensors file ({error})") from error


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    if name.endswith((".A_log", ".dt_bias")):
        return tensor.float()
    return tensor.to(dtype)
