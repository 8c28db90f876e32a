"""What tables and figures say of a study: no promise of intervals that are not there."""

from __future__ import annotations

import pytest

from page4.experiments.quant_error import QuantErrorConfig
from page4.experiments.quant_error.notes import intervals, scale_rules
from page4.experiments.statistics import LEAST_CLUSTERS


@pytest.mark.parametrize(
    ("num_prompts", "said"),
    [
        (LEAST_CLUSTERS, "bars: 95 % bootstrap intervals over 6 prompts"),
        (LEAST_CLUSTERS - 1, "fewer than 6 prompts: too few for intervals, and to conclude from"),
    ],
)
def test_intervals_are_named_where_there_are_any(num_prompts: int, said: str) -> None:
    assert intervals(QuantErrorConfig(num_prompts=num_prompts), "bars") == said


def test_rules_are_explained_where_an_arm_has_one() -> None:
    several = QuantErrorConfig(formats=("int8", "e4m3"), rules=("percentile", "mse"), percent=99.0)
    assert scale_rules(several, several.arms) == (
        "names end in the rule of static scales: percentile clips nothing up to 99 %; "
        "mse has the least squared error"
    )
    assert scale_rules(several, several.arms[:1]) == ""  # int8 alone
