"""The prepare kernel against the references of its parts, over whole lives of requests."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels.codecs import BYTE_FLOATS
from page4.kernels.errors import InputError
from page4.kernels.norm_rope import rotary_cos_sin
from page4.kernels.qsa_prepare_triton import qsa_prepare_kernel, qsa_prepare_triton, rotary_table
from page4.kernels.step_rows import StepRows
from tests.kernels.prepare_cases import (
    DEVICE,
    REQUESTS,
    SMALL,
    THETA,
    Step,
    angles_of,
    block_tables,
    copy_storage,
    norms_of,
    play,
    poisoned_storage,
    run,
)

FORMATS = ["fp32", "fp16", *BYTE_FLOATS, "int8"]
# The interpreter truncates where a conversion to bfloat16 must round.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
NORMS, ANGLES = norms_of(SMALL), angles_of(SMALL)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_prompt_and_a_verify_step_in_every_format(kv_format: str) -> None:
    steps = [[(1, 0, 9), (0, 0, 6)], [(0, 6, 4), (1, 9, 4)]]
    play(steps, poisoned_storage(kv_format), torch.float16, padding=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows_per_program", "chunk"), [(None, 2), (2, 5), (16, 19)])
def test_activations_and_tiles(dtype: torch.dtype, rows_per_program: int | None, chunk: int) -> None:
    steps = [[(2, 0, chunk), (0, 0, 3)], [(0, 3, 1), (2, chunk, 4)]]
    play(steps, poisoned_storage("e4m3", torch.float16), dtype, rows_per_program, padding=1)


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("counts", [(1, 2, 3), (4, 5, 7), (6, 9, 21)])
def test_blocks_that_span_ring_and_rows(start: int, counts: tuple[int, int, int]) -> None:
    """Every phase of the open block with row counts around the ring's 8, in tiles that cut requests apart."""
    prompts = [(request, 0, start) for request in range(3) if start]
    chunks = [(request, start, count) for request, count in enumerate(counts)]
    verify = [(request, start + count, 1) for request, count in enumerate(counts)]
    steps = [segments for segments in (prompts, chunks, verify) if segments]
    play(steps, poisoned_storage(), rows_per_program=4)


@pytest.mark.parametrize(("ratio", "capacity"), [(1, 4), (2, 6), (8, 16), (16, 16)])
def test_other_compress_ratios(ratio: int, capacity: int) -> None:
    storage = poisoned_storage(ratio=ratio, capacity=capacity)
    play([[(0, 0, 21)], [(0, 21, 4), (1, 0, 17)], [(0, 25, 4), (1, 17, 3)], [(0, 29, 4)]], storage)


@settings(max_examples=8)
@given(st.data())
def test_random_lives(data: st.DataObject) -> None:
    """Requests that come and go, prompts in chunks, rejected rows that are written again."""
    tokens = [0] * REQUESTS
    steps = []
    for _ in range(data.draw(st.integers(1, 3))):
        requests = data.draw(st.permutations(range(REQUESTS)))[: data.draw(st.integers(1, REQUESTS))]
        segments = []
        for request in requests:
            if tokens[request] > 150:
                tokens[request] = 0
            count = data.draw(st.sampled_from([1, 4, 4, 2, 7, 11]))
            segments.append((request, tokens[request], count))
            # A verify step may keep fewer rows than it wrote; those of a prompt all stay.
            tokens[request] += data.draw(st.integers(1, count)) if count <= 4 else count
        steps.append(segments)
    play(
        steps,
        poisoned_storage(data.draw(st.sampled_from(FORMATS))),
        rows_per_program=data.draw(st.sampled_from([4, 16])),
        padding=data.draw(st.integers(0, 3)),
    )


def test_only_padding_writes_nothing() -> None:
    storage = poisoned_storage("e4m3")
    before = copy_storage(storage)
    rows = StepRows.of([], [], block_tables([0] * REQUESTS), rows=5)
    step = Step.random(5, torch.float32, 0)
    q = torch.full((5, SMALL.heads, SMALL.dim), 7.0, device=DEVICE)
    index_q = torch.full((5, SMALL.index_heads, SMALL.index_dim), 7.0, device=DEVICE)
    qsa_prepare_triton(
        step.q_gate, step.k, step.v, step.index, NORMS, ANGLES, rows, storage, q=q, index_q=index_q
    )
    assert (q == 7.0).all() and (index_q == 7.0).all()
    for name, x in vars(storage).items():
        if isinstance(x, Tensor):
            assert torch.equal(x.nan_to_num(9.0), getattr(before, name).nan_to_num(9.0))


