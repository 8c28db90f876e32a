"""Filling a model that was built on the meta device from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from page4.kernels.errors import InputError

from .loading.names import listed, text_name
from .loading.pieces import pieces
from .loading.quantisation import Quantisation
from .loading.shards import ShardReader, catalogue, shards
from .loading.sources import Incomplete, find_source
from .loading.stored import Source, Stored

__all__ = ["load_weights", "shards"]


def load_weights(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ngram_parts: int,
    quantisation: Quantisation,
    name_of: Callable[[str], str | None] = text_name,
) -> None:
    """Fill a meta-device model from a checkpoint folder.

    Every tensor that the model names must be there with its shape, and nothing else may be; headers tell, so
    nothing is read of a folder that does not fit. Routed experts and n-gram tables may be stored whole or in
    pieces (:func:`page4.model.loading.pieces.pieces`), matrices quantised in the forms of
    :func:`page4.model.loading.sources.find_source`. Floating-point weights become ``dtype``, except the
    recurrence's ``A_log`` and ``dt_bias``, which stay FP32. Beside the model itself at most one shard is in
    memory, and a few slabs of the matrix that is being dequantised.

    Args:
        model: tells names and shapes.
        folder: holds the safetensors shards.
        dtype: of the weights.
        device: where they go.
        ngram_parts: pieces a split n-gram table comes in (``split_ngram_parts``).
        quantisation: what the config says of quantised weights.
        name_of: the name in the model of a stored tensor, None for one that is to be left out.

    Raises:
        InputError: a shard is missing or broken, tensors are missing or unknown (all are named), one is of
            another shape or dtype, or holds what ``dtype`` cannot: NaN, infinity, or too large values.
    """
    expected = model.state_dict()
    stored = catalogue(folder, name_of)
    jobs = _jobs(folder, expected, stored, ngram_parts, quantisation)
    for job in jobs:
        whole = expected[job.whole]
        job.source.check(tuple(whole[job.index].shape), not whole.is_floating_point())
    # Shard by shard, so that each is mapped once; a stable sort keeps the pieces of a tensor together.
    jobs.sort(key=lambda job: job.source.parts[0].shard)
    # All at once: too little memory shows before anything is read, and no buffer comes to lie in between.
    loaded = {
        name: torch.empty(whole.shape, dtype=weight_dtype(name, whole, dtype), device=device)
        for name, whole in expected.items()
    }
    with ShardReader() as reader:
        for job in jobs:
            weight = loaded[job.whole][job.index]
            job.source.fill(weight, reader.read)
            _check_finite(job.source, weight)
    model.load_state_dict(loaded, assign=True)


@dataclass(frozen=True)
class _Job:
    """Fills ``whole[index]`` of the model."""

    whole: str
    index: tuple[int | slice, ...]
    source: Source


def _jobs(
    folder: Path,
    expected: Mapping[str, Tensor],
    stored: Mapping[str, Stored],
    ngram_parts: int,
    quantisation: Quantisation,
) -> list[_Job]:
    """Where each tensor of the model comes from.

    Raises:
        InputError: names those that are missing and those that are none of the model's.
    """
    jobs: list[_Job] = []
    missing: set[str] = set()
    known: set[Stored] = set()
    incomplete: set[str] = set()  # weights of which some parts are there, whose others are missing

    def find(name: str) -> Source | None:
        try:
            source = find_source(name, stored, quantisation)
        except Incomplete as error:
            incomplete.add(name)
            missing.update(error.missing)
            known.update(error.there)
            return None
        known.update(source.parts if source is not None else ())
        return source

    for name, whole in expected.items():
        source = find(name)
        parts = [(piece, find(piece.name)) for piece in pieces(name, whole, ngram_parts)]
        there = [_Job(name, piece.index, found) for piece, found in parts if found is not None]
        if there and (source is not None or name in incomplete):
            raise InputError(f"{folder}: {name} is stored twice, whole and in pieces")
        if source is not None:
            jobs.append(_Job(name, (), source))
        elif there or any(piece.name in incomplete for piece, _ in parts):
            jobs += there
            missing |= {piece.name for piece, found in parts if found is None} - incomplete
        elif name not in incomplete:
            missing.add(name)
    unknown = {name for name, part in stored.items() if part not in known}
    if "lm_head.weight" not in expected:
        unknown.discard("lm_head.weight")  # a tied checkpoint may still carry a copy of the embedding
    complaints = [f"checkpoint lacks {listed(missing)}"] if missing else []
    complaints += [f"not part of this model: {listed(unknown)}"] if unknown else []
    if complaints:
        raise InputError(f"{folder}: {'; '.join(complaints)}")
    return jobs


def weight_dtype(name: str, whole: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is stored in where weights are ``dtype``: integers and decays keep their own."""
    if not whole.is_floating_point():
        return whole.dtype
    return torch.float32 if name.endswith((".A_log", ".dt_bias")) else dtype


def _check_finite(source: Source, weight: Tensor) -> None:
    if not weight.is_floating_point() or weight.numel() == 0:
        return
    # Least and largest need no memory, and a NaN among the values makes both NaN.
    if not torch.stack(torch.aminmax(weight)).isfinite().all():
        part = source.parts[0]
        raise InputError(
            f"{part.shard}: {listed([part.name])} holds NaN, infinity, or values too large for {weight.dtype}"
        )
