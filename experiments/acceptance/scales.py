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
DYNAMIC = {"dynamic": "one FP32 scale per token and KV head, for K and for V, computed as they are written"}
"""What the file says of a format that has no static scales because it computes them."""

ScalesByFormat = Mapping[str, KVScales]


def calibrated_scales(
    config: AcceptanceConfig,
    model: Qwen4ExpForCausalLM,
    beginnings: Sequence[Sequence[int]],
    results: ResultFolder,
) -> ScalesByFormat:
    """Scales of every format that needs them: those in the folder, or new ones from `beginnings`.

    `scales.json` also names the formats that compute scales of their own; nothing is calibrated for them.

    Raises:
        InputError: `scales.json` is there but does not hold finite positive scales of these formats, or holds
            static ones of a format that computes its own.
    """
    names = sorted({name for arm in config.all_arms for name in arm.formats})
    static = [name for name in names if get_format(name).needs_scale]
    dynamic = [name for name in names if get_format(name).has_token_scales]
    file = results.path / SCALES_FILE
    if file.exists():
        return _from_json(file.read_text(encoding="utf-8"), static, dynamic, str(file))
    scales = {name: calibrate_scales(model, beginnings, name, config.prefill_chunk) for name in static}
    content = {name: dataclasses.asdict(found) for name, found in scales.items()}
    results.write_json(SCALES_FILE, content | dict.fromkeys(dynamic, DYNAMIC))
    return scales


def arm_scales(arm: Arm, scales: ScalesByFormat) -> KVScales | None:
    """The target's scales of its format beside the draft's of its own; None when neither needs any."""
    target, draft = scales.get(arm.target_format), scales.get(arm.draft_format)
    if target is None and draft is None:
        return None
    return KVScales(target.target if target else (), draft.draft if draft else None)


def _from_json(text: str, static: Sequence[str], dynamic: Sequence[str], file: str) -> ScalesByFormat:
    try:
        content = json.loads(text)
        scales = {name: _scales(content[name]) for name in static}
        stray = [name for name in dynamic if content[name] != DYNAMIC]
    except (ValueError, KeyError, TypeError) as error:
        formats = ", ".join([*static, *dynamic])
        raise InputError(f"{file} does not hold KV scales for {formats}: {error}") from error
    if stray:
        raise InputError(f"{file} holds static scales of {', '.join(stray)}, which computes one per token")
    return scales


def _scales(content: Mapping[str, Any]) -> KVScales:
    draft = content["draft"]
    target = tuple(ScalePair(**pair) for pair in content["target"])
    return KVScales(target, None if draft is None else ScalePair(**draft))
