"""Each layer gets the scales of its own format, from the overlay that is made for it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair
from page4.kvcache.overlay import Overlay, OverlayBase, read_overlay
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE
from page4.kvcache.overlay_scales import PrototypeScales, overlay_scales, scales_by_format
from page4.kvcache.scales import UNIT_SCALES
from tests.kvcache.overlays import BASE, DRAFT, TARGET, seal, whole

SCALES = KVScales((ScalePair(0.015625, 0.25), ScalePair(3.0, 0.0078125)), ScalePair(0.5, 0.0625))
OTHERS = KVScales((ScalePair(0.03125, 0.5), ScalePair(6.0, 0.015625)), ScalePair(1.0, 0.125))
"""Twice those: what the overlay for e2m5 holds here."""


def scales(
    overlay: Overlay,
    kv_format: str = "e4m3",
    draft: str | None = None,
    allow_unit: bool = False,
    base: OverlayBase = BASE,
) -> KVScales:
    """What one overlay gives."""
    return overlay_scales({overlay.manifest.kv_format: overlay}, base, kv_format, draft, allow_unit)


@pytest.fixture
def both(tmp_path: Path) -> dict[str, Overlay]:
    files = {
        file: {name: 2 * value for name, value in held.items()}
        for file, held in ((TARGET_FILE, TARGET), (DRAFT_FILE, DRAFT))
    }
    folders = {"e4m3": whole(tmp_path / "a"), "e2m5": seal(tmp_path / "b", files, kv_format="e2m5")}
    return {name: read_overlay(folder, BASE) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (("e4m3", "e4m3"), SCALES),
        (("e4m3", "fp16"), KVScales(SCALES.target, None)),
        (("fp16", "e4m3"), KVScales((), SCALES.draft)),
        (("e4m3,3:fp16", "fp16"), KVScales((SCALES.target[0], UNIT_SCALES), None)),
    ],
)
def test_formats_get_the_scales_they_need_and_no_others(
    tmp_path: Path, formats: tuple[str, str], expected: KVScales
) -> None:
    assert scales(read_overlay(whole(tmp_path), BASE), *formats) == expected


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (("e2m5", None), OTHERS),
        (("e4m3", "e2m5"), KVScales(SCALES.target, OTHERS.draft)),
        (("e2m5,1:e4m3", "e4m3"), KVScales((SCALES.target[0], OTHERS.target[1]), SCALES.draft)),
        (("fp16,3:e2m5", "e4m3"), KVScales((UNIT_SCALES, OTHERS.target[1]), SCALES.draft)),
        (("fp16", "e2m5"), KVScales((), OTHERS.draft)),
    ],
)
def test_several_overlays_give_each_layer_those_of_its_format(
    both: dict[str, Overlay], formats: tuple[str, str | None], expected: KVScales
) -> None:
    assert overlay_scales(both, BASE, *formats) == expected


def test_a_study_gets_what_each_format_needs_by_its_name(both: dict[str, Overlay]) -> None:
    assert scales_by_format(both, BASE, "e4m3", "e2m5") == {
        "e4m3": KVScales(SCALES.target, None),
        "e2m5": KVScales((), OTHERS.draft),
    }


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (("fp16", "fp16"), "fp16 has no static scales"),
        (("e5m2", "e5m2"), "overlay's scales are made for e4m3, the target's KV format is e5m2"),
        (("e4m3", "e3m4"), "made for e4m3, the draft's KV format is e3m4"),
        (("e4m3,3:e2m5", "e4m3"), "made for e4m3, the target's KV format is e2m5"),
        (("int8", "int8"), "int8 of the target computes its scales"),
        (("e4m3", "int8"), "int8 of the draft computes its scales"),
        (("int8", "e4m3"), "int8 of the target computes its scales"),
        (("e4m4", None), "KV format 'e4m4' is unknown"),
        (("e4m3,2:fp16", None), "names layer 2; the QSA layers are 1, 3"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, formats: tuple[str, str | None], message: str) -> None:
    overlay = read_overlay(whole(tmp_path), BASE)
    with pytest.raises(InputError, match=message):
        scales(overlay, *formats)


def test_a_format_that_none_of_several_overlays_is_for_is_refused(both: dict[str, Overlay]) -> None:
    with pytest.raises(InputError, match=r"overlays' scales are made for e4m3 and e2m5, .* is e3m4"):
        overlay_scales(both, BASE, "e2m5,1:e3m4")


def test_a_draft_needs_both_of_its_scales(tmp_path: Path) -> None:
    """0 of 2 is the case that decoded garbage and accepted nothing; an FP16 draft needs none."""
    overlay = read_overlay(seal(tmp_path, {TARGET_FILE: TARGET}), BASE)
    with pytest.raises(InputError, match="0 of 2 draft scales"):
        scales(overlay, "e4m3")
    assert scales(overlay, "e4m3", "fp16") == KVScales(SCALES.target, None)


@pytest.mark.parametrize("draft", [None, "e2m5", "int8"])
def test_a_model_without_a_head_needs_none_for_it(tmp_path: Path, draft: str | None) -> None:
    overlay = read_overlay(seal(tmp_path, {TARGET_FILE: TARGET}), BASE)
    without_head = dataclasses.replace(BASE, has_draft=False)
    assert scales(overlay, "e4m3", draft, base=without_head) == KVScales(SCALES.target, None)


def test_no_target_scales_need_a_flag_and_warn(tmp_path: Path) -> None:
    overlay = read_overlay(seal(tmp_path, {DRAFT_FILE: DRAFT}), BASE)
    with pytest.raises(InputError, match="0 of 4 target scales; allow_unit_target_scales"):
        scales(overlay)
    with pytest.warns(PrototypeScales, match=r"1\.0 is used for all of 2 QSA layers"):
        found = scales(overlay, allow_unit=True)
    assert found == KVScales((UNIT_SCALES,) * 2, SCALES.draft)


def test_the_flag_changes_nothing_where_there_are_scales(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scales(read_overlay(whole(tmp_path), BASE), allow_unit=True) == SCALES


@pytest.mark.parametrize(
    ("fields", "formats", "warned"),
    [
        ({"target": "unit"}, ("e4m3", "e4m3"), ["target .unit"]),
        ({"draft": "layer 3"}, ("e4m3", "e4m3"), ["draft .layer 3"]),
        ({"draft": "layer 3"}, ("e4m3", "fp16"), []),
        ({"target": "unit", "draft": "unit"}, ("fp16", "e4m3"), ["draft .unit"]),
    ],
)
def test_prototypes_in_use_warn(
    tmp_path: Path, fields: dict[str, str], formats: tuple[str, str], warned: list[str]
) -> None:
    overlay = read_overlay(whole(tmp_path, **fields), BASE)
    assert overlay.manifest.prototype
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scales(overlay, *formats)
    assert len(caught) == len(warned)
    for warning, text in zip(caught, warned, strict=True):
        assert text.replace(".", "(") in str(warning.message)
