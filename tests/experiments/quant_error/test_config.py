"""The configuration: which arms and windows there are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from page4.experiments.quant_error import Arm, QuantErrorConfig
from page4.experiments.quant_error.config import Window
from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED


def test_a_format_with_static_scales_is_an_arm_per_rule() -> None:
    config = QuantErrorConfig(formats=("int8", "e3m4"), rules=("mse", "max"))
    assert config.arms == (Arm("int8", None), Arm("e3m4", "mse"), Arm("e3m4", "max"))
    assert [arm.name for arm in config.arms] == ["int8", "e3m4-mse", "e3m4-max"]
    assert len(QuantErrorConfig().arms) == 14


def test_a_quick_study_has_the_recommended_format() -> None:
    assert RECOMMENDED in QuantErrorConfig.QUICK["formats"]


def test_buckets_tile_the_longest_prompts_and_double() -> None:
    config = QuantErrorConfig(lengths=(100, 700), first_bucket=128, scored_tokens=50)
    assert config.buckets == [(0, 128), (128, 256), (256, 512), (512, 700)]
    assert config.windows(100) == [Window(50, 100)]
    assert config.windows(700) == [Window(650, 700), *config.buckets]


def test_a_window_that_is_a_bucket_too_is_there_once() -> None:
    config = QuantErrorConfig(lengths=(64,), first_bucket=32, scored_tokens=32)
    assert config.windows(64) == [Window(32, 64), Window(0, 32)]
    assert config.scored(16) == Window(0, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ()}, "formats must be different and at least one, got"),
        ({"formats": ("fp16", "fp16")}, "formats must be different and at least one, got fp16, fp16"),
        ({"formats": ("e4m4",)}, "KV format 'e4m4' is unknown, expected one of"),
        ({"rules": ("max", "max")}, "rules must be different"),
        ({"lengths": (64, 32)}, r"lengths must be positive and ascending, got 64, 32"),
        ({"lengths": ()}, "lengths must be positive and ascending"),
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"selection_stride": 0}, "selection_stride must be at least 1, got 0"),
        ({"percent": 0.0}, "percent must be above 0 and at most 100"),
        ({"confidence": 1.0}, "confidence must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        QuantErrorConfig(**changes)
