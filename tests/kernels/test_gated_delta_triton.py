"""The Gated DeltaNet launch against the references in float64, and against itself in other batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page4.kernels import gated_delta_triton as module
from page4.kernels.errors import InputError
from page4.kernels.gated_delta_triton import (
    HEAD_DIMS,
    DeltaConfig,
    DeltaWeights,
    gated_delta_triton,
    norms_in_kernel,
)
from page4.kernels.recurrent_rows import RequestRows

from .recurrent_cases import (
    DEVICE,
    Caches,
    Heads,
    assert_close,
    assert_same_caches,
    inputs_of,
    reference,
    request_rows,
    rows_slice,
    run,
    weights_of,
    without_gate,
)

SMALL = Heads()


def check(
    heads: Heads,
    caches: Caches,
    rows: RequestRows,
    every_row: bool,
    dtype: torch.dtype = torch.float32,
    seed: int = 3,
    pad: int = 0,
) -> None:
    """One launch: outputs, states and rings as the references leave them, and nothing else touched."""
    weights = weights_of(heads, dtype=dtype)
    inputs = inputs_of(heads, len(rows.positions), seed, dtype, pad)
    if not norms_in_kernel(heads.key_dim, heads.value_dim):
        inputs = without_gate(inputs)
    expected_caches = caches.clone()
    expected = reference(inputs, weights, expected_caches, rows, every_row)
    out = run(inputs, weights, caches, rows, every_row)
    assert_close(out, expected, dtype)
    assert_same_caches(caches, expected_caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_verify_step(rows: int, dtype: torch.dtype) -> None:
    """Every request reads another slot, also one that the step overwrites; one is padding."""
    caches = Caches.random(SMALL, requests=4, slots=8, dtype=dtype)
    slots = [rows - 1, 0, 7, 0]
    requests = [3, -1, 0, 1]
    for request, slot in zip(requests, slots, strict=True):
        if request >= 0:
            caches.move_state(request, slot)
    check(SMALL, caches, request_rows(requests, slots, [7] * 4, rows), every_row=True, dtype=dtype, pad=5)


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("every_row", [True, False])
def test_before_the_text_there_are_zeros(position: int, every_row: bool) -> None:
    caches = Caches.random(SMALL, requests=2, slots=4, position=position)
    check(SMALL, caches, request_rows([1, 0], [0, 0], [position] * 2, 3), every_row)


@pytest.mark.parametrize(("keys", "values", "taps"), [(1, 1, 1), (3, 3, 2), (2, 6, 3), (2, 10, 4)])
def test_head_counts_and_taps(keys: int, values: int, taps: int) -> None:
    heads = Heads(keys=keys, values=values, taps=taps)
    caches = Caches.random(heads, requests=2, slots=2)
    check(heads, caches, request_rows([1, 0], [0, 0], [7, 7], 2), every_row=True)


DIMS = (
    itertools.product(HEAD_DIMS, HEAD_DIMS)
    if DEVICE.type == "cuda"
    else zip(HEAD_DIMS, HEAD_DIMS, strict=True)
)


@pytest.mark.parametrize(("key_dim", "value_dim"), [*DIMS, (32, 256), (256, 16)])
def test_head_dimensions(key_dim: int, value_dim: int) -> None:
    heads = Heads(values=1, key_dim=key_dim, value_dim=value_dim)
    caches = Caches.random(heads, requests=1, slots=2)
    check(heads, caches, request_rows([0], [0], [7], 2), every_row=True)


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 20])
def test_a_chunk_of_a_prompt_leaves_one_state(rows: int) -> None:
    """Shorter than the ring's free places, as long, longer than the ring itself."""
    caches = Caches.random(SMALL, requests=3, slots=4)
    caches.move_state(2, 3)
    check(SMALL, caches, request_rows([2, -1], [3, 0], [7, 7], rows), every_row=False, pad=1)


@pytest.mark.parametrize("every_row", [True, False])
def test_requests_of_unequal_length(every_row: bool) -> None:
    counts = [3, 0, 1, 4, 2] if every_row else [11, 0, 1, 6, 2]
    caches = Caches.random(SMALL, requests=5, slots=4)
    check(SMALL, caches, request_rows([3, 1, 0, -1, 2], [0] * 5, [7] * 5, counts), every_row)


