"""Ten thousand damaged overlays: each is refused in one line, or loads exactly what its files say."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, deserialize

from page4.kernels.errors import InputError
from page4.kvcache.overlay import Overlay, read_overlay
from page4.kvcache.overlay_manifest import MANIFEST_FILE, PROVENANCE_FILE
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE, parse_scale_name
from tests.kvcache.overlays import BASE, whole

Edit = Callable[[random.Random, bytes], bytes]
SLOWEST = 2.0  # seconds of processor time for one overlay


def flip(draw: random.Random, data: bytes) -> bytes:
    """One to four bits."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def overwrite(draw: random.Random, data: bytes) -> bytes:
    """A run of bytes by others."""
    start = draw.randrange(len(data))
    length = draw.randint(1, 16)
    return data[:start] + draw.randbytes(length) + data[start + length :]


def truncate(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def grow(draw: random.Random, data: bytes) -> bytes:
    start = draw.randint(0, len(data))
    return (
        data[:start]
        + draw.choice((draw.randbytes(draw.randint(1, 9)), data[start:], b"[" * 5000))
        + data[start:]
    )


def cut(draw: random.Random, data: bytes) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.randint(1, 20) :]


def digits(draw: random.Random, data: bytes) -> bytes:
    """Numbers of the text by others: offsets, shapes, versions."""
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return flip(draw, data)
    at = draw.choice(places)
    return (
        data[:at]
        + draw.choice((b"0", b"1", b"-1", b"9" * 30, b"1e9", b"1.0", b"null", b"true", b"NaN"))
        + data[at + 1 :]
    )


def header_length(draw: random.Random, data: bytes) -> bytes:
    length = draw.choice((0, 1, len(data), 2**32, 2**63, 2**64 - 1, draw.randrange(2 * len(data))))
    return struct.pack("<Q", length) + data[8:]


