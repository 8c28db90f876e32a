"""An overlay loads whole or not at all, and each refusal says why."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair
from page4.kvcache.overlay import OverlayBase, read_overlay
from page4.kvcache.overlay_manifest import MANIFEST_FILE, PROVENANCE_FILE, Manifest
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE
from page4.kvcache.scalar_tensors import write_scalars
from tests.kvcache.overlays import BASE, DRAFT, TARGET, contents, seal, whole

SCALES = KVScales((ScalePair(0.015625, 0.25), ScalePair(3.0, 0.0078125)), ScalePair(0.5, 0.0625))


def refused(folder: Path, message: str, base: OverlayBase = BASE) -> None:
    """Reading raises, returns nothing and writes nothing."""
    before = contents(folder)
    with pytest.raises(InputError, match=message) as caught:
        read_overlay(folder, base)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def test_a_whole_overlay_gives_the_values_in_its_files(tmp_path: Path) -> None:
    overlay = read_overlay(whole(tmp_path), BASE)
    assert (tuple(overlay.target.values()), overlay.draft) == (SCALES.target, SCALES.draft)
    assert overlay.manifest.count == {"target": 4, "draft": 2}


@pytest.mark.parametrize("missing", sorted(DRAFT))
def test_one_draft_scale_of_two_is_refused(tmp_path: Path, missing: str) -> None:
    half = {name: value for name, value in DRAFT.items() if name != missing}
    refused(
        seal(tmp_path, {TARGET_FILE: TARGET, DRAFT_FILE: half}),
        "the draft layer has a scale for . and none for .",
    )


@pytest.mark.parametrize("missing", sorted(TARGET))
def test_a_scale_on_one_of_k_and_v_is_refused(tmp_path: Path, missing: str) -> None:
    half = {name: value for name, value in TARGET.items() if name != missing}
    refused(
        seal(tmp_path, {TARGET_FILE: half, DRAFT_FILE: DRAFT}), "has a scale for . and none for .: 1 of 2"
    )


def test_target_scales_of_some_layers_are_refused(tmp_path: Path) -> None:
    half = {name: value for name, value in TARGET.items() if ".3." in name}
    refused(seal(tmp_path, {TARGET_FILE: half, DRAFT_FILE: DRAFT}), "1 of 2 QSA layers: layer 1 has none")


@pytest.mark.parametrize("value", [0.0, -0.0, -0.5, math.nan, math.inf, -math.inf, 1e-40])
@pytest.mark.parametrize("tensor", ["model.layers.3.self_attn.v_scale", "mtp.layers.0.self_attn.k_scale"])
def test_a_value_that_is_no_scale_is_refused(tmp_path: Path, tensor: str, value: float) -> None:
    files = {TARGET_FILE: TARGET, DRAFT_FILE: DRAFT}
    files = {
        file: scalars | ({tensor: value} if tensor in scalars else {}) for file, scalars in files.items()
    }
    refused(seal(tmp_path, files), "must be a positive finite FP32 number")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.self_attn.kv_scale", "is not the name of a KV scale"),
        ("model.layers.1.self_attn.q_scale", "is not the name of a KV scale"),
        ("model.layers.1.self_attn.attn.k_scale", "is a second k_scale of layer 1"),
        ("model.language_model.layers.1.self_attn.k_proj.output_scale", "is a second k_scale of layer 1"),
        ("model.layers.2.self_attn.k_scale", "has no K/V in layer 2"),
        ("model.layers.4.self_attn.k_scale", "has no K/V in layer 4"),
        ("mtp.layers.0.self_attn.k_scale", "the k_scale of the draft layer belongs into"),
        ("mtp.layers.1.self_attn.k_scale", "is not the name of a KV scale"),
    ],
)
def test_another_name_is_refused(tmp_path: Path, name: str, message: str) -> None:
    refused(seal(tmp_path, {TARGET_FILE: TARGET | {name: 1.0}, DRAFT_FILE: DRAFT}), message)


ALIASES = (
    "{}_scale",
    "_{}_scale",
    "attn.{}_scale",
    "attn._{}_scale",
    "{}_proj.{}_scale",
    "{}_proj.output_scale",
)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_names_of_other_tools_are_understood(tmp_path: Path, alias: str, prefix: str) -> None:
    def renamed(scalars: Mapping[str, float]) -> dict[str, float]:
        stems = {name: name.rpartition(".")[0].replace("model.", prefix, 1) for name in scalars}
        return {f"{stem}.{alias.format(*[name[-7]] * 2)}": scalars[name] for name, stem in stems.items()}

    folder = seal(tmp_path, {TARGET_FILE: renamed(TARGET), DRAFT_FILE: renamed(DRAFT)})
    overlay = read_overlay(folder, BASE)
    assert (tuple(overlay.target.values()), overlay.draft) == (SCALES.target, SCALES.draft)


@pytest.mark.parametrize(
    "spelling", ["model.layers.1.self_attn.k_scale", "model.language_model.layers.1.self_attn.k_proj.k_scale"]
)
def test_a_scale_that_the_checkpoint_has_itself_collides(tmp_path: Path, spelling: str) -> None:
    base = dataclasses.replace(BASE, tensors=BASE.tensors | {spelling})
    refused(whole(tmp_path), "collides with the checkpoint, which has the k_scale of layer 1", base)


def test_draft_scales_for_a_model_without_a_head_are_refused(tmp_path: Path) -> None:
    refused(whole(tmp_path), "has no K/V in the draft layer", dataclasses.replace(BASE, has_draft=False))


@pytest.mark.parametrize(
    "files",
    [
        {**BASE.files, "config.json": "e" * 64},
        {**BASE.files, "model.safetensors": "e" * 64},
        {"config.json": "c" * 64},
        {**BASE.files, "model-2.safetensors": "e" * 64},
    ],
)
def test_another_checkpoint_or_revision_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    refused(whole(tmp_path), "another checkpoint or revision", dataclasses.replace(BASE, files=files))


def test_dynamic_scales_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    base = dataclasses.replace(BASE, dynamic_scales="calculate_kv_scales: true")
    refused(whole(tmp_path), "computes KV scales as it runs .calculate_kv_scales: true", base)


def _edited(file: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(edit((folder / file).read_bytes())) and None


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "manifest.json is missing"),
    "no target file": (lambda folder: (folder / TARGET_FILE).unlink(), "kvscales.safetensors is missing"),
    "no provenance": (lambda folder: (folder / PROVENANCE_FILE).unlink(), "provenance.json is missing"),
    "truncated scales": (_edited(TARGET_FILE, lambda data: data[:-1]), "its SHA-256 is not that of manifest"),
    "empty scales": (_edited(DRAFT_FILE, lambda data: b""), "its SHA-256 is not that of manifest"),
    "a changed value": (
        _edited(DRAFT_FILE, lambda data: data[:-4] + struct.pack("<f", 1.0)),
        "its SHA-256 is not that of manifest",
    ),
    "truncated manifest": (_edited(MANIFEST_FILE, lambda data: data[:-9]), "is not valid JSON"),
    "edited manifest": (
        _edited(MANIFEST_FILE, lambda data: data.replace(b'"calibration"', b'"calibratiom"', 1)),
        "does not have the SHA-256 that it names",
    ),
    "relaid manifest": (
        _edited(MANIFEST_FILE, lambda data: json.dumps(json.loads(data)).encode()),
        "was edited",
    ),
    "later version": (
        _edited(MANIFEST_FILE, lambda data: data.replace(b'"version": 1', b'"version": 2')),
        "has version 2, expected 1",
    ),
    "another schema": (_edited(MANIFEST_FILE, lambda data: b"{}"), "is not the manifest of an overlay"),
    "a key twice": (
        _edited(MANIFEST_FILE, lambda data: data.replace(b'{\n "schema"', b'{\n "version": 1,\n "schema"')),
        "a key occurs twice",
    ),
    "no UTF-8": (_edited(MANIFEST_FILE, lambda data: b"\xff" + data), "is not valid JSON"),
    "deep nesting": (_edited(MANIFEST_FILE, lambda data: b"[" * 100_000), "nested too deeply"),
    "large": (_edited(MANIFEST_FILE, lambda data: data + b" " * 2**20), "is larger than"),
    "unlisted scales": (
        lambda folder: (folder / "extra.safetensors").write_bytes(b""),
        "extra.safetensors is not listed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_edited_overlay_is_refused(tmp_path: Path, damage: str) -> None:
    folder = whole(tmp_path)
    harm, message = DAMAGE[damage]
    harm(folder)
    refused(folder, message)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / TARGET_FILE).unlink()
    os.mkfifo(folder / TARGET_FILE)
    with pytest.raises(InputError, match="is no plain file"):
        read_overlay(folder, BASE)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_overlay(tmp_path / "nowhere", BASE)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is no folder"):
        read_overlay(tmp_path / "file", BASE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "fp16"}, "made for fp16, which has no static scales"),
        ({"kv_format": "e9m9"}, "'e9m9' is unknown"),
        ({"count": {"target": 6, "draft": 2}}, "says {'target': 6"),
        (
            {"tensors": {TARGET_FILE: sorted(TARGET)[:3], DRAFT_FILE: sorted(DRAFT)}},
            "does not hold the scales",
        ),
        ({"tensors": {TARGET_FILE: sorted(TARGET)}}, "does not name the scales of each file"),
        ({"files": {TARGET_FILE: "0" * 64}}, "lists other files"),
        ({"files": {"../outside.json": "0" * 64, PROVENANCE_FILE: "0" * 64}}, "lists other files"),
        ({"count": [4, 2]}, "its field 'count' is not what it should be"),
        ({"base": None}, "its field 'base' is not what it should be"),
    ],
)
def test_a_sealed_manifest_that_is_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(whole(tmp_path, **changes), message)


def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    data = (whole(tmp_path) / MANIFEST_FILE).read_bytes()
    assert Manifest.from_bytes(data, "manifest").to_bytes() == data


def test_scales_in_the_wrong_dtype_or_shape_are_refused(tmp_path: Path) -> None:
    good = write_scalars(DRAFT)
    fields = {
        "tensors": {TARGET_FILE: sorted(TARGET), DRAFT_FILE: sorted(DRAFT)},
        "count": {"target": 4, "draft": 2},
    }
    for old, new, message in (
        (b'"F32"', b'"I32"', "has dtype 'I32'"),
        (b'"shape":[]', b'"shape":[2]', "no kernel takes them"),
        (b'"shape":[]', b'"shape":[1,1]', "has shape .1, 1., expected one scale"),
    ):
        data = _with_header(good, lambda header, old=old, new=new: header.replace(old, new))
        refused(seal(tmp_path, {TARGET_FILE: TARGET, DRAFT_FILE: data}, **fields), message)
    data = _with_header(good, lambda header: header.replace(b'"shape":[]', b'"shape":[1]'))
    assert (
        read_overlay(seal(tmp_path, {TARGET_FILE: TARGET, DRAFT_FILE: data}, **fields), BASE).draft
        == SCALES.draft
    )


def _with_header(data: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = edit(data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]
