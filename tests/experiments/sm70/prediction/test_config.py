from __future__ import annotations

from typing import Any

import pytest

from page4.experiments.config import load_config
from page4.experiments.sm70.prediction.cells import cell_label, cell_of, plan_cells
from page4.experiments.sm70.prediction.config import PredictConfig
from page4.kernels.errors import InputError


def test_all_sizes_in_the_first_format_and_one_number_of_requests_in_the_others() -> None:
    cells = plan_cells(PredictConfig())
    assert len(cells) == len(set(cells)) == 2 * 2 * 4 + 5 * 2 * 2
    assert {c.requests for c in cells if c.kv_format == "e4m3"} == {1, 4, 16, 64}
    assert {c.requests for c in cells if c.kv_format != "e4m3"} == {16}
    assert {(c.query_heads, c.kv_heads) for c in cells} == {(6, 1), (24, 2)}
    assert {c.rows for c in cells} == {1, 4}


def test_cells_have_names() -> None:
    cell = plan_cells(PredictConfig())[0]
    assert cell_label(cell_of(cell)) == "16 x 4, 6/1, e4m3"


def test_the_quick_run_is_a_small_one() -> None:
    assert len(plan_cells(load_config(PredictConfig, quick=True))) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"requests": ()}, "requests must name at least one value"),
        ({"requests": (4, 4)}, "requests names a value twice"),
        ({"rows": (0,)}, "rows must be positive"),
        ({"rows": (9,)}, "rows of a step are 1..8"),
        ({"heads": ((6, 4),)}, "query a multiple of KV"),
        ({"formats": ("fp8",)}, "fp8"),
        ({"overlap": 1.5}, "overlap"),
        ({"context": 3}, "do not fit"),
        ({"step_context": 2}, "do not fit"),
        ({"sampled_requests": 0}, "sampled_requests must be at least 1"),
    ],
)
def test_what_no_kernel_can_run_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PredictConfig(**values)
