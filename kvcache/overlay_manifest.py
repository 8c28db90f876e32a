"""The manifest of an overlay: what belongs to it, and which checkpoint it belongs to. Sealed by a digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from page4.kernels.errors import InputError

from .strict_json import parse_json

MANIFEST_FILE = "manifest.json"
PROVENANCE_FILE = "provenance.json"
SCHEMA = "page4 KV scales"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What an overlay's folder holds.

    Attributes:
        kv_format: the format that the scales are made for.
        target, draft: where the scales come from: ``calibration``, ``file NAME`` of another tool, or a
            prototype's ``unit`` or ``layer N``; ``none`` when there are none.
        base: SHA-256 of each file of the checkpoint: its configuration, index and shards.
        files: SHA-256 of each other file of the overlay.
        tensors: names of the scales, by file.
        count: scales of target and draft.
    """

    kv_format: str
    target: str
    draft: str
    base: Mapping[str, str]
    files: Mapping[str, str]
    tensors: Mapping[str, list[str]]
    count: Mapping[str, int]

    @property
    def prototype(self) -> bool:
        """Whether any scale was not measured on its own layer."""
        return is_prototype(self.target) or is_prototype(self.draft)

    def to_bytes(self) -> bytes:
        """The file's content: its keys in order, the digest of the rest at the end."""
        content = {"schema": SCHEMA, "version": VERSION} | dataclasses.asdict(self)
        content["prototype"] = self.prototype
        return _render(content | {"sha256": hashlib.sha256(_render(content)).hexdigest()})

    @classmethod
    def from_bytes(cls, data: bytes, file: str) -> Manifest:
        """Read a manifest; ``file`` is for messages.

        Raises:
            InputError: it is damaged or was edited, is of another schema or version, or a field is missing,
                unknown or of the wrong type.
        """
        content = parse_json(data, file)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise InputError(f"{file} is not the manifest of an overlay of KV scales")
        version = content.get("version")
        if type(version) is not int or version != VERSION:
            raise InputError(f"{file} has version {str(version)[:40]}, expected {VERSION}")
        fields: dict[str, Any] = {field.name: content.get(field.name) for field in dataclasses.fields(cls)}
        if content.keys() != fields.keys() | {"schema", "version", "prototype", "sha256"}:
            raise InputError(f"{file} is damaged: it has other fields than a manifest of version {VERSION}")
        for name, value in fields.items():
            if not _FIELD_CHECKS[name](value):
                raise InputError(f"{file} is damaged: its field {name!r} is not what it should be")
        manifest = cls(**fields)
        if manifest.to_bytes() != data:
            raise InputError(f"{file} is damaged or was edited: it does not have the SHA-256 that it names")
        return manifest


def is_prototype(source: str) -> bool:
    """Whether scales of this source were not measured on the layer that they are for."""
    return source not in ("calibration", "none") and not source.startswith("file ")


def _render(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_names(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in value.values()
    )


def _is_counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"target", "draft"}
        and all(type(count) is int for count in value.values())
    )


_FIELD_CHECKS = {
    "kv_format": _is_text,
    "target": _is_text,
    "draft": _is_text,
    "base": _is_texts,
    "files": _is_texts,
    "tensors": _is_names,
    "count": _is_counts,
}
