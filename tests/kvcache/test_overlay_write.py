"""An overlay appears whole or not at all, and nothing else changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from page4.kernels.errors import InputError
from page4.kvcache import ScalePair, overlay_write
from page4.kvcache.overlay import read_overlay
from page4.kvcache.overlay_manifest import PROVENANCE_FILE
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE
from page4.kvcache.overlay_write import Sourced, materialise
from page4.kvcache.scales import UNIT_SCALES
from tests.kvcache.overlays import BASE

TARGET = Sourced("calibration", {1: ScalePair(0.5, 0.25), 3: ScalePair(0.125, 2.0)})
DRAFT = Sourced("calibration", {None: ScalePair(0.75, 1.5)})
NONE = Sourced("none", {})


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_what_is_written_is_read_back(tmp_path: Path, prefix: str) -> None:
    base = dataclasses.replace(BASE, prefix=prefix)
    folder = tmp_path / "deep" / "overlay"
    written = materialise(folder, base, "e4m3", TARGET, DRAFT, {"why": "a test"})
    assert written == read_overlay(folder, base)
    assert (written.target, written.draft) == (TARGET.pairs, DRAFT.pairs[None])
    found = {
        name: float(array)
        for file in (TARGET_FILE, DRAFT_FILE)
        for name, array in load_file(folder / file).items()
    }
    assert found[f"{prefix}layers.3.self_attn.v_scale"] == 2.0
    assert found["mtp.layers.0.self_attn.k_scale"] == 0.75 and len(found) == 6
    assert json.loads((folder / PROVENANCE_FILE).read_text()) == {"why": "a test"}
    assert [file.name for file in folder.parent.iterdir()] == ["overlay"]


def test_prototypes_are_labelled(tmp_path: Path) -> None:
    unit = Sourced("unit", dict.fromkeys(BASE.layers, UNIT_SCALES))
    assert materialise(tmp_path / "unit", BASE, "e4m3", unit, DRAFT, {}).manifest.prototype
    assert not materialise(tmp_path / "right", BASE, "e4m3", TARGET, NONE, {}).manifest.prototype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_format": "fp16"}, "has no static scales"),
        ({"kv_format": "int8"}, "has no static scales"),
        ({"target": NONE, "draft": NONE}, "both target and draft have none"),
        ({"target": Sourced("calibration", {1: ScalePair(1, 1)})}, "1 of 2 QSA layers"),
        ({"target": Sourced("calibration", {2: ScalePair(1, 1)})}, "has no K/V in layer 2"),
        ({"base": dataclasses.replace(BASE, has_draft=False)}, "has no K/V in the draft layer"),
        ({"base": dataclasses.replace(BASE, dynamic_scales="x: true")}, "computes KV scales as it runs"),
        (
            {"base": dataclasses.replace(BASE, tensors=frozenset({"model.layers.1.self_attn.k_scale"}))},
            "collides",
        ),
    ],
)
def test_a_refusal_leaves_nothing_behind(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    given = {
        "base": BASE,
        "kv_format": "e4m3",
        "target": TARGET,
        "draft": DRAFT,
        "provenance": {},
    } | arguments
    with pytest.raises(InputError, match=message):
        materialise(tmp_path / "overlay", **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "dangling link"])
def test_nothing_is_written_over(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "overlay"
    if kind == "file":
        target.write_text("kept")
    elif kind == "dangling link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
    if kind == "folder":
        (target / "kept").touch()
    with pytest.raises(InputError, match="exists already; nothing is written over it"):
        materialise(target, BASE, "e4m3", TARGET, DRAFT, {})
    assert [file.name for file in tmp_path.iterdir()] == ["overlay"]
    assert kind != "file" or target.read_text() == "kept"
    assert kind != "folder" or [file.name for file in target.iterdir()] == ["kept"]


@pytest.mark.parametrize("broken", ["_write", "read_overlay"])
def test_a_failure_on_the_way_leaves_nothing_behind(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(overlay_write, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        materialise(tmp_path / "overlay", BASE, "e4m3", TARGET, DRAFT, {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def appear(*arguments: Any) -> Any:
        (tmp_path / "overlay").mkdir()
        return read_overlay(*arguments)

    monkeypatch.setattr(overlay_write, "read_overlay", appear)
    with pytest.raises(InputError, match="has appeared meanwhile"):
        materialise(tmp_path / "overlay", BASE, "e4m3", TARGET, DRAFT, {})
    assert [file.name for file in tmp_path.iterdir()] == ["overlay"]
    assert list((tmp_path / "overlay").iterdir()) == []
