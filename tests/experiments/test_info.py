"""`page4 info`: the tested stacks, and what counts as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from page4.experiments.info import STACKS, checkpoint_state, stack_name

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
