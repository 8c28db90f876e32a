"""Reading safetensors checkpoints into a model built on the meta device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from page4.kernels.errors import InputError

# Tensors of the vision tower beside a text checkpoint are not weights of this model.
_IGNORED_PREFIXES = ("model.visual.", "visual.")
_INDEX = "model.safetensors.index.json"


def load_weights(
    model: nn.Module, folder: Path, dtype: torch.dtype, device: torch.device, ngram_parts: int
) -> None:
    """Fill a meta-device model from a checkpoint folder.

    Every tensor the model names must be there with its shape, and nothing else may be. Routed experts and
    n-gram tables may be stored whole or in pieces (see :func:`pieces`). Floating-point weights are converted
    to ``dtype``, except the recurrence's ``A_log`` and ``dt_bias``, which stay FP32.

    Args:
        model: tells names and shapes.
        folder: holds the safetensors shards.
        dtype: of the weights.
        device: where they go.
        ngram_parts: pieces a split n-gram table comes in (``split_ngram_parts``).

    Raises:
        InputError: a shard is missing or truncated, a tensor is missing, unknown, or of another shape.
    """
    expected = model.state_dict()
    parts = {
        piece.name: piece for name, whole in expected.items() for piece in pieces(name, whole, ngram_parts)
    }
    loaded: dict[str, Tensor] = {}
    read_parts: set[str] = set()
    for shard, name, tensor in _tensors(folder):
        if name == "lm_head.weight" and name not in expected:
            continue  # a tied checkpoint may still carry a copy of the embedding
        if name in expected:
            _check_shape(shard, name, tensor, expected[name])
            loaded[name] = _convert(name, tensor, dtype).to(device)
        elif name in parts:
            piece, whole = parts[name], expected[parts[name].whole]
            _check_shape(shard, name, tensor, whole[piece.index])
            if piece.whole not in loaded:
                loaded[piece.whole] = torch.empty(whole.shape, dtype=dtype, device=device)
            loaded[piece.whole][piece.index] = tensor.to(dtype)
            read_parts.add(name)
        else:
            raise InputError(f"{shard}: tensor {name} is not part of this model")
    begun = {parts[name].whole for name in read_parts}
    missing = expected.keys() - loaded.keys()
    missing |= {name for name, piece in parts.items() if piece.whole in begun} - read_parts
    if missing:
        listed = ", ".join(sorted(missing)[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(f"{folder}: checkpoint lacks {listed}{more}")
    model.load_state_dict(loaded, assign=True)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor under a name of its own: ``whole[index]`` is stored as ``name``."""

    name: str
    whole: str
    index: tuple[int | slice, ...]


def pieces(name: str, whole: Tensor, ngram_parts: int) -> Iterator[Piece]:
    """The names under which published checkpoints store a tensor in pieces; none for most tensors.

    Fused experts ``experts.gate_up_proj [E, 2I, H]`` and ``experts.down_proj [E, H, I]`` come as one matrix
    per expert, ``ngram_embedding.weight`` as ``ngram_embedding.shard_{k}.weight`` of equally many rows.
    """
    if match := re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name):
        for expert in range(whole.shape[0]):
            stem = f"{match[1]}.{expert}"
            if match[2] == "down_proj":
                yield Piece(f"{stem}.down_proj.weight", name, (expert,))
            else:
                half = whole.shape[1] // 2
                yield Piece(f"{stem}.gate_proj.weight", name, (expert, slice(0, half)))
                yield Piece(f"{stem}.up_proj.weight", name, (expert, slice(half, 2 * half)))
    elif name.endswith(".ngram_embedding.weight"):
        rows = -(-whole.shape[0] // ngram_parts)
        for k, start in enumerate(range(0, whole.shape[0], rows)):
            stem = name.removesuffix("weight")
            yield Piece(f"{stem}shard_{k}.weight", name, (slice(start, start + rows),))


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, as its index names them.

    Raises:
        InputError: no checkpoint there, or a shard the index names is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: not a safetensors index ({error})") from error
        for name in names:
            if not (folder / name).is_file():
                raise InputError(f"{folder}: shard {name} is missing")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise InputError(f"{folder}: no checkpoint there (expected {_INDEX} or model.safetensors)")


def _tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Every tensor of the text model, by its name in the text-only layout, and the shard it is in."""
    for shard in shards(folder):
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if not name.startswith(_IGNORED_PREFIXES):
                        text_name = name.replace("model.language_model.", "model.", 1)
                        yield shard, text_name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{shard}: not a readable safetensors file ({error})") from error


def _check_shape(shard: Path, name: str, tensor: Tensor, expected: Tensor) -> None:
    if tensor.shape != expected.shape:
        raise InputError(f"{shard}: {name} has shape {list(tensor.shape)}, expected {list(expected.shape)}")


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    if name.endswith((".A_log", ".dt_bias")):
        return tensor.float()
    return tensor.to(dtype)
