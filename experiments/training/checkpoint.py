"""The training state, and the exported checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from page4.experiments.atomic import atomic_path, remove_leftovers, write_json
from page4.kernels.errors import InputError
from page4.kvcache.tensor_file import save_tensors
from page4.model import Qwen4ExpForCausalLM

# A little under 15 MiB, so that the header fits too.
SHARD_BYTES = 15 * 2**20 - 65536


def save_state(state: dict[str, Any], path: Path) -> None:
    """Writes a training state atomically.

    Raises:
        OSError: it cannot be written, for example because the disk is full.
    """
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of the library, which goes on after a write that failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Reads what :func:`save_state` wrote.

    Raises:
        InputError: the file is not a training state.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise InputError(f"{path}: not a readable training state ({type(error).__name__})") from error
    if not isinstance(state, dict) or "model" not in state:
        raise InputError(f"{path}: not a training state")
    return state


def split_shards(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors in name order, packed into shards of at most ``limit`` bytes."""
    shards: list[dict[str, Tensor]] = []
    size = limit + 1
    for name in sorted(tensors):
        bytes_ = tensors[name].numel() * tensors[name].element_size()
        if size + bytes_ > limit or not shards:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += bytes_
    return shards


def export(
    model: Qwen4ExpForCausalLM,
    config: dict[str, Any],
    tokenizer: Path | None,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes fp16 safetensors shards, their index, ``config.json`` and the tokenizer.

    The index is written last: a folder with an index is complete.

    Raises:
        InputError: a weight does not fit fp16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    tensors = {}
    for name, value in model.state_dict().items():
        tensors[name] = (value.half() if value.is_floating_point() else value).contiguous().cpu()
        if value.is_floating_point() and not torch.isfinite(tensors[name]).all():
            raise InputError(f"{name} holds values that fp16 cannot: the training diverged")
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    shards = split_shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(folder / file, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder / "config.json", config)
    if tokenizer is not None and tokenizer.is_file():
        with atomic_path(folder / "tokenizer.json") as temporary:
            shutil.copyfile(tokenizer, temporary)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