def test_a_slot_of_minus_one_keeps_the_last_slot() -> None:
    storage = poisoned_storage("fp32")
    rows = StepRows.of([0], [2], block_tables([2, 0, 0]))
    run(Step.random(2, torch.float32, 0), replace(rows, slots=torch.full_like(rows.slots, -1)), storage)
    assert storage.k_pages.isnan().all() and storage.v_pages.isnan().all()
    assert storage.ring[0, :2].isfinite().all()


def test_no_rows() -> None:
    rows = StepRows.of([], [], block_tables([0] * REQUESTS))
    q, index_q = run(Step.random(0, torch.float32, 0), rows, poisoned_storage())
    assert q.shape == (0, SMALL.heads, SMALL.dim) and index_q.shape == (0, SMALL.index_heads, SMALL.index_dim)


def test_the_split_of_a_prompt_does_not_change_a_bit() -> None:
    """Even with a ring of fewer bits than the activations: keys are rounded to it, read from it or not."""
    step = Step.random(37, torch.float32, 1)
    tables = block_tables([37, 0, 0])
    whole, pieces = (replace(s, ring=s.ring.half()) for s in map(poisoned_storage, ("e4m3", "e4m3")))
    run(step, StepRows.of([0], [37], tables), whole, rows_per_program=16)
    for start, stop in ((0, 5), (5, 6), (6, 22), (22, 37)):
        part = Step(*(x[start:stop] for x in vars(step).values()))
        run(part, StepRows.of([start], [stop - start], tables), pieces, rows_per_program=8)
    for name, x in vars(whole).items():
        if isinstance(x, Tensor):
            assert torch.equal(x.nan_to_num(9.0), getattr(pieces, name).nan_to_num(9.0)), name


def test_pages_beyond_two_gibibytes() -> None:
    """Memory that is never touched costs nothing, so this runs anywhere."""
    near = poisoned_storage("e4m3")
    page_bytes = near.k_pages[0].numel()
    pages = 2**31 // page_bytes + 2
    far = replace(
        near,
        k_pages=torch.empty(pages, *near.k_pages.shape[1:], dtype=torch.uint8, device=DEVICE),
        v_pages=torch.empty(pages, *near.v_pages.shape[1:], dtype=torch.uint8, device=DEVICE),
        compressed_pages=torch.empty(pages, *near.compressed_pages.shape[1:], device=DEVICE),
        ring=near.ring.clone(),
    )
    step = Step.random(4, torch.float32, 0)
    tables = torch.tensor([[1]], device=DEVICE)
    run(step, StepRows.of([0], [4], tables), near)
    run(step, StepRows.of([0], [4], tables + pages - 2), far)
    for name in ("k_pages", "v_pages"):
        assert torch.equal(getattr(far, name)[-1, :, :4], getattr(near, name)[1, :, :4])
    assert torch.equal(far.compressed_pages[-1, 0], near.compressed_pages[1, 0])


