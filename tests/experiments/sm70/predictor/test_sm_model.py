"""The model on programs that are short enough to time by hand."""

from __future__ import annotations

import numpy as np
import pytest

from page4.experiments.sm70.predictor.launch import BLOCK, EVENT, INSTRUCTION, SECTOR, SECTORS_APART, Traces
from page4.experiments.sm70.predictor.machine import V100
from page4.experiments.sm70.predictor.pipes import ISSUE_CYCLES, Kind, Pipe
from page4.experiments.sm70.predictor.sm_model import Replay, replay

ONE = V100.part(1)


def instruction(
    pipe: Pipe, kind: Kind = Kind.PLAIN, stall: int = 1, sets: int = 7, waits: int = 0, keeps: bool = True
) -> tuple[int, ...]:
    return (pipe, kind, ISSUE_CYCLES[pipe], stall, keeps, sets, 7, waits)


def run(
    program: list[tuple[int, ...]],
    order: list[int],
    sectors: dict[int, list[int]] | None = None,
    *,
    blocks: int = 1,
    warps: int = 1,
    resident: int = 1,
    machine: object = ONE,
    wavefronts: int = 1,
) -> Replay:
    """Every warp of every block executes `order`; `sectors` are those of an event, by its place in it."""
    code = np.array(program, INSTRUCTION)
    events = np.zeros(len(order) * warps + 1, EVENT)
    touched: list[int] = []
    for index in range(len(order) * warps):
        events[index] = (order[index % len(order)], wavefronts, len(touched))
        touched += (sectors or {}).get(index % len(order), [])
    events[-1] = (0, 0, len(touched))
    moved = np.zeros(len(touched), SECTOR)
    moved["address"] = touched
    moved["step_x"] = SECTORS_APART
    launched = np.zeros(blocks, BLOCK)
    launched["x"] = np.arange(blocks)
    traces = Traces(np.arange(warps + 1) * len(order), events, moved)
    return replay(machine, code, traces, launched, warps, resident, 0)  # type: ignore[arg-type]


def test_one_warp_issues_as_its_stalls_say() -> None:
    chain = run([instruction(Pipe.FMA, stall=4)], [0] * 100)
    assert chain.cycles == 99 * 4 + ONE.fixed_latency
    assert chain.issued == 100


def test_a_pipe_takes_two_cycles_for_a_warp() -> None:
    # Two warps of one scheduler are as many instructions a cycle as one warp without stalls.
    independent = run([instruction(Pipe.FMA)], [0] * 100)
    assert independent.cycles == pytest.approx(200, abs=5)
    both = run([instruction(Pipe.FMA, stall=4)], [0] * 100, warps=5)  # warps 0 and 4 share a scheduler
    assert both.cycles == pytest.approx(400, abs=8)
    assert both.busy[Pipe.FMA] == pytest.approx(5 * 200 / 400 / 4, rel=0.05)


def test_schedulers_issue_side_by_side() -> None:
    four = run([instruction(Pipe.FMA)], [0] * 100, warps=4)
    assert four.cycles == pytest.approx(200, abs=5)
    assert four.busy[Pipe.FMA] == pytest.approx(1.0, rel=0.05)


def test_different_pipes_run_at_the_same_time() -> None:
    mixed = run([instruction(Pipe.FMA), instruction(Pipe.ALU)], [0, 1] * 50)
    assert mixed.cycles == pytest.approx(100, abs=5)


def test_shared_memory_is_one_unit_for_all_schedulers() -> None:
    loads = run([instruction(Pipe.LSU, Kind.SHARED)], [0] * 500, warps=4, wavefronts=4)
    assert loads.cycles == pytest.approx(4 * 500 * 4, rel=0.03)
    assert loads.busy[Pipe.LSU] == pytest.approx(1.0, rel=0.03)


def test_a_wait_mask_waits_for_the_result() -> None:
    load = instruction(Pipe.LSU, Kind.GLOBAL_LOAD, sets=2)
    free = run([load, instruction(Pipe.FMA)], [0, 1], {0: [1]})
    waits = run([load, instruction(Pipe.FMA, waits=1 << 2)], [0, 1], {0: [1]})
    other = run([load, instruction(Pipe.FMA, waits=1 << 3)], [0, 1], {0: [1]})
    assert waits.cycles > free.cycles
    assert other.cycles == free.cycles


