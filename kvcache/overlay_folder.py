"""Where overlays lie: one in a folder of its own, or several in one folder, each under its format's name."""

from __future__ import annotations

from pathlib import Path

from page4.kernels.errors import InputError

from .formats import FORMAT_NAMES, RECOMMENDED, get_format
from .overlay import Overlay, OverlayBase, read_manifest, read_overlay
from .overlay_manifest import MANIFEST_FILE


def formats_in(folder: Path) -> list[str]:
    """The static formats that a folder holds an overlay for, under their names; none if it is one itself."""
    if (folder / MANIFEST_FILE).exists():
        return []
    return [name for name in FORMAT_NAMES if get_format(name).needs_scale and (folder / name).is_dir()]


def overlay_format(folder: Path) -> str:
    """The format that a folder's scales are meant for: an overlay's own, of several the recommended one.

    Raises:
        InputError: the folder holds no overlay, or a damaged manifest, or several overlays of which none is
            for the recommended format.
    """
    names = formats_in(folder)
    if not names:
        return read_manifest(folder).kv_format
    if RECOMMENDED in names:
        return RECOMMENDED
    if len(names) > 1:
        raise InputError(
            f"{folder} holds overlays for {' and '.join(names)}, none for the recommended {RECOMMENDED}: "
            "name the KV format"
        )
    return names[0]


def read_overlays(folder: Path, base: OverlayBase) -> dict[str, Overlay]:
    """The overlay in a folder, or all of those in it, by format.

    Raises:
        InputError: one of them is refused, see :func:`read_overlay`, or is made for another format than its
            folder's name says.
    """
    names = formats_in(folder)
    if not names:
        overlay = read_overlay(folder, base)
        return {overlay.manifest.kv_format: overlay}
    overlays = {name: read_overlay(folder / name, base) for name in names}
    for name, overlay in overlays.items():
        if overlay.manifest.kv_format != name:
            raise InputError(f"{folder / name} is made for {overlay.manifest.kv_format}, not for {name}")
    return overlays
