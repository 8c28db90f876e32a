"""What a calibration found, as JSON, table and figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from page4.experiments.calibrate.config import CalibrateConfig
from page4.experiments.calibrate.figure import plot_magnitudes
from page4.experiments.calibrate.state import Observed
from page4.experiments.result_folder import ResultFolder
from page4.kernels.errors import InputError
from page4.kvcache import KVFormat, ScalePair, get_format
from page4.kvcache.magnitudes import Magnitudes
from page4.kvcache.scale_rules import ScaleRule, choose_scale, relative_rms_error
from page4.kvcache.scales import scale_for_maximum
from page4.spec_decode.calibration import DRAFT

REPORT_FILE = "report.json"


def write_report(
    results: ResultFolder, config: CalibrateConfig, observed: Observed, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `report.json`, `table.md` and `magnitudes.png`; returns the content of the first.

    Args:
        results: Where to.
        config: Rule and format.
        observed: Everything that was to be seen.
        about: What else the report says: of checkpoint, corpus and overlap.

    Raises:
        InputError: A layer saw nothing but zeros.
    """
    assert observed.observation is not None
    layers = observed.observation.layers
    report: dict[str, Any] = {
        "study": "calibrate",
        "kv_format": config.kv_format,
        "rule": config.rule,
        "percent": config.percent if config.rule == "percentile" else None,
        **about,
        "windows": observed.windows,
        "tokens": observed.tokens,
        "layers": {
            name: {
                part: _part(config, m, f"{part} of layer {name}") for part, m in zip("kv", pair, strict=True)
            }
            for name, pair in layers.items()
        },
    }
    results.write_json(REPORT_FILE, report)
    results.write_text("table.md", _table(report))
    results.write_figure("magnitudes.png", plot_magnitudes(report))
    return report


def reported_scales(report: Mapping[str, Any], where: str, kv_format: str) -> dict[str, ScalePair]:
    """The scales of a report by layer, the MTP layer's as `draft`, for its own format or another.

    What was seen does not depend on the format. By the rule "max", the maxima in the report give the scales
    of any; the other rules take all that was seen, which a report does not hold.

    Raises:
        InputError: It is no report, holds a scale that is no positive finite number, or is made for another
            format by another rule than "max"; or the format has no static scales.
    """
    if not get_format(kv_format).needs_scale:
        raise InputError(f"KV format {kv_format} has no static scales")
    own = report["kv_format"] == kv_format
    if not own and report.get("rule") != "max":
        raise InputError(
            f"{where} has scales of {report['kv_format']} by the rule {report.get('rule')}; for others, use "
            f"page4 calibrate --format {kv_format} --rule {report.get('rule')} --merge {where}"
        )
    largest = get_format(kv_format).max_value

    def scale(part: Mapping[str, Any]) -> float:
        return float(part["scale"]) if own else scale_for_maximum(float(part["maximum"]), largest)

    try:
        layers = report["layers"]
        return {name: ScalePair(scale(pair["k"]), scale(pair["v"])) for name, pair in layers.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where} is not the report of a calibration: {error}") from error


def _part(config: CalibrateConfig, observed: Magnitudes, what: str) -> dict[str, Any]:
    """K or V of one layer."""
    kv_format = get_format(config.kv_format)
    if not observed.maximum:
        raise InputError(f"{what} was zero throughout: there is nothing to calibrate from")
    by_rule = {
        rule: _outcome(observed, kv_format, choose_scale(observed, kv_format, rule, config.percent))
        for rule in get_args(ScaleRule)
    }
    scale = by_rule[config.rule]["scale"]
    return {
        "log2_limit": math.log2(scale * kv_format.max_value),
        "values": observed.total,
        "maximum": observed.maximum,
        "p99.9": observed.percentile(99.9),
        "p99.99": observed.percentile(99.99),
        **by_rule[config.rule],
        "saturated_at_scale_1": observed.share_above(kv_format.max_value),
        "by_rule": by_rule,
        "heads": [_head(config, head) for head in observed.heads],
        "log2_histogram": [[edge, count] for edge, count in observed.by_log2()],
    }


def _outcome(observed: Magnitudes, kv_format: KVFormat, scale: float) -> dict[str, float]:
    return {
        "scale": scale,
        "saturated": observed.share_above(scale * kv_format.max_value),
        "relative_rms_error": relative_rms_error(observed, kv_format, scale),
    }


def _head(config: CalibrateConfig, observed: Magnitudes) -> dict[str, Any]:
    """One head: reported, as no kernel takes a scale per head. None where it saw nothing but zeros."""
    kv_format = get_format(config.kv_format)
    scale = choose_scale(observed, kv_format, config.rule, config.percent) if observed.maximum else None
    return {"scale": scale, "maximum": observed.maximum}


def _table(report: Mapping[str, Any]) -> str:
    rule = f"{report['percent']:g}th percentile" if report["percent"] else report["rule"]
    lines = [
        f"Scales of {report['kv_format']} by the rule *{rule}*, from {report['tokens']:,} tokens in "
        f"{report['windows']} windows.",
        "",
        "| layer | | max | p99.9 | p99.99 | scale | clipped | RMS error | by rule mse | heads' scales |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for layer, pair in report["layers"].items():
        for part, found in pair.items():
            heads = " ".join(
                "-" if head["scale"] is None else f"{head['scale']:.5g}" for head in found["heads"]
            )
            lines.append(
                f"| {layer} | {part.upper()} | {found['maximum']:.5g} | {found['p99.9']:.5g} "
                f"| {found['p99.99']:.5g} | {found['scale']:.6g} | {100 * found['saturated']:.2g} % "
                f"| {100 * found['relative_rms_error']:.3g} % "
                f"| {100 * found['by_rule']['mse']['relative_rms_error']:.3g} % | {heads} |"
            )
    lines += ["", f"RMS error: of storing what was seen, over its own RMS. `{DRAFT}` is the MTP layer."]
    return "\n".join(lines) + "\n"