@settings(max_examples=8)
@given(st.data())
def test_random_steps(data: st.DataObject) -> None:
    heads = data.draw(
        st.builds(
            Heads,
            keys=st.just(1),
            values=st.sampled_from([1, 2]),
            key_dim=st.sampled_from([16, 32]),
            value_dim=st.sampled_from([16, 64]),
            taps=st.integers(1, 4),
        )
    )
    slots, requests, every_row = data.draw(st.integers(1, 6)), 3, data.draw(st.booleans())
    position = data.draw(st.integers(0, 20))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    caches = Caches.random(heads, requests, slots, position, dtype, seed=data.draw(st.integers(0, 99)))
    chosen = data.draw(st.permutations(range(requests)))[: data.draw(st.integers(1, requests))]
    chosen = [data.draw(st.sampled_from([request, request, -1])) for request in chosen]
    read_slots = [data.draw(st.integers(0, slots - 1)) for _ in chosen]
    for request, slot in zip(chosen, read_slots, strict=True):
        if request >= 0:
            caches.move_state(request, slot)
    most = slots if every_row else 9
    counts: int | list[int] = data.draw(
        st.one_of(
            st.integers(1, most), st.lists(st.integers(0, most), min_size=len(chosen), max_size=len(chosen))
        )
    )
    if not isinstance(counts, int) and max(counts) == 0:
        counts[0] = 1
    rows = request_rows(chosen, read_slots, [position] * len(chosen), counts)
    check(
        heads,
        caches,
        rows,
        every_row,
        dtype,
        data.draw(st.integers(0, 99)),
        data.draw(st.sampled_from([0, 3])),
    )


def test_rows_one_by_one_give_the_bits_of_a_verify_step() -> None:
    """Outputs, states and rings, whichever slot each row is read from."""
    weights, inputs = weights_of(SMALL), inputs_of(SMALL, 4, seed=5)
    together = Caches.random(SMALL, requests=1, slots=4)
    alone = together.clone()
    out = run(inputs, weights, together, request_rows([0], [0], [7], 4), every_row=True)
    for t in range(4):
        step = rows_slice(inputs, t, t + 1)
        single = run(step, weights, alone, request_rows([0], [0], [7 + t], 1), every_row=True)
        assert torch.equal(single[0], out[t])
        assert torch.equal(alone.state[0, 0], together.state[0, t])
    assert torch.equal(alone.ring.nan_to_num(9.0), together.ring.nan_to_num(9.0))


