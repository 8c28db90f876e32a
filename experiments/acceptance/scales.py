"""KV scales of a study: calibrated once from its own prompts, kept in its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.results import ResultFolder
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair, get_format
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import calibrate_scales

SCALES_FILE = "scales.json"

ScalesByFormat = Mapping[str, KVScales]


def calibrated_scales(
    config: AcceptanceConfig,
    model: Qwen4ExpForCausalLM,
    beginnings: Sequence[Sequence[int]],
    results: ResultFolder,
) -> ScalesByFormat:
    """Scales of every format that needs them: those in the folder, or new ones from `beginnings`.

    Raises:
        InputError: `scales.json` is there but does not hold finite positive scales of these formats.
    """
    names = {name for arm in config.all_arms for name in arm.formats}
    formats = sorted(name for name in names if get_format(name).needs_scale)
    file = results.path / SCALES_FILE
    if file.exists():
        return _from_json(file.read_text(encoding="utf-8"), formats, str(file))
    scales = {name: calibrate_scales(model, beginnings, name, config.prefill_chunk) for name in formats}
    results.write_json(SCALES_FILE, {name: dataclasses.asdict(found) for name, found in scales.items()})
    return scales


def arm_scales(arm: Arm, scales: ScalesByFormat) -> KVScales | None:
    """The target's scales of its format beside the draft's of its own; None when neither needs any."""
    target, draft = scales.get(arm.target_format), scales.get(arm.draft_format)
    if target is None and draft is None:
        return None
    return KVScales(target.target if target else (), draft.draft if draft else None)


def _from_json(text: str, formats: Sequence[str], file: str) -> ScalesByFormat:
    try:
        content = json.loads(text)
        return {name: _scales(content[name]) for name in formats}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} does not hold KV scales for {', '.join(formats)}: {error}") from error


def _scales(content: Mapping[str, Any]) -> KVScales:
    draft = content["draft"]
    target = tuple(ScalePair(**pair) for pair in content["target"])
    return KVScales(target, None if draft is None else ScalePair(**draft))
