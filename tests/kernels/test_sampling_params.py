"""Parameters of sampling: what is off by default, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from page4.kernels.errors import InputError
from page4.kernels.sampling_params import SamplingParams


def test_defaults_are_off() -> None:
    params = SamplingParams.of([0.0, 0.5])
    assert params.scale.tolist() == pytest.approx([0.0, 2 / math.log(2)])
    assert params.draft_scale.tolist() == [0, 0] and not params.samples_drafts
    assert params.top_k.tolist() == [0, 0] and params.top_p.tolist() == [1, 1]
    assert params.log2_min_p.tolist() == [-math.inf, -math.inf]


def test_one_sampled_draft_needs_distributions() -> None:
    assert SamplingParams.of([1.0, 1.0], draft_temperature=[0.0, 0.7]).samples_drafts


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"temperature": [-1.0]}, "temperature is -1.0"),
        ({"temperature": [1e-5]}, "temperature is 1e-05"),
        ({"temperature": [1e5]}, r"temperature is 100000.0, expected 0 \(greedy\) or 0.0001 to 10000"),
        ({"temperature": [1e300]}, "temperature is 1e.300"),
        ({"temperature": [math.nan]}, "temperature is nan"),
        ({"temperature": [math.inf]}, "temperature is inf"),
        ({"draft_temperature": [-0.5]}, "temperature is -0.5"),
        ({"top_k": [-1]}, "top_k is -1"),
        ({"top_p": [0.0]}, "top_p is 0.0"),
        ({"top_p": [math.nan]}, "top_p is nan"),
        ({"min_p": [1.5]}, "min_p is 1.5"),
        ({"seed": [2**63]}, "seed"),
        ({"top_k": [1, 2]}, "top_k has 2 values for 1"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        SamplingParams.of(**({"temperature": [1.0]} | wrong))
