"""Which shapes are measured: those with goals, and sweeps along axes or over all combinations."""

from __future__ import annotations

import pytest

from page4.experiments.bench.cells import plan_cells, shape_label
from page4.experiments.bench.config import KERNELS, BenchConfig
from page4.experiments.bench.goals import GOALS
from tests.experiments.bench.small_bench import small_config


def test_every_goal_has_a_cell() -> None:
    cells = [cell.columns for cell in plan_cells(BenchConfig())]
    for goal in GOALS:
        assert any(goal.applies(columns) for columns in cells), goal


def test_cells_with_goals_come_first_and_none_twice() -> None:
    cells = plan_cells(BenchConfig())
    assert len({cell.key for cell in cells}) == len(cells)
    with_goals = plan_cells(BenchConfig(sweep="none"))
    assert cells[: len(with_goals)] == with_goals
    assert {cell.kernel for cell in with_goals} == set(KERNELS)


def test_every_e4m3_goal_has_its_partner_in_fp16() -> None:
    keys = {cell.key for cell in plan_cells(BenchConfig(sweep="none"))}
    for cell in plan_cells(
        BenchConfig(sweep="none", kernels=("page4_attention", "planned_attention", "prefill"))
    ):
        assert tuple({**cell.columns, "kv_format": "fp16"}.values()) in keys


def test_an_axis_leaves_the_centre_alone() -> None:
    config = small_config(
        kernels=("planned_attention",), requests=(2, 1), contexts=(70, 90, 110), formats=("e4m3", "fp16")
    )
    shapes = [cell.shape for cell in plan_cells(config)]
    centre = (2, 70, "e4m3")
    got = [(shape.requests, shape.context, shape.kv_format) for shape in shapes]
    assert got == [centre, (1, 70, "e4m3"), (2, 90, "e4m3"), (2, 110, "e4m3"), (2, 70, "fp16")]


def test_a_product_has_all_combinations() -> None:
    config = small_config(
        kernels=("planned_attention",),
        requests=(2, 1),
        contexts=(70, 90),
        formats=("e4m3", "fp16"),
        sweep="product",
    )
    assert len(plan_cells(config)) == 8


def test_a_kernel_ignores_axes_that_it_does_not_know() -> None:
    config = small_config(
        kernels=("index_scores", "block_select"), formats=("e4m3", "fp16"), heads=((4, 2), (2, 1)),
        overlaps=(0.5, 1.0), sweep="product",
    )  # fmt: skip
    cells = plan_cells(config)
    assert [cell.label for cell in cells] == [
        "index_scores 2 x 3, 70",
        "block_select 2 x 3, 70, 0.5",
        "block_select 2 x 3, 70, 1",
    ]
    assert cells[0].columns["kv_format"] == "" and cells[0].columns["overlap"] is None


def test_prompts_are_one_request_whose_rows_are_its_context() -> None:
    cells = plan_cells(small_config(kernels=("prefill",), prefill_lengths=(16, 24)))
    assert [(c.shape.requests, c.shape.rows, c.shape.context) for c in cells] == [(1, 16, 16), (1, 24, 24)]
    assert all(cell.shape.rows_per_group == 8 for cell in cells)


@pytest.mark.parametrize(
    ("changes", "label"),
    [({}, "2 x 3, 4/2, 70, 0.5, e4m3"), ({"contexts": (262144,)}, "2 x 3, 4/2, 256k, 0.5, e4m3")],
)
def test_labels_say_the_shape(changes: dict[str, tuple[int, ...]], label: str) -> None:
    (cell,) = plan_cells(small_config(kernels=("planned_attention",), **changes))
    assert shape_label(cell.columns) == label
