"""The gate before every time: real kernels pass it, and wrong ones do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from page4.experiments.bench import (
    attention_case,
    gated_delta_case,
    prepare_case,
    selection_case,
    verify_case,
)
from page4.experiments.bench.cells import Cell, plan_cells
from page4.experiments.bench.config import BenchConfig, Kernel
from page4.experiments.bench.copies import NoRoomError, choose_copies
from page4.experiments.bench.machine import Launches
from page4.experiments.bench.measure import CASES, COLUMNS, measure
from page4.experiments.bench.prepare_case import prepare_bytes
from page4.experiments.bench.warmup import compile_tasks, hollow_attention, run_tasks
from page4.experiments.gpu_timing import Timing
from page4.experiments.progress import Silent
from page4.kernels.page4_attention_dispatch import page4_attention
from tests.experiments.bench.small_bench import DEVICE, clock, small_config, small_machine

# On a GPU the model gets other kernels: test_on_gpu.py.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")


def cell_of(kernel: Kernel, **changes: Any) -> tuple[Cell, BenchConfig]:
    config = small_config(kernels=(kernel,), implementations=("triton",), **changes)
    return plan_cells(config)[-1], config


def never(launches: Launches) -> Timing:
    raise AssertionError("a wrong kernel was timed")


@pytest.mark.parametrize("kernel", list(CASES))
@pytest.mark.parametrize("kv_format", ["e4m3", "int8"])
def test_a_right_kernel_gets_a_time(kernel: Kernel, kv_format: str) -> None:
    cell, config = cell_of(kernel, formats=(kv_format,), requests=(1,), rows=(2,))
    (row,), absent = measure(cell, config, small_machine(cold_copies=lambda bytes_per_launch: 1))
    assert set(row) == set(COLUMNS)
    assert row["status"] == "ok" and row["error"] <= 1 and row["chosen"]
    assert row["median_us"] > 0 and row["samples"] == row["copies"] == 1
    assert row["floor_fraction"] == pytest.approx(row["floor_us"] / row["median_us"])
    assert row["floor_us"] == pytest.approx(1e6 * row["floor_bytes"] / row["copy_bandwidth"])
    assert absent == []


def scaled_attention(*args: Any, **kwargs: Any) -> Any:
    """The real kernel, two percent too large."""
    out, lse = page4_attention(*args, **kwargs)
    out.mul_(1.02)
    return out, lse


def shifted_plan(real: Callable[..., Any]) -> Callable[..., Any]:
    """The real selection, with one bit of one mask flipped."""

    def wrong(*args: Any) -> Any:
        plan = real(*args)
        plan.masks[0, 2] ^= 1
        return plan

    return wrong


def nudged_scores(real: Callable[..., Any]) -> Callable[..., Any]:
    """The real scores, one of them off by a hundredth."""

    def wrong(**kwargs: Any) -> Any:
        scores = real(**kwargs)
        scores[0, 3] += 0.01
        return scores

    return wrong


def smudged(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """The real K/V write, with one value of one part changed."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        q, index_q = real(*args, **kwargs)
        storage, rows = kwargs["storage"], kwargs["rows"]
        page, offset = divmod(int(rows.slots[0]), 16)
        if part == "q":
            q[0, 1, 3] += 0.05
        elif part == "index_q":
            index_q[0, 0, 0] = torch.nan
        elif part == "k":
            storage.k_pages[page, 0, offset, 5] += 2  # two codes further
        elif part == "v":
            storage.v_pages[page, 0, offset, 5] ^= 1
        elif part == "ring":
            storage.ring[0, int(rows.positions[0]) % storage.ring.shape[1], 2] += 0.01
        else:
            storage.compressed_pages[int(rows.block_tables[0, 0]), 1, 4] += 0.02
        return q, index_q

    return wrong


