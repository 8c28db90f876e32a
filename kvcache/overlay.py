"""Overlays: static KV scales in a folder of their own, bound to one checkpoint. They fail closed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from page4.kernels.errors import InputError

from .formats import get_format
from .overlay_manifest import MANIFEST_FILE, PROVENANCE_FILE, Manifest
from .overlay_names import (
    DRAFT_FILE,
    TARGET_FILE,
    ScaleName,
    describe_layer,
    parse_scale_name,
    scale_file,
)
from .scalar_tensors import read_scalars
from .scales import ScalePair

MAX_FILE_BYTES = 2**20
"""No file of an overlay is as large."""


@dataclass(frozen=True)
class OverlayBase:
    """What an overlay has to know of its checkpoint.

    Attributes:
        files: SHA-256 of its configuration, index and shards, by name.
        tensors: names of its tensors, as stored.
        layers: indices of its QSA layers.
        has_draft: whether it has an MTP layer.
        prefix: of its layers' names, ``model.`` or ``model.language_model.``.
        dynamic_scales: the setting of its configuration that asks for scales computed while running, if any.
    """

    files: Mapping[str, str]
    tensors: frozenset[str]
    layers: tuple[int, ...]
    has_draft: bool
    prefix: str = "model."
    dynamic_scales: str | None = None


@dataclass(frozen=True)
class Overlay:
    """An overlay that was read and belongs to its checkpoint.

    Attributes:
        manifest: what the folder says of itself.
        target: scales by QSA layer, all of them or none.
        draft: scales of the MTP layer.
    """

    manifest: Manifest
    target: Mapping[int, ScalePair]
    draft: ScalePair | None


def read_overlay(folder: Path, base: OverlayBase) -> Overlay:
    """Read an overlay, and refuse it unless it is whole, unchanged, and made for this checkpoint.

    Raises:
        InputError: a file is missing, truncated, damaged or edited; the checkpoint is another, or computes
            scales itself; a scale is no positive finite FP32 number, has another name than a scale, one that
            the checkpoint has too, two names, or belongs to no QSA layer; K or V of a layer alone has one; or
            some target layers have scales and others none.
    """
    if base.dynamic_scales is not None:
        raise InputError(
            f"the checkpoint computes KV scales as it runs ({base.dynamic_scales}): an overlay of static "
            "scales cannot be used beside that"
        )
    manifest = read_manifest(folder)
    _check_base(folder, manifest, base)
    contents = _contents(folder, manifest)
    found: dict[ScaleName, float] = {}
    for file in (TARGET_FILE, DRAFT_FILE):
        if file in contents:
            scalars = read_scalars(contents[file], str(folder / file))
            if sorted(scalars) != manifest.tensors[file]:
                raise InputError(f"{folder / file} does not hold the scales that {MANIFEST_FILE} lists")
            _add(found, scalars, folder / file, base)
    pairs = pair_scales(found, str(folder))
    draft = pairs.pop(None, None)
    missing = [layer for layer in base.layers if layer not in pairs]
    if pairs and missing:
        raise InputError(
            f"{folder} has target scales of {len(pairs)} of {len(base.layers)} QSA layers: "
            f"{describe_layer(missing[0])} has none"
        )
    counted = {"target": 2 * len(pairs), "draft": 0 if draft is None else 2}
    if counted != manifest.count:
        raise InputError(f"{folder} holds {counted} scales, {MANIFEST_FILE} says {manifest.count}")
    return Overlay(manifest, {layer: pairs[layer] for layer in base.layers if pairs}, draft)


def read_manifest(folder: Path) -> Manifest:
    """What an overlay says of itself; nothing else of it is read.

    Raises:
        InputError: there is no folder or manifest, it is damaged, or its format has no static scales.
    """
    if not folder.is_dir():
        raise InputError(
            f"the overlay {folder} does not exist" if not folder.exists() else f"{folder} is no folder"
        )
    manifest = Manifest.from_bytes(_read(folder / MANIFEST_FILE), str(folder / MANIFEST_FILE))
    if not get_format(manifest.kv_format).needs_scale:
        raise InputError(f"{folder} is made for {manifest.kv_format}, which has no static scales")
    return manifest


def pair_scales(found: Mapping[ScaleName, float], where: str) -> dict[int | None, ScalePair]:
    """Scales by layer, K with V.

    Raises:
        InputError: a layer has a scale on only one of K and V, or one that is no positive finite FP32 number.
    """
    pairs: dict[int | None, ScalePair] = {}
    for layer in dict.fromkeys(name.layer for name in found):
        k, v = found.get(ScaleName(layer, "k")), found.get(ScaleName(layer, "v"))
        if k is None or v is None:
            have, lack = ("K", "V") if v is None else ("V", "K")
            raise InputError(
                f"{where}: {describe_layer(layer)} has a scale for {have} and none for {lack}: 1 of 2"
            )
        try:
            pairs[layer] = ScalePair(k, v)
        except InputError as error:
            raise InputError(f"{where}: {describe_layer(layer)}: {error}") from error
    return pairs


def _add(found: dict[ScaleName, float], scalars: Mapping[str, float], file: Path, base: OverlayBase) -> None:
    """Add a file's scales to those found before, each under what its name means."""
    in_base = {parse_scale_name(name) for name in base.tensors} - {None}
    for tensor, value in scalars.items():
        name = parse_scale_name(tensor)
        if name is None:
            raise InputError(f"{file}: {ascii(tensor)[:200]} is not the name of a KV scale")
        if tensor in base.tensors or name in in_base:
            raise InputError(f"{file}: {tensor} collides with the checkpoint, which has the {name} itself")
        if name in found:
            raise InputError(f"{file}: {tensor} is a second {name}")
        if scale_file(name.layer) != file.name:
            raise InputError(f"{file}: the {name} belongs into {scale_file(name.layer)}")
        if name.layer not in (base.layers if name.layer is not None else (None,) * base.has_draft):
            raise InputError(f"{file}: the checkpoint has no K/V in {describe_layer(name.layer)}")
        found[name] = value


