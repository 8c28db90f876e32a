"""From a calibration to an overlay beside the checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page4.experiments.calibrate.report import REPORT_FILE, reported_scales
from page4.experiments.provenance import collect_provenance, now
from page4.kernels.errors import InputError
from page4.kvcache import ScalePair, get_format
from page4.kvcache.overlay import Overlay, OverlayBase, differing_files
from page4.kvcache.overlay_names import describe_layer
from page4.kvcache.overlay_write import Sourced, materialise
from page4.kvcache.scales import UNIT_SCALES
from page4.kvcache.strict_json import parse_json
from page4.model.kv_scales import describe_base, read_scales
from page4.spec_decode.calibration import DRAFT

_SOURCES = "calibration, file:PATH, unit, layer:N or none"


def write_overlay(
    folder: Path,
    checkpoint: Path,
    calibration: Path | None,
    target: str = "calibration",
    draft: str = "calibration",
    kv_format: str | None = None,
) -> Overlay:
    """Materialise an overlay for a checkpoint.

    Args:
        folder: What to write; it must not exist, and not lie inside the checkpoint.
        checkpoint: Its folder; nothing there is changed.
        calibration: Result folder of `page4 calibrate`; None where neither source needs one.
        target, draft: Where the scales come from. `calibration`: each layer's own. `layer:N`: those that were
            calibrated for another layer, `layer:draft` the MTP layer's. `unit`: 1.0. `file:PATH`: those that
            another tool wrote into a safetensors file. `none`: none. `layer:N` and `unit` are prototypes, and
            labelled so.
        kv_format: What the scales are for; by default what the calibration is for, and e4m3 without one. What
            was calibrated by the rule "max" gives scales of every format.

    Raises:
        InputError: A source is unknown or not in the calibration, the calibration is of another checkpoint or
            revision or gives no scales of this format, or see `materialise`.
    """
    if folder.resolve().is_relative_to(checkpoint.resolve()):
        raise InputError(f"{folder} lies inside the checkpoint, which an overlay does not touch")
    base = describe_base(checkpoint)
    calibrated: dict[str, ScalePair] = {}
    provenance: dict[str, Any] = {"written": now()} | collect_provenance()
    if calibration is not None:
        report, digest = read_report(calibration, base)
        kv_format = kv_format or str(report["kv_format"])
        calibrated = reported_scales(report, str(calibration), kv_format)
        kept = ("kv_format", "rule", "percent", "config", "corpus", "windows", "tokens")
        provenance["calibration"] = {"sha256": digest} | {name: report.get(name) for name in kept}
    layers: Sequence[int | None] = base.layers
    draft_layers: Sequence[int | None] = (None,) if base.has_draft else ()
    return materialise(
        folder,
        base,
        kv_format or "e4m3",
        _sourced(target, layers, calibrated),
        _sourced(draft if base.has_draft else "none", draft_layers, calibrated),
        provenance,
    )


def read_report(calibration: Path, base: OverlayBase) -> tuple[dict[str, Any], str]:
    """The report of a calibration of this checkpoint, and its SHA-256.

    Raises:
        InputError: There is none, it is damaged, or it is of another checkpoint or revision.
    """
    file = calibration / REPORT_FILE
    if not file.is_file():
        raise InputError(
            f"{calibration} holds no {REPORT_FILE}; `page4 calibrate` writes one when it is finished"
        )
    data = file.read_bytes()
    report = parse_json(data, str(file))
    recorded = report.get("base") if isinstance(report, dict) else None
    if not isinstance(recorded, dict) or not isinstance(report.get("kv_format"), str):
        raise InputError(f"{file} is not the report of a calibration")
    get_format(report["kv_format"])
    differing = differing_files(recorded, base.files)
    if differing:
        raise InputError(f"{file} is of another checkpoint or revision: {', '.join(differing[:3])} differ")
    return report, hashlib.sha256(data).hexdigest()


def check_calibration(overlay: Overlay, base: OverlayBase, calibration: Path) -> None:
    """Refuse an overlay whose scales are not, bit for bit, those of a calibration in its format.

    Raises:
        InputError: A scale differs, a layer was not calibrated, or see `reported_scales`.
    """
    report, _ = read_report(calibration, base)
    calibrated = reported_scales(report, str(calibration), overlay.manifest.kv_format)
    held = {str(layer): pair for layer, pair in overlay.target.items()}
    if overlay.draft is not None:
        held[DRAFT] = overlay.draft
    for layer, pair in held.items():
        if pair != calibrated.get(layer):
            raise InputError(
                f"layer {layer} has {pair}, {calibration} found {calibrated.get(layer, 'nothing')}"
            )


def overlay_table(overlay: Overlay, base: OverlayBase) -> str:
    """What an overlay holds, layer by layer, as a Markdown table."""
    manifest = overlay.manifest
    largest = get_format(manifest.kv_format).max_value
    lines = [
        f"Scales for {manifest.kv_format}. Target: {manifest.target}. Draft: {manifest.draft}."
        + (" **Prototype**: not measured on the layers that they are for." if manifest.prototype else ""),
        "",
        "| layer | K scale | largest K | V scale | largest V |",
        "|---|---|---|---|---|",
    ]
    held: list[tuple[str, ScalePair | None]] = [
        (str(layer), overlay.target.get(layer)) for layer in base.layers
    ]
    if base.has_draft:
        held.append((DRAFT, overlay.draft))
    for layer, pair in held:
        cells = (
            ["none"] * 4
            if pair is None
            else [text for scale in (pair.k, pair.v) for text in (repr(scale), f"{scale * largest:.5g}")]
        )
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def overlay_record(overlay: Overlay) -> dict[str, Any]:
    """The same as JSON types."""
    pairs = {str(layer): pair for layer, pair in overlay.target.items()}
    if overlay.draft is not None:
        pairs[DRAFT] = overlay.draft
    manifest = overlay.manifest
    return {
        "kv_format": manifest.kv_format,
        "target": manifest.target,
        "draft": manifest.draft,
        "prototype": manifest.prototype,
        "count": dict(manifest.count),
        "scales": {layer: {"k": pair.k, "v": pair.v} for layer, pair in pairs.items()},
    }


def _from_file(file: Path, layers: Sequence[int | None]) -> Sourced:
    """Scales of layers that another tool wrote.

    Raises:
        InputError: The file is refused, or has none for a layer.
    """
    found = read_scales(file)
    missing = [layer for layer in layers if layer not in found]
    if missing:
        raise InputError(f"{file} has no scales of {describe_layer(missing[0])}")
    return Sourced(f"file {file.name}", {layer: found[layer] for layer in layers})


def _sourced(source: str, layers: Sequence[int | None], calibrated: Mapping[str, ScalePair]) -> Sourced:
    """Scales of layers from a source.

    Raises:
        InputError: An unknown source, or a layer that was not calibrated.
    """
    kind, colon, layer = source.partition(":")
    if source == "none":
        return Sourced("none", {})
    if source == "unit":
        return Sourced("unit", dict.fromkeys(layers, UNIT_SCALES))
    if kind == "file" and colon:
        return _from_file(Path(layer), layers)
    if source != "calibration" and not (kind == "layer" and colon):
        raise InputError(f"{source!r} is no source of scales; choose {_SOURCES}")
    if not calibrated:
        raise InputError(
            f"scales from {source!r} need --calibration, the folder of a finished `page4 calibrate`"
        )
    wanted = {at: layer if colon else DRAFT if at is None else str(at) for at in layers}
    for name in wanted.values():
        if name not in calibrated:
            raise InputError(f"layer {name} was not calibrated; there are {', '.join(calibrated)}")
    return Sourced(source.replace(":", " "), {at: calibrated[name] for at, name in wanted.items()})
