"""Cases of the K/V write: everything between the projections of a sparse layer and its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups, worst
from page4.experiments.kernel_cases import (
    INDEX_HEADS,
    ROPE_THETA,
    PrepareInputs,
    StepShape,
    prepare_copies,
)
from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs import STORAGE_DTYPES, decode_kv, encode_int8_rows, encode_kv
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred, rotary_cos_sin
from page4.kernels.qsa_configs import prepare_config
from page4.kernels.qsa_prepare import PAGE_TOKENS, update_index_keys
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton


def prepare_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """The launch of one step; floor: projections read (no gate), q, K, V and index keys written."""
    shape = cell.shape
    floor = prepare_bytes(shape)
    memory = shape.kv_bytes + shape.requests * shape.pages * 8 * shape.index_dim + 2 * floor
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = prepare_copies(shape, machine.device, config.seed, count)
    checked = sample_groups(shape.requests, config.check_groups, config.seed)
    first = copies[0]
    q, index_q = _outputs(first)
    chosen = prepare_config(first.q_gate, first.k, first.index, first.storage)
    launches = [
        functools.partial(
            qsa_prepare_triton, **vars(inputs), q=q, index_q=index_q, rows_per_program=chosen.rows_per_program
        )
        for inputs in copies
    ]
    reference = PrepareReference.of(copies[-1], checked)
    check = functools.partial(check_prepare, copies[-1], reference, q, index_q, launches[-1])
    return Case(floor, [Contender("triton", launches, check, settings(chosen))], count, cold)


def prepare_bytes(shape: StepShape) -> int:
    """Bytes that a launch cannot avoid: the gate, which lies between the queries, is not read."""
    per_value = STORAGE_DTYPES[shape.kv_format].itemsize
    activation = 4 if shape.kv_format == "fp32" else 2
    queries = 2 * activation * shape.query_heads * shape.head_dim
    keys_and_values = 2 * shape.kv_heads * (shape.head_dim * (activation + per_value))
    if shape.kv_format == "int8":
        keys_and_values += 8 * shape.kv_heads
    # Index queries in and out; the raw key in and, of a prompt's last rows, into the ring; a quarter key out.
    index = activation * shape.index_dim * (2 * INDEX_HEADS + 1)
    blocks_before = (shape.context - shape.rows) // BLOCK_TOKENS
    completed = shape.requests * (shape.context // BLOCK_TOKENS - blocks_before)
    ring = shape.requests * min(shape.rows, 2 * BLOCK_TOKENS)
    rows = shape.total_rows * (queries + keys_and_values + index)
    return rows + activation * shape.index_dim * (completed + ring)


def _outputs(inputs: PrepareInputs) -> tuple[Tensor, Tensor]:
    rows, heads, double = inputs.q_gate.shape
    index_dim = inputs.storage.ring.shape[2]
    index_heads = inputs.index.shape[1] // index_dim - 1
    return (
        inputs.q_gate.new_empty(rows, heads, double // 2),
        inputs.q_gate.new_empty(rows, index_heads, index_dim),
    )


@dataclass(frozen=True)
class PrepareReference:
    """Float64 results of some requests, worked out before a launch overwrites the ring.

    Attributes:
        rows: the requests' rows, int64 ``[n]``.
        requests: the requests, int64 ``[S]``.
        q, k, index_q: ``[n, heads, D]`` float64, with the magnitudes of their rotations.
        ring: ``[S, cap, Di]``, raw keys that must be there, exactly.
        compressed: float64 ``[S, NB, Di]`` with its magnitude; 0 where the step completes no block.
    """

    rows: Tensor
    requests: Tensor
    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    index_q: tuple[Tensor, Tensor]
    ring: Tensor
    compressed: Tensor

    @classmethod
    def of(cls, inputs: PrepareInputs, requests: list[int]) -> PrepareReference:
        """Results of the chosen requests by the definitions of the kernel's parts."""
        device = inputs.q_gate.device
        chosen = torch.tensor(requests, device=device)
        rows = torch.isin(inputs.rows.request, chosen.int()).nonzero().squeeze(1)
        dim, index_dim = inputs.k.shape[2], inputs.storage.ring.shape[2]
        positions = inputs.rows.positions[rows]
        rotary_dim = inputs.angles.shape[1]
        cos, sin = (x.double() for x in rotary_cos_sin(positions, rotary_dim, ROPE_THETA))
        index = inputs.index[rows].unflatten(1, (-1, index_dim))
        weights = inputs.norms

        def rotated(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            normed = rms_norm_zero_centred(x.double(), weight.double())
            first, second, rest = normed.abs().split(
                [rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1
            )
            magnitude = torch.cat((first + second, first + second, rest), dim=-1)
            return apply_rope(normed, cos, sin), magnitude

        # A small cache of the chosen requests alone, in order and in float64.
        pages = inputs.rows.block_tables.shape[1]
        tables = torch.arange(len(requests) * pages, device=device).view(-1, pages)
        compressed = torch.zeros(
            len(requests) * pages, PAGE_TOKENS // BLOCK_TOKENS, index_dim, dtype=torch.float64, device=device
        )
        ring = inputs.storage.ring[chosen].double()
        update_index_keys(
            index[:, -1].double().view(len(requests), -1, index_dim),
            positions.view(len(requests), -1),
            ring,
            torch.arange(len(requests), device=device),
            compressed,
            tables,
            weights.index_k.double(),
            rotary_dim,
            ROPE_THETA,
        )
        return cls(
            rows,
            chosen,
            rotated(inputs.q_gate[rows, :, :dim], weights.q),
            rotated(inputs.k[rows], weights.k),
            rotated(index[:, :-1], weights.index_q),
            ring,
            compressed.view(len(requests), -1, index_dim),
        )


def check_prepare(
    inputs: PrepareInputs,
    reference: PrepareReference,
    q: Tensor,
    index_q: Tensor,
    launch: Callable[[], object],
) -> Check:
    """Run the inputs' launch, which writes ``q`` and ``index_q``, and compare the reference's requests.

    Permitted: two roundings of the activations' dtype (norm, rotation) for q, index q and K, one for
    compressed keys, FP32 arithmetic, and for K the distance to the format's nearest number besides. V and raw
    keys must be exact.
    """
    storage, rows = inputs.storage, reference.rows
    for written in (q, index_q):
        written.fill_(torch.nan)
    launch()
    rounding = torch.finfo(q.dtype).eps / 2
    permitted = 2 * rounding + 1e-5
    error = 0.0
    for actual, (expected, magnitude) in ((q[rows], reference.q), (index_q[rows], reference.index_q)):
        error = max(error, worst(actual, expected, permitted * magnitude))
    slots = inputs.rows.slots[rows]
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    kv_format = storage.kv_format

    def stored(pages: Tensor, scales: Tensor | None, scale: float) -> Tensor:
        values = decode_kv(pages[page, :, offset], kv_format).double() * scale
        return values if scales is None else values * scales[page, :, offset].double()[..., None]

    expected, magnitude = reference.k
    nearest = (_quantised(expected, kv_format, storage.k_scale) - expected).abs()
    actual = stored(storage.k_pages, storage.k_scale_pages, storage.k_scale)
    # Rounding a number that is off by e goes at most 2 e farther than rounding the number.
    error = max(error, worst(actual, expected, nearest + 2 * permitted * magnitude))
    value = stored(storage.v_pages, storage.v_scale_pages, storage.v_scale)
    if not torch.equal(value, _quantised(inputs.v[rows], kv_format, storage.v_scale)):
        error = float("inf")
    if not torch.equal(storage.ring[reference.requests].double(), reference.ring):
        error = float("inf")
    tables = inputs.rows.block_tables[reference.requests]
    keys = storage.compressed_pages[tables].flatten(1, 2)  # [S, NB, Di]
    scale = reference.compressed.abs().amax(dim=2, keepdim=True)
    error = max(error, worst(keys, reference.compressed, (rounding + 1e-5) * scale))
    return Check(error, len(reference.requests), len(inputs.rows.block_tables))


def _quantised(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """The format's number for each value, times its scale, float64."""
    if kv_format == "int8":
        codes, scales = encode_int8_rows(x)
        return decode_kv(codes, kv_format).double() * scales.double()[..., None]
    return decode_kv(encode_kv(x.float(), kv_format, scale), kv_format).double() * scale