def header(draw: random.Random, data: bytes) -> bytes:
    """The header's JSON: fields exchanged for others of the right form."""
    length = struct.unpack_from("<Q", data)[0]
    entries = json.loads(data[8 : 8 + length])
    name = draw.choice(list(entries))
    entry = entries[name]
    change = draw.randrange(7)
    if change == 0:
        entry["dtype"] = draw.choice(("F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "f32", None, 4))
    elif change == 1:
        entry["shape"] = draw.choice(([1], [2], [0], [1, 1], [-1], [True], [1.0], None, 1, "1"))
    elif change == 2:
        entry["data_offsets"] = [draw.randint(-4, 24), draw.randint(-4, 24)]
    elif change == 3:
        entry["data_offsets"] = draw.choice(([0], [0, 4, 8], ["0", "4"], [0.0, 4.0], [False, 4], None, {}))
    elif change == 4:
        entries[draw.choice((name + "x", "", "a\nb", "\ud800", "__metadata__", name.replace("k_", "v_")))] = (
            entries.pop(name)
        )
    elif change == 5:
        entries[name.replace("self_attn", "self_attn.attn")] = dict(entry)
    else:
        del entries[name]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % draw.choice((1, 8)))
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def payload(draw: random.Random, data: bytes) -> bytes:
    """One of the values."""
    count = (len(data) - 8 - struct.unpack_from("<Q", data)[0]) // 4
    at = len(data) - 4 * draw.randint(1, count)
    special = (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-40, 64.0, 1e-3)
    return data[:at] + struct.pack("<f", draw.choice(special)) + data[at + 4 :]


ANY: tuple[Edit, ...] = (flip, overwrite, truncate, grow, cut, digits)
TENSORS: tuple[Edit, ...] = (*ANY, header_length, header, header, payload, payload)


def read(folder: Path) -> Overlay | None:
    """The overlay, or None when it is refused; nothing else may come of it, and not after long."""
    started = time.process_time()
    try:
        return read_overlay(folder, BASE)
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
        return None
    finally:
        assert time.process_time() - started < SLOWEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return whole(tmp_path / "overlay")


@pytest.mark.parametrize("file", [MANIFEST_FILE, PROVENANCE_FILE, TARGET_FILE, DRAFT_FILE])
def test_no_change_of_any_byte_loads(folder: Path, file: str) -> None:
    """1,500 changes of each file: the manifest seals all of it."""
    draw = random.Random(file)
    original = (folder / file).read_bytes()
    edits = TENSORS if file.endswith(".safetensors") else ANY
    for _ in range(1500):
        changed = draw.choice(edits)(draw, original)
        if changed != original:
            (folder / file).write_bytes(changed)
            assert read(folder) is None, changed
    (folder / file).write_bytes(original)
    assert read(folder) is not None


def resealed(manifest: dict[str, Any]) -> bytes:
    """A manifest with the digest that its content has."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256((json.dumps(content, indent=1) + "\n").encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()


@pytest.mark.parametrize("file", [TARGET_FILE, DRAFT_FILE])
def test_changes_under_a_new_seal_are_refused_or_load_as_they_stand(folder: Path, file: str) -> None:
    """1,500 changes of each file with its SHA-256 put right, as if a tool had written it so."""
    draw = random.Random(file)
    original, manifest = (folder / file).read_bytes(), json.loads((folder / MANIFEST_FILE).read_text())
    other = read_overlay(folder, BASE)
    loaded = 0
    for _ in range(1500):
        changed = draw.choice(TENSORS)(draw, original)
        (folder / file).write_bytes(changed)
        manifest["files"][file] = hashlib.sha256(changed).hexdigest()
        values = by_the_library(changed)
        if draw.random() < 0.5 and values:
            manifest["tensors"][file] = sorted(values)
        (folder / MANIFEST_FILE).write_bytes(resealed(manifest))
        overlay = read(folder)
        if overlay is None:
            continue
        loaded += 1
        assert overlay.draft is not None and set(overlay.target) == set(BASE.layers)
        held = {**overlay.target, None: overlay.draft}
        for name, value in values.items():
            parsed = parse_scale_name(name)
            assert parsed is not None
            assert getattr(held[parsed.layer], parsed.part) == value > 0
        if file == TARGET_FILE:
            assert overlay.draft == other.draft and len(values) == 4
        else:
            assert overlay.target == other.target and len(values) == 2
    assert loaded > 20  # changes of values that leave them usable


def by_the_library(data: bytes) -> dict[str, float]:
    """The FP32 scalars that the safetensors library sees; empty when it refuses the file."""
    try:
        tensors = deserialize(data)
    except (SafetensorError, ValueError):
        return {}
    return {
        name: struct.unpack("<f", bytes(tensor["data"]))[0]
        for name, tensor in tensors
        if tensor["dtype"] == "F32" and len(tensor["data"]) == 4
    }


def test_a_manifest_of_other_values_under_a_new_seal_is_refused(folder: Path) -> None:
    """1,000 manifests with a field changed and the digest put right: only the sources' names may differ."""
    draw = random.Random(0)
    original = (folder / MANIFEST_FILE).read_bytes()
    strange: tuple[Any, ...] = (
        None,
        True,
        0,
        -1,
        1.5,
        10**40,
        "",
        "x",
        "../x",
        "a\nb",
        [],
        {},
        [[]],
        {"x": "y"},
        "\ud800",
    )
    for _ in range(1000):
        manifest = json.loads(original)
        path = []
        node: Any = manifest
        while True:
            key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            path.append(key)
            if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.3:
                break
            node = node[key]
        if draw.random() < 0.2 and isinstance(node, dict):
            del node[path[-1]]
        else:
            node[path[-1]] = draw.choice(strange)
        (folder / MANIFEST_FILE).write_bytes(resealed(manifest))
        overlay = read(folder)
        if overlay is not None and path != ["sha256"]:
            assert path[0] in ("target", "draft") and len(path) == 1, (path, manifest)
            assert overlay.manifest.prototype or "none" in (overlay.manifest.target, overlay.manifest.draft)
