"""Configurations of the study: defaults by device, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from page4.experiments.acceptance import AcceptanceConfig
from page4.experiments.config import config_to_dict, load_config
from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED
from page4.spec_decode import SamplingOptions


def test_default_arms_are_baseline_treated_and_control() -> None:
    config = AcceptanceConfig()
    assert (config.baseline.name, config.baseline.formats) == ("fp16", ("fp16", "fp16"))
    assert [arm.name for arm in config.treated] == ["e4m3", RECOMMENDED]
    assert [arm.name for arm in config.controls] == ["fp16_again"]
    assert config.treated[0].nonce_id == config.baseline.nonce_id != config.controls[0].nonce_id


def test_device_decides_what_was_left_open_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert AcceptanceConfig(device="cpu").resolve().lengths == (1024, 2048, 4096, 8192, 16384)
    resolved = AcceptanceConfig(num_prompts=7).resolve()
    assert (resolved.device, resolved.num_prompts) == ("cuda", 7)
    assert resolved.lengths == (1024, 2048, 4096, 8192, 16384, 32768)
    assert resolved.resolve() == resolved
    assert (
        None
        not in {k: v for k, v in config_to_dict(resolved).items() if k not in ("model", "prompts")}.values()
    )


def test_cuda_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert AcceptanceConfig().resolve().device == "cpu"
    with pytest.raises(InputError, match="cuda"):
        AcceptanceConfig(device="cuda").resolve()


def test_quick_is_smaller_in_every_way() -> None:
    quick, full = (
        load_config(AcceptanceConfig, quick=True).resolve(),
        AcceptanceConfig(device="cpu").resolve(),
    )
    assert quick.lengths is not None and full.lengths is not None
    assert sum(quick.lengths) < sum(full.lengths) / 10
    assert (quick.rounds_per_prompt or 0) < (full.rounds_per_prompt or 0)


def test_a_prompt_has_the_same_luck_in_every_arm_and_another_seed_other_luck() -> None:
    config = AcceptanceConfig(temperature=1.0, seed=2)
    assert (
        config.sampling(5)
        == config.sampling(5)
        == SamplingOptions(1.0, seed=config.sampling(5).seed, sample_drafts=True)
    )
    others = [config.sampling(6), dataclasses.replace(config, seed=3).sampling(5)]
    assert config.sampling(5).seed not in [options.seed for options in others]
    assert not AcceptanceConfig().sampling(5).samples


def test_arms_can_be_given_on_the_command_line() -> None:
    arms = "arms=[[a, fp16, fp16, 0], [b, e4m3, fp16, 0], [c, int8, int8, 0], [d, e5m2, e3m4, 0]]"
    config = load_config(AcceptanceConfig, overrides=[arms])
    assert [(arm.name, arm.formats) for arm in config.all_arms] == [
        ("a", ("fp16", "fp16")),
        ("b", ("e4m3", "fp16")),
        ("c", ("int8", "int8")),
        ("d", ("e5m2", "e3m4")),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ()}, "at least one arm"),
        ({"arms": (("a", "fp17", "fp16", 0),)}, "'fp17' is unknown"),
        ({"arms": (("a", "fp16", "e9m9", 0),)}, "'e9m9' is unknown"),
        ({"arms": (("a", "fp16", "fp16", 0), ("a", "e4m3", "e4m3", 0))}, "a name of its own"),
        ({"arms": (("a", "fp16", "fp16", 0), ("b", "e4m3", "e4m3", 1))}, "would have two causes"),
        ({"lengths": ()}, "positive and ascending, got none"),
        ({"lengths": (0, 5)}, "positive and ascending, got 0, 5"),
        ({"lengths": (64, 32)}, "positive and ascending, got 64, 32"),
        ({"lengths": (64, 64)}, "positive and ascending"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be 1 to"),
        ({"num_draft_tokens": 9}, "num_draft_tokens must be 1 to"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
        ({"rounds_per_prompt": 0}, "rounds_per_prompt must be at least 1"),
        ({"round_stride": 0}, "round_stride must be at least 1"),
        ({"batch_size": -1}, "batch_size must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"generation_tokens": 0}, "generation_tokens must be at least"),
        ({"resamples": 5}, "resamples must be at least 100"),
        ({"temperature": -1.0}, "temperature is -1.0, expected 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"confidence": 1.0}, "confidence must lie between 0 and 1"),
        ({"max_repeated_4grams": 1.5}, "max_repeated_4grams must be between 0 and 1"),
    ],
)
def test_impossible_configurations_are_input_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AcceptanceConfig(**changes)
