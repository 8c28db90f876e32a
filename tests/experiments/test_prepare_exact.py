"""The rule for what a step's preparation writes: what it lets pass, and that faults do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from page4.experiments.kernel_cases import PrepareInputs
from page4.experiments.prepare_exact import ExactPreparation, Grid, Near, stored
from page4.kernels import qsa_prepare
from page4.kernels.codecs import BYTE_FLOATS, decode_byte_float, decode_kv
from page4.kernels.norm_rope import rms_norm_zero_centred, rotary_cos_sin
from page4.kernels.step_rows import StepRows
from tests.kernels import prepare_cases
from tests.kernels.prepare_cases import (
    MODEL,
    REQUESTS,
    SMALL,
    Sizes,
    Step,
    angles_of,
    block_tables,
    norms_of,
    poisoned_storage,
)

FORMATS = ["fp32", "fp16", *BYTE_FLOATS, "int8"]
PROMPT, VERIFY = [(1, 0, 21), (0, 0, 6)], [(0, 6, 4), (1, 21, 4)]


def inputs_of(
    kv_format: str,
    dtype: torch.dtype = torch.float16,
    segments: list[tuple[int, int, int]] = PROMPT,
    sizes: Sizes = SMALL,
) -> PrepareInputs:
    requests, starts, counts = (list(column) for column in zip(*segments, strict=True))
    lengths = [0] * REQUESTS
    for request, start, count in segments:
        lengths[request] = start + count
    rows = StepRows.of(starts, counts, block_tables(lengths), requests)
    step = Step.random(len(rows.positions), dtype, 0, sizes)
    storage = poisoned_storage(kv_format, dtype, sizes=sizes)
    return PrepareInputs(
        **vars(step), norms=norms_of(sizes), angles=angles_of(sizes), rows=rows, storage=storage
    )


def by_reference(inputs: PrepareInputs, sizes: Sizes = SMALL) -> tuple[Tensor, Tensor]:
    step = Step(inputs.q_gate, inputs.k, inputs.v, inputs.index)
    return prepare_cases.reference(step, inputs.rows, inputs.storage, sizes)


def exact_of(inputs: PrepareInputs) -> ExactPreparation:
    live = inputs.rows.request[inputs.rows.request >= 0]
    return ExactPreparation.of(inputs, live.unique().tolist())


def shares_of(
    inputs: PrepareInputs, spoil: Callable[[PrepareInputs, Tensor, Tensor], None] | None = None
) -> dict[str, float]:
    """Errors of the reference's results, spoilt first if a fault is given."""
    exact = exact_of(inputs)
    q, index_q = by_reference(inputs)
    if spoil is not None:
        spoil(inputs, q, index_q)
    return exact.shares(inputs, q, index_q)