def test_far_positions_turn_as_in_the_reference() -> None:
    """Near 2^18 the angles of an FP32 table are what the reference uses; those of a position beyond, NaN."""
    table = rotary_table(2**18, SMALL.rotary_dim, THETA)
    cos, sin = rotary_cos_sin(torch.tensor([2**18 - 1]), SMALL.rotary_dim, THETA)
    assert torch.equal(
        table[-1], torch.cat((cos[0, : SMALL.rotary_dim // 2], sin[0, : SMALL.rotary_dim // 2]))
    )
    step = Step.random(1, torch.float32, 0)
    rows = StepRows.of([len(ANGLES)], [1], torch.zeros(1, 17, dtype=torch.int64, device=DEVICE))
    q, _ = run(step, rows, poisoned_storage())
    assert q[..., : SMALL.rotary_dim].isnan().all() and q[..., SMALL.rotary_dim :].isfinite().all()


def call(**changes: object) -> None:
    """A launch of five rows with some arguments replaced, by name."""
    step = Step.random(5, torch.float32, 0)
    arguments: dict[str, object] = {
        **vars(step),
        "norms": NORMS,
        "angles": ANGLES,
        "rows": StepRows.of([0], [5], block_tables([5, 0, 0])),
        "storage": poisoned_storage("e4m3"),
    }
    qsa_prepare_triton(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_gate": torch.zeros(5, SMALL.heads, SMALL.dim)}, "q_gate"),
        ({"k": torch.zeros(5, SMALL.kv_heads * SMALL.dim)}, "k must have 3 axes"),
        ({"v": torch.zeros(4, SMALL.kv_heads, SMALL.dim)}, "v"),
        ({"v": torch.zeros(5, SMALL.kv_heads, SMALL.dim, dtype=torch.float16)}, "v is torch.float16"),
        ({"k": torch.zeros(5, SMALL.dim, SMALL.kv_heads).mT}, "k must be contiguous within a row"),
        ({"index": torch.zeros(5, SMALL.index_dim)}, "index"),
        ({"angles": torch.zeros(64, 2 * SMALL.dim)}, "rotary_dim must not exceed"),
        ({"angles": torch.zeros(64, 6)}, "powers of two"),
        ({"norms": replace(NORMS, k=torch.zeros(SMALL.dim + 1))}, "norm weight k"),
        ({"rows": StepRows.of([0], [4], block_tables([5, 0, 0]))}, "rows.positions"),
        ({"storage": poisoned_storage("e4m3", capacity=3)}, "ring"),
        ({"storage": replace(poisoned_storage("e4m3"), kv_format="fp16")}, "k_pages"),
        ({"storage": replace(poisoned_storage("e4m3"), kv_format="fp7")}, "unknown KV format"),
        ({"storage": replace(poisoned_storage("fp16"), v_scale=2.0)}, "v_scale of format fp16"),
        ({"storage": replace(poisoned_storage("int8"), k_scale_pages=None)}, "k_scale_pages"),
        ({"q": torch.zeros(5, SMALL.heads, 2 * SMALL.dim)[..., : SMALL.dim]}, "q must be contiguous"),
    ],
)
def test_wrong_inputs_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(**changes)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_turned_bad_is_refused_at_the_launch(name: str, value: float) -> None:
    storage = poisoned_storage("e4m3")
    with pytest.raises(InputError, match=name):
        call(storage=replace(storage, **{name: value}))
    assert (storage.k_pages == 0xFF).all() and (storage.v_pages == 0xFF).all()


POINTERS = {
    **dict.fromkeys(("p_q_gate", "p_k", "p_v", "p_index", "p_q", "p_index_q"), "*fp16"),
    **dict.fromkeys(("p_q_norm", "p_k_norm", "p_index_q_norm", "p_index_k_norm"), "*fp16"),
    **dict.fromkeys(("p_positions", "p_slots", "p_block_tables"), "*i64"),
    **dict.fromkeys(("p_request", "p_row_index", "p_row_count"), "*i32"),
    **dict.fromkeys(("p_ring", "p_compressed"), "*fp16"),
    "p_angles": "*fp32",
}
SCALARS = {
    **dict.fromkeys(("stride_q_gate", "stride_k", "stride_v", "stride_index"), "i32:16"),
    **dict.fromkeys(("num_angles", "stride_block_tables", "rows"), "i32"),
    **dict.fromkeys(("k_scale", "v_scale", "eps"), "fp32"),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("kv_format", "rows_per_program"), [("e4m3", 1), ("e4m3", 2), ("fp16", 2), ("int8", 2)]
)
def test_compiles_without_spills(capability: int, kv_format: str, rows_per_program: int) -> None:
    stored = "*fp16" if kv_format == "fp16" else "*u8"
    signature = POINTERS | SCALARS | dict.fromkeys(("p_k_pages", "p_v_pages"), stored)
    constants: dict[str, object] = {
        **{"HQ": 24, "HKV": 2, "HI": 4, "D": 256, "DI": 128, "HALF": 32, "RATIO": 4, "RING": 8},
        **{
            "FORMAT": kv_format,
            "NATIVE": capability >= 90,
            "ROWS": rows_per_program,
            "DEPENDENT": capability >= 90,
        },
    }
    scales = ("p_k_scales", "p_v_scales")
    if kv_format == "int8":
        signature |= dict.fromkeys(scales, "*fp32")
    else:
        constants |= dict.fromkeys(scales)
    options = {"num_warps": 1, "enable_fp_fusion": False}
    compiled = compile_for(qsa_prepare_kernel, signature, constants, capability, **options)
    assert compiled.stack_bytes == 0
    # Neither fused nor approximate: the reference rounds every product and quotient.
    assert not re.search(r"fma|div\.full|div\.approx", compiled.ptx)
    assert "ld.global.v4.b32" in compiled.ptx or "ld.global.v2.b32" in compiled.ptx