def _check_base(folder: Path, manifest: Manifest, base: OverlayBase) -> None:
    differing = differing_files(manifest.base, base.files)
    if differing:
        raise InputError(
            f"{folder} belongs to another checkpoint or revision: {', '.join(differing[:3])} "
            f"{'differs' if len(differing) == 1 else 'differ'} from what its scales were made for"
        )


def differing_files(recorded: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    """Names of files that are in one of the two only, or have another SHA-256."""
    return [
        name
        for name in sorted({*recorded, *files})
        if recorded.get(name, "none") != files.get(name, "absent")
    ]


def _contents(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """The files that the manifest lists, each with the SHA-256 that it names."""
    _check_listed(folder, manifest)
    contents = {}
    for name, digest in manifest.files.items():
        data = _read(folder / name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise InputError(
                f"{folder / name} is damaged or was edited: its SHA-256 is not that of {MANIFEST_FILE}"
            )
        contents[name] = data
    return contents


def _check_listed(folder: Path, manifest: Manifest) -> None:
    """The manifest lists the files that an overlay has, and the folder has no scales beside them."""
    listed = manifest.files.keys()
    if PROVENANCE_FILE not in listed or not listed <= {TARGET_FILE, DRAFT_FILE, PROVENANCE_FILE}:
        raise InputError(f"{folder / MANIFEST_FILE} is damaged: it lists other files than an overlay has")
    if manifest.tensors.keys() != listed - {PROVENANCE_FILE}:
        raise InputError(f"{folder / MANIFEST_FILE} is damaged: it does not name the scales of each file")
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in listed:
            raise InputError(f"{file} is not listed in {MANIFEST_FILE}")


def _read(file: Path) -> bytes:
    """A small file, whole.

    Raises:
        InputError: it is missing, no plain file, too large, or cannot be read.
    """
    if not file.is_file():
        raise InputError(f"{file} is missing" if not file.exists() else f"{file} is no plain file")
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{file} is larger than {MAX_FILE_BYTES} bytes, which no file of an overlay is")
    return data