def wrong(shares: dict[str, float]) -> set[str]:
    return {part for part, share in shares.items() if share > 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_references_of_the_parts_are_right(kv_format: str, dtype: torch.dtype) -> None:
    prompt, verify = inputs_of(kv_format, dtype), inputs_of(kv_format, dtype, VERIFY)
    shares = shares_of(prompt)
    assert not wrong(shares), shares
    shares = shares_of(replace(verify, storage=prompt.storage))  # the ring holds an open block
    assert not wrong(shares), shares
    if dtype != torch.float32:
        assert shares["q"] > 0.9  # the bound is no larger than roundings are


def summed_one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """The norm with its squares added in order."""
    wide, total = x.float(), torch.zeros(x.shape[:-1], device=x.device)
    for feature in wide.unbind(-1):
        total += feature.square()
    return (wide * torch.rsqrt(total / x.shape[-1] + 1e-6)[..., None] * (1 + weight)).to(x.dtype)


@pytest.mark.parametrize("kv_format", ["fp32", "e4m3"])
def test_another_order_of_the_sum_is_right(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides a rounding here and there, by a whole step of the activations."""
    segments = [(0, 0, 150)]
    first, second = (inputs_of(kv_format, segments=segments, sizes=MODEL) for _ in range(2))
    q, _ = by_reference(first, MODEL)
    exact = exact_of(second)
    monkeypatch.setattr(prepare_cases, "rms_norm_zero_centred", summed_one_by_one)
    other_q, index_q = by_reference(second, MODEL)
    step = (q.double() - other_q.double()).abs() / Grid.of_dtype(q.dtype).half_step(q.double().abs())
    assert step.max() >= 2
    assert not wrong(exact.shares(second, other_q, index_q))


def test_numbers_without_full_precision_are_right() -> None:
    """An FP16 number below 2^-14 is rounded by far more than 2^-11 of its value."""
    inputs = inputs_of("fp16")
    for x in (inputs.q_gate, inputs.k, inputs.index):
        x[..., 9::4] *= 2.0**-22
    exact = exact_of(inputs)
    q, index_q = by_reference(inputs)
    distance = (q.double() - exact.q.value).abs()
    assert (distance > 2.0**-9 * exact.q.value.abs()).any()
    assert not wrong(exact.shares(inputs, q, index_q))


def test_saturated_codes_are_right() -> None:
    for kv_format in BYTE_FLOATS:
        inputs = inputs_of(kv_format)
        small = replace(inputs, storage=replace(inputs.storage, k_scale=1e-5, v_scale=1e-5))
        assert not wrong(shares_of(small))


def test_half_a_step_is_the_farthest_that_rounding_goes() -> None:
    """Against every code of a byte float: midpoints are half a step from both neighbours."""
    for kv_format, spec in BYTE_FLOATS.items():
        values = decode_byte_float(torch.arange(spec.max_code + 1).byte(), kv_format).double()
        middle = (values[1:] + values[:-1]) / 2
        assert torch.equal(Grid.of_byte_float(kv_format).half_step(middle), middle - values[:-1])


def test_only_what_rounding_explains_is_right() -> None:
    """FP16 pages of FP16 activations add no rounding; of FP32 activations they do."""
    x = Near.exactly(torch.tensor([1.0]))
    assert stored(x, torch.float16, "fp16", 1.0).error == 0
    assert stored(x, torch.float16, "fp32", 1.0).error == 0
    assert stored(x, torch.float32, "fp16", 1.0).error == 2.0**-11


@pytest.mark.parametrize("kv_format", FORMATS[2:])
def test_a_scale_that_is_a_hundredth_off_is_wrong(kv_format: str) -> None:
    inputs = inputs_of(kv_format)
    exact = exact_of(inputs)
    if kv_format == "int8":
        q, index_q = by_reference(inputs)
        inputs.storage.k_scale_pages.mul_(1.01)  # type: ignore[union-attr]
    else:
        used = replace(inputs.storage, k_scale=1.01 * inputs.storage.k_scale)
        q, index_q = by_reference(replace(inputs, storage=used))
    assert wrong(exact.shares(inputs, q, index_q)) == {"k"}


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_rotation_at_the_next_position_is_wrong(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prepare_cases, qsa_prepare):
        monkeypatch.setattr(
            module,
            "rotary_cos_sin",
            lambda positions, rotary_dim, theta: rotary_cos_sin(positions + 1, rotary_dim, theta),
        )
    assert wrong(shares_of(inputs_of(kv_format))) == {"q", "index_q", "k", "compressed"}


def nearer_to_zero(x: Tensor) -> Tensor:
    """The next number of a float format of two bytes: the sign is the highest bit."""
    return (x.view(torch.int16) - 1).view(x.dtype)


def norm_toward_zero(x: Tensor, weight: Tensor) -> Tensor:
    """The norm, its result cut off where it must be rounded."""
    wide = rms_norm_zero_centred(x.float(), weight)
    nearest = wide.to(x.dtype)
    too_far = nearest.double().abs() > wide.double().abs()
    return torch.where(too_far, nearer_to_zero(nearest), nearest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_that_are_cut_off_are_wrong(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_cases, "rms_norm_zero_centred", norm_toward_zero)
    assert wrong(shares_of(inputs_of("fp32", dtype))) == {"q", "index_q", "k"}


@pytest.mark.parametrize("kv_format", FORMATS[1:])
def test_stored_numbers_that_are_cut_off_are_wrong(kv_format: str) -> None:
    def cut_off(inputs: PrepareInputs, q: Tensor, index_q: Tensor) -> None:
        storage, exact = inputs.storage, exact_of(inputs)
        page, offset = exact.slots // 16, exact.slots % 16
        codes = storage.k_pages[page, :, offset]
        scale = storage.k_scale
        if storage.k_scale_pages is not None:
            scale = storage.k_scale_pages[page, :, offset][..., None].double()  # type: ignore[assignment]
        value = decode_kv(codes, kv_format).double()
        too_far = value.abs() > (exact.k.value / scale).abs()
        if kv_format == "int8":
            nearer = (value - value.sign()).to(torch.int8).view(torch.uint8)
        elif kv_format == "fp16":
            nearer = nearer_to_zero(codes)
        else:
            nearer = codes - 1
        storage.k_pages[page, :, offset] = torch.where(too_far, nearer, codes)

    assert wrong(shares_of(inputs_of(kv_format, torch.float32), cut_off)) == {"k"}


@pytest.mark.parametrize("kv_format", FORMATS)
def test_swapped_heads_are_wrong(kv_format: str) -> None:
    def swap(inputs: PrepareInputs, q: Tensor, index_q: Tensor) -> None:
        for heads in (q, index_q):
            heads.copy_(heads.flip(1))
        storage = inputs.storage
        for pages in (storage.k_pages, storage.v_pages, storage.k_scale_pages, storage.v_scale_pages):
            if pages is not None:
                pages.copy_(pages.flip(1))

    assert wrong(shares_of(inputs_of(kv_format), swap)) == {"q", "index_q", "k", "v"}


def test_copies_must_be_equal_and_numbers_numbers() -> None:
    def smudge(inputs: PrepareInputs, q: Tensor, index_q: Tensor) -> None:
        slot = int(inputs.rows.slots[0])
        inputs.storage.v_pages[slot // 16, 0, slot % 16, 5] ^= 1
        inputs.storage.ring[1, 3, 2] *= 1.001
        q[2, 1, 4] = torch.nan

    assert wrong(shares_of(inputs_of("e4m3"), smudge)) == {"q", "v", "ring"}
