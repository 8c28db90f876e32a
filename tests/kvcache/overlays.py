"""Overlays made by hand, whole or wrong in one place, under a manifest that seals whatever they hold."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page4.kvcache.overlay import OverlayBase
from page4.kvcache.overlay_manifest import MANIFEST_FILE, PROVENANCE_FILE, Manifest
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE
from page4.kvcache.scalar_tensors import write_scalars

BASE = OverlayBase(
    files={"config.json": "c" * 64, "model.safetensors": "d" * 64},
    tensors=frozenset({"model.layers.1.self_attn.k_proj.weight", "mtp.layers.0.self_attn.k_proj.weight"}),
    layers=(1, 3),
    has_draft=True,
)
TARGET = {
    "model.layers.1.self_attn.k_scale": 0.015625,
    "model.layers.1.self_attn.v_scale": 0.25,
    "model.layers.3.self_attn.k_scale": 3.0,
    "model.layers.3.self_attn.v_scale": 0.0078125,
}
DRAFT = {"mtp.layers.0.self_attn.k_scale": 0.5, "mtp.layers.0.self_attn.v_scale": 0.0625}


def seal(folder: Path, files: Mapping[str, bytes | Mapping[str, float]], /, **changes: Any) -> Path:
    """A folder with these files and a manifest of what they hold; ``changes`` are fields of the manifest.

    The manifest names the scales of a mapping; those of bytes have to be given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {n: c if isinstance(c, bytes) else write_scalars(c) for n, c in files.items()}
    contents.setdefault(PROVENANCE_FILE, b"{}\n")
    tensors = {name: sorted(c) for name, c in files.items() if not isinstance(c, bytes)}
    manifest = Manifest(
        kv_format="e4m3",
        target="calibration",
        draft="calibration",
        base=BASE.files,
        files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
        tensors=tensors,
        count={"target": len(tensors.get(TARGET_FILE, ())), "draft": len(tensors.get(DRAFT_FILE, ()))},
    )
    contents[MANIFEST_FILE] = dataclasses.replace(manifest, **changes).to_bytes()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def whole(folder: Path, **changes: Any) -> Path:
    """An overlay with nothing wrong."""
    return seal(folder, {TARGET_FILE: TARGET, DRAFT_FILE: DRAFT}, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
