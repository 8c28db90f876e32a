"""The shipped scales in a study: each arm's formats get those of their own overlays."""

from __future__ import annotations

from typing import Any

import pytest

from page4.experiments.acceptance import AcceptanceConfig
from page4.experiments.acceptance.scales import arm_scales, overlay_scales
from page4.experiments.info import CHECKPOINT, OVERLAYS
from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED
from page4.model import Qwen4ExpConfig
from page4.model.kv_scales import load_overlay

BASELINE = ("fp16", "fp16", "fp16", 0)


def with_arms(*formats: tuple[str, str]) -> AcceptanceConfig:
    arms: Any = [(f"arm {i}", *pair, 0) for i, pair in enumerate(formats)]
    return AcceptanceConfig(arms=(BASELINE, *arms), scales="shipped")


def test_arms_of_all_shipped_formats_get_their_own() -> None:
    formats = [
        ("e4m3", "e4m3"),
        (RECOMMENDED, RECOMMENDED),
        ("e4m3", RECOMMENDED),
        (f"{RECOMMENDED},3:fp16", "e4m3"),
        ("int8", "int8"),
    ]
    config, layers = with_arms(*formats), Qwen4ExpConfig.from_file(CHECKPOINT / "config.json").qsa_layers
    found = overlay_scales(config, CHECKPOINT)
    assert set(found) == {"e4m3", RECOMMENDED}
    baseline, *arms, computing = config.all_arms
    for arm in arms:
        assert arm_scales(arm, layers, found) == load_overlay(OVERLAYS, CHECKPOINT, *arm.formats)
    assert arm_scales(baseline, layers, found) is arm_scales(computing, layers, found) is None


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (("e3m4", "e3m4"), "made for e4m3 and e2m5, the target's KV format is e3m4"),
        (("e4m3", "e5m2"), "the draft's KV format is e5m2"),
        (("int8", "int8"), "no arm has a format with static scales"),
    ],
)
def test_an_arm_without_shipped_scales_is_refused(formats: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        overlay_scales(with_arms(formats), CHECKPOINT)