def nudged_delta(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """The real layer, with one number of an output, of the last state or of the ring a little off."""

    def wrong(*, state: Any, rows: Any, ring: Any, **kwargs: Any) -> Any:
        out = real(state=state, rows=rows, ring=ring, **kwargs)
        if part == "out":
            out[-1, 3] += 0.01 * out[-1].float().square().mean().sqrt()
        elif part == "state":
            written = state[-1, rows.longest - 1]
            written[0, 7, 3] += 1e-5 * written.square().mean().sqrt()
        else:
            ring[-1, int(rows.positions[-1]) % ring.shape[1], -1] += 0.01
        return out

    return wrong


def nudged_prompt(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """The real layer on a prompt, with one number a little off."""

    def wrong(*, state: Any, ring: Any, **kwargs: Any) -> Any:
        out = real(state=state, ring=ring, **kwargs)
        if part == "out":
            out[3, 5] += 0.01 * out[3].float().square().mean().sqrt()
        elif part == "state":
            state[0, 0, 1, 7, 3] += 1e-4 * state[0, 0].square().mean().sqrt()
        else:
            ring[0, 2, -1] += 0.01
        return out

    return wrong


def lost_draft(real: Callable[..., Any]) -> Callable[..., Any]:
    """The real verification, which counts one draft too many or too few of the last request."""

    def wrong(*args: Any, accepted: Any, **kwargs: Any) -> Any:
        results = real(*args, accepted=accepted, **kwargs)
        accepted[-1] ^= 1
        return results

    return wrong


WRONG: list[tuple[Kernel, Any, str, Callable[[Any], Any]]] = [
    ("page4_attention", attention_case, "page4_attention", lambda real: scaled_attention),
    ("planned_attention", attention_case, "page4_attention", lambda real: scaled_attention),
    ("planned_attention", attention_case, "plan_selected_triton", shifted_plan),
    ("prefill", attention_case, "page4_attention", lambda real: scaled_attention),
    ("index_scores", selection_case, "index_scores_triton", nudged_scores),
    ("block_select", selection_case, "select_plan_triton", shifted_plan),
    ("mtp_verify", verify_case, "verify_triton", lost_draft),
    ("mtp_verify_sampled", verify_case, "verify_triton", lost_draft),
    ("mtp_verify_filtered", verify_case, "verify_triton", lost_draft),
    *(
        (
            "gated_delta",
            gated_delta_case,
            "gated_delta_triton",
            lambda real, part=part: nudged_delta(part, real),
        )
        for part in ("out", "state", "ring")
    ),
    *(
        (
            "gated_delta_prefill",
            gated_delta_case,
            "prefill_gated_delta",
            lambda real, part=part: nudged_prompt(part, real),
        )
        for part in ("out", "state", "ring")
    ),
    *(
        ("qsa_prepare", prepare_case, "qsa_prepare_triton", lambda real, part=part: smudged(part, real))
        for part in ("q", "index_q", "k", "v", "ring", "compressed")
    ),
]


@pytest.mark.parametrize(("kernel", "module", "name", "spoil"), WRONG)
def test_a_wrong_kernel_gets_no_time(
    kernel: Kernel, module: Any, name: str, spoil: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    cell, config = cell_of(kernel, requests=(1,), prepare_rows=(9,), rows=(2,))
    if kernel == "qsa_prepare":
        cell = plan_cells(config)[0]  # a prompt: it completes blocks
    (row,), _ = measure(cell, config, small_machine(timer=never))
    assert row["status"] == "wrong"
    assert row["median_us"] is None and row["floor_fraction"] is None
    assert row["error"] > 1


@pytest.mark.parametrize("kernel", ["mtp_verify", "mtp_verify_sampled", "mtp_verify_filtered"])
def test_every_chosen_request_is_verified(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_case, "_AT_ONCE", 2)
    cell, config = cell_of(kernel, requests=(3,), rows=(2,), check_groups=0)
    (row,), _ = measure(cell, config, small_machine())
    assert (row["status"], row["checked_groups"], row["groups"]) == ("ok", 3, 3)
    monkeypatch.setattr(verify_case, "verify_triton", lost_draft(verify_case.verify_triton))
    (row,), _ = measure(cell, config, small_machine(timer=never))
    assert row["status"] == "wrong"


def test_a_prompt_is_scanned_for_comparison() -> None:
    config = small_config(kernels=("gated_delta_prefill",))
    (cell,) = plan_cells(config)
    chunk, scan = measure(cell, config, small_machine(cold_copies=lambda bytes_per_launch: 1))[0]
    assert (chunk["implementation"], scan["implementation"]) == ("triton", "scan")
    assert chunk["chosen"] and not scan["chosen"]
    assert chunk["config"].startswith("chunk: ") and scan["config"].startswith("scan: ")
    assert chunk["status"] == scan["status"] == "ok" and chunk["error"] <= 1
    assert (cell.shape.requests, cell.shape.rows, cell.shape.context) == (1, 16, 16)


@pytest.mark.parametrize("context", [2, 3, 4])
def test_a_recurrent_step_at_the_start_of_the_text_has_no_past(context: int) -> None:
    cell, config = cell_of("gated_delta", requests=(1,), rows=(2,), contexts=(context,), topk=1)
    (row,), _ = measure(cell, config, small_machine())
    assert row["status"] == "ok"


def test_a_kernel_that_does_not_run_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: Any, **kwargs: Any) -> Any:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(attention_case, "page4_attention", too_large)
    config = small_config(kernels=("page4_attention",), implementations=("triton", "pytorch"))
    (cell,) = plan_cells(config)
    (own, baseline), _ = measure(cell, config, small_machine())
    assert own["status"] == "failed" and own["median_us"] is None
    assert "300000" in own["config"] and "shared memory" in own["config"]
    assert baseline["status"] == "ok"


def test_implementations_that_cannot_run_are_named() -> None:
    config = small_config(kernels=("page4_attention",), formats=("int8",))
    (cell,) = plan_cells(config)
    rows, absent = measure(cell, config, small_machine())
    assert [row["implementation"] for row in rows] == ["triton", "pytorch"]
    assert [row["chosen"] for row in rows] == [True, False]
    reasons = {row["implementation"]: row["reason"] for row in absent}
    assert set(reasons) == {"gluon", "vllm"}
    assert "gluon" in reasons["gluon"]


def test_a_cell_without_room_is_a_row_without_time() -> None:
    cell, config = cell_of("planned_attention")
    (row,), _ = measure(cell, config, small_machine(memory_bytes=10_000))
    assert row["status"] == "no room" and row["median_us"] is None
    assert "GiB" in row["config"]


@pytest.mark.parametrize(
    ("wanted", "memory", "limit", "expected"),
    [(5, 100, 9, (5, True)), (5, 30, 9, (3, False)), (5, 100, 4, (4, False)), (1, 10, 1, (1, True))],
)
def test_copies_stop_at_the_memory_and_the_limit(
    wanted: int, memory: int, limit: int, expected: tuple[int, bool]
) -> None:
    machine = small_machine(cold_copies=lambda bytes_per_launch: wanted, memory_bytes=memory)
    assert choose_copies(machine, 1, 10, limit) == expected
    with pytest.raises(NoRoomError, match="one copy of the inputs takes"):
        choose_copies(machine, 1, memory + 1, limit)


def test_bytes_of_a_write_by_hand() -> None:
    cell, _ = cell_of("qsa_prepare", requests=(2,), rows=(4,), heads=((6, 2),))
    shape = dataclasses.replace(cell.shape, context=64)  # each request completes its 16th block
    queries = 2 * (6 * 32 * 2)
    keys_and_values = 2 * (2 * 32 * 2) + 2 * (2 * 32 * 1)  # read in FP16, written in bytes
    index = 4 * 128 * 2 + 128 * 2 + 4 * 128 * 2  # queries in, key in, queries out
    kept = 4 * 128 * 2 * 2 + 128 * 2 * 2  # per request: four ring rows, one compressed key
    assert prepare_bytes(shape) == 8 * (queries + keys_and_values + index) + kept


def test_hollow_inputs_look_like_the_real_ones() -> None:
    for kernel in ("page4_attention", "prefill"):
        cell, _ = cell_of(kernel)  # type: ignore[arg-type]
        (real,) = attention_case.attention_copies(cell.shape, DEVICE)
        hollow = hollow_attention(cell.shape, DEVICE)
        assert hollow.q.shape == real.q.shape and hollow.q.dtype == real.q.dtype
        assert hollow.q.stride() == real.q.stride() and hollow.gate_strides == real.gate_strides
        assert hollow.plan.blocks.shape == real.plan.blocks.shape
        assert hollow.block_tables.shape == real.block_tables.shape
        assert hollow.k_pages.shape[1:] == real.k_pages.shape[1:]
        out, _ = page4_attention(hollow, "triton", out=torch.full(real.q.shape, 7.0).half().to(DEVICE))
        assert (out == 7).all()  # no row, nothing written


def test_every_kernel_is_compiled_once() -> None:
    config = small_config(implementations=("triton",), requests=(2, 1), formats=("e4m3", "int8"))
    tasks = compile_tasks(plan_cells(config), config, DEVICE)
    kinds = [key[0] for key in tasks]
    assert kinds.count("block_select") == 1
    # The number of rows may decide the configuration: a prompt and two steps, the first two in two formats.
    assert kinds.count("qsa_prepare") == 5 and kinds.count("index_scores") == 2
    seen: list[str] = []

    class Count(Silent):
        def advance(self, description: str = "", steps: int = 1) -> None:
            seen.append(description)

    run_tasks(tasks.values(), DEVICE, Count())
    assert seen == ["compiled"] * len(tasks)


def test_a_defect_of_a_launch_is_not_swallowed() -> None:
    def broken() -> None:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        run_tasks([broken], DEVICE, Silent())


def test_the_clock_of_the_tests_measures() -> None:
    assert clock([lambda: sum(range(100_000))]).median_us > clock([lambda: None]).median_us
