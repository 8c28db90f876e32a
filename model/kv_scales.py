"""A checkpoint's overlay of KV scales: what the overlay must know of it, and loading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair
from page4.kvcache.overlay import OverlayBase, pair_scales
from page4.kvcache.overlay_folder import overlay_format, read_overlays
from page4.kvcache.overlay_names import ScaleName, parse_scale_name
from page4.kvcache.overlay_scales import overlay_scales

from .config import Qwen4ExpConfig
from .loader import shards

_INDEX = "model.safetensors.index.json"
_MULTIMODAL = "model.language_model."


def load_overlay(
    folder: str | Path,
    checkpoint: str | Path,
    kv_format: str | None = None,
    draft_kv_format: str | None = None,
    allow_unit_target_scales: bool = False,
) -> KVScales:
    """Static scales from an overlay, for a checkpoint's target and draft in these formats.

    Nothing is loaded unless all of it can be: the overlay is whole and unchanged, and the checkpoint is the
    one that it was made for, to the byte (every shard is hashed).

    Args:
        folder: the overlay's, or one that holds several, each in a folder with its format's name.
        kv_format: the target's, of all layers or by layer; by default the overlay's own, of several the
            recommended one.
        draft_kv_format: the target's by default.
        allow_unit_target_scales: take 1.0 for every target layer if the overlay has no target scales; a
            warning says so.
    Raises:
        InputError: see :func:`read_overlays` and :func:`overlay_scales`, or the checkpoint cannot be read.
    """
    folder = Path(folder)
    kv_format = kv_format or overlay_format(folder)
    base = describe_base(Path(checkpoint))
    overlays = read_overlays(folder, base)
    return overlay_scales(overlays, base, kv_format, draft_kv_format, allow_unit_target_scales)


def describe_base(folder: Path) -> OverlayBase:
    """What an overlay has to know of the checkpoint in a folder.

    Raises:
        InputError: a file is missing or unreadable.
    """
    config = Qwen4ExpConfig.from_file(folder / "config.json")
    found = shards(folder)
    names = frozenset(_tensor_names(found))
    index = folder / _INDEX
    files = [folder / "config.json", *([index] if index.is_file() else []), *found]
    with ThreadPoolExecutor() as pool:  # hashing does not hold the interpreter
        digests = list(pool.map(_sha256, files))
    return OverlayBase(
        files={file.name: digest for file, digest in zip(files, digests, strict=True)},
        tensors=names,
        layers=config.qsa_layers,
        has_draft=config.mtp_num_hidden_layers > 0,
        prefix=_MULTIMODAL if any(name.startswith(_MULTIMODAL) for name in names) else "model.",
        dynamic_scales=_dynamic_scales(folder / "config.json"),
    )


def read_scales(file: Path) -> dict[int | None, ScalePair]:
    """The static scales in a safetensors file of another tool, by layer (None: the MTP layer).

    Other tensors beside them are passed over. A scale of another floating-point dtype is taken as FP32.

    Raises:
        InputError: the file is unreadable or has no scales, a scale is named twice, is not one number or not
            positive and finite, or stands on only one of K and V.
    """
    found: dict[ScaleName, float] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for tensor in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                name = parse_scale_name(tensor)
                if name is None:
                    continue
                if name in found:
                    raise InputError(f"{file}: {tensor} is a second {name}")
                value = opened.get_tensor(tensor)
                if value.numel() != 1 or not value.is_floating_point():
                    raise InputError(
                        f"{file}: {tensor} is {value.dtype} of shape {list(value.shape)}, expected one number"
                    )
                found[name] = float(value.float())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from error
    if not found:
        raise InputError(f"{file} holds no KV scales")
    return pair_scales(found, str(file))


def _tensor_names(found: list[Path]) -> Iterator[str]:
    for shard in found:
        try:
            with safe_open(shard, framework="pt") as file:
                yield from file.keys()
        except (SafetensorError, OSError) as error:
            raise InputError(f"{shard}: not a readable safetensors file ({error})") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _dynamic_scales(config: Path) -> str | None:
    """The setting that asks an engine to compute KV scales while it runs, if there is one.

    ``kv_cache_scheme`` is compressed-tensors' and ModelOpt's, ``calculate_kv_scales`` the serving engines'.
    """
    content = json.loads(config.read_bytes())
    for path, settings in _settings(content, ""):
        scheme = settings.get("kv_cache_scheme")
        if settings.get("calculate_kv_scales") is True:
            return f"{path}calculate_kv_scales: true"
        if isinstance(scheme, Mapping) and scheme.get("dynamic") not in (None, False):
            return f"{path}kv_cache_scheme.dynamic: {json.dumps(scheme['dynamic'])}"
    return None


def _settings(content: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object in a configuration, and the dotted path before its keys."""
    if isinstance(content, Mapping):
        yield path, content
        for key, value in content.items():
            yield from _settings(value, f"{path}{key}.")