def test_a_request_gets_the_same_bits_in_every_batch() -> None:
    weights, inputs = weights_of(SMALL), inputs_of(SMALL, 3 * 5, seed=6)
    caches = Caches.random(SMALL, requests=5, slots=3)
    alone = caches.clone()
    out = run(inputs, weights, caches, request_rows([3, 0, 4, 1, 2], [0] * 5, [7] * 5, 3), every_row=True)
    own = run(rows_slice(inputs, 6, 9), weights, alone, request_rows([4], [0], [7], 3), every_row=True)
    assert torch.equal(own, out[6:9])
    assert torch.equal(alone.state[4], caches.state[4])
    assert torch.equal(alone.ring[4].nan_to_num(9.0), caches.ring[4].nan_to_num(9.0))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_rows_leave_no_trace(accepted: int) -> None:
    """Steps of four rows of which some stay end where the rows that stay end one by one."""
    weights = weights_of(SMALL)
    speculative = Caches.random(SMALL, requests=1, slots=4)
    sequential = speculative.clone()
    position, slot = 7, 0
    for step in range(3):
        inputs = inputs_of(SMALL, 4, seed=20 + step)
        rows = request_rows([0], [slot], [position], 4)
        out = run(inputs, weights, speculative, rows, every_row=True)
        for t in range(accepted + 1):
            kept = rows_slice(inputs, t, t + 1)
            single = run(kept, weights, sequential, request_rows([0], [0], [position + t], 1), every_row=True)
            assert torch.equal(single[0], out[t])
        position, slot = position + accepted + 1, accepted
        assert torch.equal(speculative.state[0, slot], sequential.state[0, 0])


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 20])
def test_no_program_writes_what_another_may_still_read(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So their order does not matter: the window stays, and what is written was NaN, which nothing shows."""
    monkeypatch.setattr(module, "store_inputs", lambda *arguments: None)
    caches = Caches.random(SMALL, requests=1, slots=4)
    before = caches.ring.clone()
    out = run(
        inputs_of(SMALL, rows, 0), weights_of(SMALL), caches, request_rows([0], [0], [7], rows), rows <= 4
    )
    assert out.isfinite().all()
    window = [(7 - back) % 7 for back in (1, 2, 3)]
    assert torch.equal(caches.ring[:, window], before[:, window])
    written = [(7 + t) % 7 for t in range(rows)] if rows <= 4 else []
    assert caches.ring[:, written].isfinite().all()
    assert int(caches.ring.isfinite().all(-1).sum()) == 3 + len(written)


@pytest.mark.parametrize("pieces", [(1, 22), (8, 8, 7), (20, 3), (18, 1, 4)])
def test_the_split_of_a_prompt_changes_no_more_than_rounding(pieces: tuple[int, ...]) -> None:
    weights, inputs = weights_of(SMALL), inputs_of(SMALL, 23, seed=8)
    whole = Caches.random(SMALL, requests=1, slots=4, position=0)
    split = whole.clone()
    expected = run(inputs, weights, whole, request_rows([0], [0], [0], 23), every_row=False)
    start, parts = 0, []
    for count in pieces:
        piece = rows_slice(inputs, start, start + count)
        parts.append(run(piece, weights, split, request_rows([0], [0], [start], count), every_row=False))
        start += count
    assert_close(torch.cat(parts), expected)
    assert_close(split.state[0, 0], whole.state[0, 0])
    for back in range(1, 4):
        assert torch.equal(split.ring[0, (23 - back) % 7], whole.ring[0, (23 - back) % 7])


def test_no_requests_and_only_padding_write_nothing() -> None:
    caches = Caches.random(SMALL, requests=2, slots=4)
    before = caches.clone()
    weights = weights_of(SMALL)
    out = run(inputs_of(SMALL, 6, 0), weights, caches, request_rows([-1, -1], [0, 3], [7, 7], 3), True)
    assert (out == 7).all()
    assert run(inputs_of(SMALL, 0, 0), weights, caches, request_rows([], [], [], 1), True).shape[0] == 0
    assert_same_caches(caches, before)


def test_gates_keep_their_precision_where_decay_is_weak() -> None:
    """softplus of -12 is 6e-6: computed as log(1 + e) in FP32 it would be off by one part in a hundred."""
    heads = Heads(values=1)
    weights = replace(weights_of(heads), dt_bias=torch.tensor([-12.0], device=DEVICE))
    weights = replace(weights, a_log=torch.tensor([10.0], device=DEVICE))
    caches = Caches.random(heads, requests=1, slots=1)
    inputs = inputs_of(heads, 1, 0)
    inputs.a.zero_()
    inputs.b.fill_(-200.0)  # nothing is written
    before = caches.state[0, 0].clone()
    run(inputs, weights, caches, request_rows([0], [0], [7], 1), every_row=True)
    decay = torch.exp(
        -torch.tensor(10.0).double().exp() * torch.nn.functional.softplus(torch.tensor(-12.0).double())
    )
    torch.testing.assert_close(
        caches.state[0, 0].double().cpu(), before.double().cpu() * decay, rtol=1e-6, atol=0
    )


def test_states_beyond_two_gibi_elements() -> None:
    """Memory that is never touched costs nothing, so this runs anywhere."""
    heads = Heads(values=1)
    near = Caches.random(heads, requests=1, slots=2)
    requests = 2**31 // near.state[0].numel() + 2
    far = Caches(
        torch.empty(requests, *near.ring.shape[1:], device=DEVICE),
        torch.empty(requests, *near.state.shape[1:], device=DEVICE),
    )
    far.ring[-1], far.state[-1] = near.ring[0], near.state[0]
    weights, inputs = weights_of(heads), inputs_of(heads, 2, 1)
    expected = run(inputs, weights, near, request_rows([0], [0], [7], 2), every_row=True)
    assert torch.equal(run(inputs, weights, far, request_rows([requests - 1], [0], [7], 2), True), expected)
    assert torch.equal(far.state[-1], near.state[0])


def wrong(weights: DeltaWeights) -> dict[str, tuple[dict[str, object], str]]:
    heads, rows = SMALL, request_rows([0, 1], [0, 0], [7, 7], 2)
    inputs, caches = inputs_of(heads, 4, 0), Caches.random(heads, 2, 2)
    odd = Heads(key_dim=24)
    return {
        "rows": ({"rows": request_rows([0, 1], [0, 0], [7, 7], 3)}, "rows"),
        "positions": (
            {"rows": replace(rows, positions=rows.positions.int())}, "positions must be contiguous int64",
        ),
        "lists": ({"rows": replace(rows, first_row=rows.requests)}, "together"),
        "longest": ({"rows": replace(rows, longest=0)}, "at least one row"),
        "slots": (
            {"inputs": inputs_of(heads, 6, 0), "rows": request_rows([0, 1], [0, 0], [7, 7], 3)},
            "3 rows need as many slots, the state has 2",
        ),
        "dim": (
            {"inputs": inputs_of(odd, 4, 0), "weights": weights_of(odd), **vars(Caches.random(odd, 2, 2))},
            "Dk must be one of",
        ),
        "heads": ({"state": caches.state[:, :, :1].contiguous()}, "channels are no"),
        "a": ({"inputs": replace(inputs, a=inputs.a[:, :1])}, "a must be"),
        "z": ({"inputs": replace(inputs, z=inputs.z.half())}, "z must be"),
        "ring": ({"ring": caches.ring.half()}, "the ring is torch.float16"),
        "short ring": ({"ring": caches.ring[:, :3].contiguous()}, "ring has 3 places"),
        "state": ({"state": caches.state.half()}, "state must be float32"),
        "taps": (
            {"weights": replace(weights, conv=torch.zeros(heads.channels, 5, device=DEVICE))}, "at most 4",
        ),
        "conv": ({"weights": replace(weights, conv=weights.conv[:-1])}, "convolution weight"),
        "norm": ({"weights": replace(weights, norm=weights.norm[:-1])}, "norm must be contiguous"),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong(weights_of(SMALL)))
def test_wrong_inputs_are_refused(name: str) -> None:
    weights, caches = weights_of(SMALL), Caches.random(SMALL, 2, 2)
    changes, message = wrong(weights)[name]
    arguments: dict[str, object] = {
        "inputs": inputs_of(SMALL, 4, 0),
        "weights": weights,
        "ring": caches.ring,
        "state": caches.state,
        "rows": request_rows([0, 1], [0, 0], [7, 7], 2),
        "every_row": True,
    }
    with pytest.raises(InputError, match=message) as caught:
        gated_delta_triton(**(arguments | changes))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_heads_too_large_to_normalise_are_refused_with_a_gate() -> None:
    heads = Heads(values=1, key_dim=256, value_dim=256)
    caches = Caches.random(heads, 1, 1)
    with pytest.raises(InputError, match="leave out z"):
        run(inputs_of(heads, 1, 0), weights_of(heads), caches, request_rows([0], [0], [7], 1), True)


def test_any_cut_of_a_head_gives_its_rows() -> None:
    caches, rows = Caches.random(SMALL, 1, 2), request_rows([0], [0], [7], 2)
    inputs, weights = without_gate(inputs_of(SMALL, 2, 0)), weights_of(SMALL)
    expected_caches = caches.clone()
    expected = reference(inputs, weights, expected_caches, rows, every_row=True)
    arguments = (inputs, weights, caches.ring, caches.state, rows, True)
    assert_close(gated_delta_triton(*arguments, config=DeltaConfig(8, 1)), expected)
    assert_same_caches(caches, expected_caches)
    with pytest.raises(InputError, match="columns must divide"):
        gated_delta_triton(*arguments, config=DeltaConfig(24, 1))