def test_latency_grows_with_the_distance_of_the_data() -> None:
    load = instruction(Pipe.LSU, Kind.GLOBAL_LOAD, sets=0)
    use = instruction(Pipe.FMA, waits=1)
    from_dram = run([load, use], [0, 1], {0: [1]}).cycles
    again = run([load, use], [0, 1, 0, 1], {0: [1], 2: [1]})
    assert from_dram == pytest.approx(ONE.dram_latency, abs=60)
    assert again.cycles - from_dram == pytest.approx(ONE.l1_latency, abs=10)
    assert again.l1_hits == 0.5
    # Another block on the same multiprocessor finds the first one's L1, on another one only its L2.
    store = instruction(Pipe.LSU, Kind.GLOBAL_STORE)
    from_l2 = run([store, load, use], [0, 1, 2], {0: [1], 1: [1]})
    assert from_l2.cycles == pytest.approx(ONE.l2_latency, abs=20)
    assert from_l2.read_bytes == 0


def test_every_line_that_is_read_writes_a_dirty_one_back() -> None:
    load = instruction(Pipe.LSU, Kind.GLOBAL_LOAD)
    lines = 200
    counted = run([load], [0] * lines, {k: [4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in range(lines)})
    assert counted.read_bytes == counted.written_bytes == 128 * lines


def test_a_stream_reaches_the_bandwidth_of_memory() -> None:
    load = instruction(Pipe.LSU, Kind.GLOBAL_LOAD)
    wait = instruction(Pipe.LSU, Kind.GLOBAL_LOAD, sets=0)
    use = instruction(Pipe.FMA, waits=1)
    order = [0] * 15 + [1, 2]
    sectors = {k: [16 * k + s for s in range(16)] for k in range(16)}
    stream = run([load, wait, use], order, sectors, blocks=1000, resident=16, machine=V100.part(4))
    seconds = stream.cycles / V100.clock_hz
    bandwidth = (stream.read_bytes + stream.written_bytes) / seconds
    assert stream.read_bytes == 1000 * 16 * 512
    assert bandwidth == pytest.approx(V100.dram_bytes_per_second * 4 / 80, rel=0.05)


def test_a_barrier_holds_all_warps_until_the_last() -> None:
    barrier = instruction(Pipe.CONTROL, Kind.BARRIER)
    program = [instruction(Pipe.FMA, stall=15), barrier]
    one = run(program, [0] * 10 + [1] + [0] * 10)
    assert one.cycles == pytest.approx(20 * 15 + ONE.barrier_cycles, abs=16)
    # Twelve warps, three a scheduler: none goes on before the twelfth has arrived.
    many = run(program, [0] * 10 + [1] + [0] * 10, warps=12)
    assert many.cycles == pytest.approx(one.cycles, abs=20)


def test_a_barrier_that_cannot_open_is_reported() -> None:
    # The block's other warp ended: it is not waited for.
    barrier = instruction(Pipe.CONTROL, Kind.BARRIER)
    assert run([barrier, instruction(Pipe.FMA)], [0, 1, 0, 1], warps=2).issued == 8


def test_blocks_take_turns_where_they_do_not_fit() -> None:
    program = [instruction(Pipe.FMA, stall=10)]
    alone = run(program, [0] * 50).cycles
    in_turn = run(program, [0] * 50, blocks=4, resident=1).cycles
    together = run(program, [0] * 50, blocks=4, resident=4).cycles
    assert together == pytest.approx(alone, abs=10)
    assert in_turn == pytest.approx(4 * alone + 3 * ONE.block_start_cycles, rel=0.1)


def test_a_taken_branch_costs_more_than_one_that_falls_through() -> None:
    branch, add = instruction(Pipe.CONTROL, Kind.BRANCH, stall=5), instruction(Pipe.FMA, stall=5)
    straight = run([branch, add, add], [0, 1, 2]).cycles
    jumping = run([branch, add, add], [0, 2, 2]).cycles
    assert jumping - straight == ONE.branch_cycles


def test_a_part_of_the_machine_is_as_fast_for_its_part_of_the_work() -> None:
    load, use = instruction(Pipe.LSU, Kind.GLOBAL_LOAD, sets=0), instruction(Pipe.FMA, waits=1)
    sectors = {0: list(range(16))}
    times = [
        run([load, use], [0, 1], sectors, blocks=40 * n, resident=8, machine=V100.part(n)).cycles
        for n in (4, 16)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.03)
