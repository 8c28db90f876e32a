"""`page4 info`: the tested stacks, and what counts as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from page4.experiments.info import (
    STACKS,
    attention_state,
    checkpoint_state,
    collect_info,
    delta_prefill_state,
    describe,
    stack_name,
)

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints"


@pytest.mark.parametrize("name", STACKS.values())
def test_the_stacks_are_those_that_can_be_installed(name: str) -> None:
    lines = (CONSTRAINTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert stack_name(pins["torch"] + "+cpu", pins["triton"]) == name


def test_other_versions_are_no_tested_stack() -> None:
    assert stack_name("2.13.0", "3.6.0") is None
    assert stack_name("2.13.0", None) is None


def test_a_checkpoint_needs_weights_and_a_configuration(tmp_path: Path) -> None:
    assert checkpoint_state(tmp_path / "none") == {"found": False, "bytes": 0}
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert checkpoint_state(tmp_path) == {"found": False, "bytes": 3}
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert checkpoint_state(tmp_path) == {"found": True, "bytes": 3}


def test_the_recommended_format_has_shipped_scales() -> None:
    record = collect_info()
    assert record["recommended_kv_format"] in record["shipped_scales"]
    lines = dict(describe(record))
    assert lines["recommended of 8 bits"] == record["recommended_kv_format"]
    assert lines["shipped scales"] == ", ".join(record["shipped_scales"])
    assert "not found" in dict(describe(record | {"shipped_scales": []}))["shipped scales"]


def test_kept_prefixes_are_counted_by_format() -> None:
    """At the default interval, pages in e4m3 take about as much as the snapshot after them."""
    state = collect_info()["prefix"]
    pages = {name: size - state["snapshot"] for name, size in state["group"].items()}
    assert pages["e4m3"] == state["interval"] // 16 * state["page"]["e4m3"]
    assert 0.9 < pages["e4m3"] / state["snapshot"] < 1.1
    assert "a snapshot has 119 MB" in dict(describe(collect_info()))["kept prefixes"]


def test_configurations_that_nobody_measured_are_called_predicted() -> None:
    record = collect_info()
    record["attention"] |= {"file": "v100/x.json", "entries": 5, "predicted": 3}
    lines = dict(describe(record))
    assert lines["configurations"] == "5 tuned ones in v100/x.json, 3 of them predicted, not measured"


def test_the_attention_kernel_of_this_machine_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = attention_state()
    if torch.cuda.is_available():
        old = torch.cuda.get_device_capability() < (8, 0)
        assert state["implementation"] == ("triton" if old else "gluon")
    else:
        assert (state["implementation"], state["why"]) == ("triton", "gluon cannot run: it needs a GPU")
        assert (state["file"], state["entries"]) == (None, 0)
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        state = attention_state()
        assert state["implementation"] is None
        assert "needs a GPU" in state["why"]
    lines = dict(describe(collect_info() | {"attention": state}))
    assert lines["attention kernel"] == f"{state['implementation'] or 'none'}: {state['why']}"
    assert ("by rule" in lines["configurations"]) == (state["file"] is None)


def test_the_form_of_the_delta_rule_is_named_with_its_reason() -> None:
    state = delta_prefill_state()
    if torch.cuda.is_available():
        old = torch.cuda.get_device_capability() < (8, 0)
        assert state["form"] == ("scan" if old else "chunk")
    else:
        assert state == {"form": None, "why": "it needs a GPU"}
    line = dict(describe(collect_info()))["delta rule of prompts"]
    assert line == f"{state['form'] or 'none'}: {state['why']}"
