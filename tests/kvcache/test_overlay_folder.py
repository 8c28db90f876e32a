"""A folder is an overlay, or holds one per format under the format's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED
from page4.kvcache.overlay import read_overlay
from page4.kvcache.overlay_folder import formats_in, overlay_format, read_overlays
from page4.kvcache.overlay_manifest import MANIFEST_FILE
from page4.kvcache.overlay_names import DRAFT_FILE
from tests.kvcache.overlays import BASE, whole


@pytest.fixture
def several(tmp_path: Path) -> Path:
    for name in (RECOMMENDED, "e4m3"):
        whole(tmp_path / "several" / name, kv_format=name)
    return tmp_path / "several"


def test_one_overlay_is_read_under_its_own_format(tmp_path: Path) -> None:
    folder = whole(tmp_path, kv_format="e3m4")
    assert read_overlays(folder, BASE) == {"e3m4": read_overlay(folder, BASE)}
    assert (overlay_format(folder), formats_in(folder)) == ("e3m4", [])


def test_several_are_read_by_format_and_the_recommended_one_is_meant(several: Path) -> None:
    (several / "notes").mkdir()
    overlays = read_overlays(several, BASE)
    assert overlays == {name: read_overlay(several / name, BASE) for name in (RECOMMENDED, "e4m3")}
    assert set(formats_in(several)) == set(overlays) and overlay_format(several) == RECOMMENDED


def test_one_in_a_folder_of_its_format_is_meant_whichever_it_is(tmp_path: Path) -> None:
    whole(tmp_path / "e4m3", kv_format="e4m3")
    assert set(read_overlays(tmp_path, BASE)) == {"e4m3"} and overlay_format(tmp_path) == "e4m3"


def test_of_several_without_the_recommended_one_none_is_meant(tmp_path: Path) -> None:
    for name in ("e4m3", "e3m4"):
        whole(tmp_path / name, kv_format=name)
    with pytest.raises(InputError, match=f"none for the recommended {RECOMMENDED}: name the KV format"):
        overlay_format(tmp_path)


def test_an_overlay_with_a_folder_in_it_is_still_one(tmp_path: Path) -> None:
    folder = whole(tmp_path, kv_format="e3m4")
    whole(folder / "e4m3")
    assert set(read_overlays(folder, BASE)) == {"e3m4"}


def test_one_of_several_that_is_damaged_or_misplaced_refuses_all(several: Path) -> None:
    (several / "e4m3").rename(several / "e3m4")
    with pytest.raises(InputError, match="e3m4 is made for e4m3, not for e3m4"):
        read_overlays(several, BASE)
    (several / "e3m4" / DRAFT_FILE).unlink()
    with pytest.raises(InputError, match="is missing"):
        read_overlays(several, BASE)


def test_a_folder_without_overlays_is_refused(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, f"{MANIFEST_FILE} is missing"),
    ):
        with pytest.raises(InputError, match=message):
            read_overlays(folder, BASE)
        with pytest.raises(InputError, match=message):
            overlay_format(folder)


def test_a_damaged_manifest_names_no_format(tmp_path: Path) -> None:
    manifest = whole(tmp_path) / MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes().replace(b'"e4m3"', b'"e2m5"'))
    with pytest.raises(InputError, match="does not have the SHA-256"):
        overlay_format(tmp_path)
