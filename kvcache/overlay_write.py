"""Writing an overlay: built in a staging folder, read back, and renamed when all is well."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page4.kernels.errors import InputError

from .formats import get_format
from .overlay import Overlay, OverlayBase, read_overlay
from .overlay_manifest import MANIFEST_FILE, PROVENANCE_FILE, Manifest
from .overlay_names import DRAFT_FILE, TARGET_FILE, ScaleName, scale_tensor_name
from .scalar_tensors import write_scalars
from .scales import ScalePair


@dataclass(frozen=True)
class Sourced:
    """Scales by layer (None: the MTP layer), and where they come from; see :class:`Manifest`."""

    source: str
    pairs: Mapping[int | None, ScalePair]


def materialise(
    folder: Path,
    base: OverlayBase,
    kv_format: str,
    target: Sourced,
    draft: Sourced,
    provenance: Mapping[str, Any],
) -> Overlay:
    """Write an overlay for a checkpoint, which is not touched; either the whole folder appears or nothing.

    Args:
        folder: must not exist.
        provenance: JSON types; how the scales came about.
    Returns:
        The overlay as it is read back.
    Raises:
        InputError: the folder exists, the format has no static scales, there are no scales at all, or what
            was built is refused by :func:`read_overlay`.
    """
    if os.path.lexists(folder):
        raise InputError(f"{folder} exists already; nothing is written over it")
    if not get_format(kv_format).needs_scale:
        raise InputError(f"KV format {kv_format} has no static scales to put into an overlay")
    if not target.pairs and not draft.pairs:
        raise InputError("an overlay without scales was asked for: both target and draft have none")
    tensors = {
        name: _tensors(sourced.pairs, base.prefix)
        for name, sourced in ((TARGET_FILE, target), (DRAFT_FILE, draft))
        if sourced.pairs
    }
    contents = {name: write_scalars(scalars) for name, scalars in tensors.items()}
    contents[PROVENANCE_FILE] = (json.dumps(provenance, indent=1, allow_nan=False) + "\n").encode()
    manifest = Manifest(
        kv_format=kv_format,
        target=target.source,
        draft=draft.source,
        base=dict(base.files),
        files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
        tensors={name: sorted(scalars) for name, scalars in tensors.items()},
        count={"target": 2 * len(target.pairs), "draft": 2 * len(draft.pairs)},
    )
    contents[MANIFEST_FILE] = manifest.to_bytes()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, data in contents.items():
            _write(staging / name, data)
        overlay = read_overlay(staging, base)
        staging.chmod(0o755)
        if os.path.lexists(folder):
            raise InputError(f"{folder} has appeared meanwhile; nothing is written over it")
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return overlay


def _tensors(pairs: Mapping[int | None, ScalePair], prefix: str) -> dict[str, float]:
    """Scales by the names that the overlay gives them."""
    tensors = {}
    for layer, pair in pairs.items():
        tensors[scale_tensor_name(ScaleName(layer, "k"), prefix)] = pair.k
        tensors[scale_tensor_name(ScaleName(layer, "v"), prefix)] = pair.v
    return tensors


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
