"""KV scales of a study: an overlay's, or calibrated once from its own prompts; kept in its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.info import overlay_folder
from page4.experiments.result_folder import ResultFolder
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, LayerFormats, ScalePair, get_format
from page4.kvcache.layer_formats import scales_of
from page4.kvcache.overlay_folder import read_overlays
from page4.kvcache.overlay_scales import scales_by_format
from page4.model import Qwen4ExpForCausalLM
from page4.model.kv_scales import describe_base
from page4.spec_decode import observe_texts

SCALES_FILE = "scales.json"
DYNAMIC = {"dynamic": "one FP32 scale per token and KV head, for K and for V, computed as they are written"}
"""What the file says of a format that has no static scales because it computes them."""

ScalesByFormat = Mapping[str, KVScales]


def overlay_scales(config: AcceptanceConfig, checkpoint: Path) -> ScalesByFormat:
    """What the arms need of the overlays that the configuration names, checked before anything is run.

    Raises:
        InputError: An overlay is refused, they lack what an arm needs, or no arm needs static scales.
    """
    base = describe_base(checkpoint)
    overlays = read_overlays(overlay_folder(config.scales), base)
    found: dict[str, KVScales] = {}
    for arm in config.all_arms:
        if any(get_format(name).needs_scale for name in arm.format_names):
            needed = scales_by_format(overlays, base, *arm.formats, config.allow_unit_target_scales)
            for name, scales in needed.items():
                others = found.get(name, KVScales(()))
                found[name] = KVScales(scales.target or others.target, scales.draft or others.draft)
    if not found:
        raise InputError("no arm has a format with static scales: leave out the overlay")
    return found


def study_scales(
    config: AcceptanceConfig,
    model: Qwen4ExpForCausalLM,
    beginnings: Sequence[Sequence[int]],
    overlaid: ScalesByFormat | None,
    results: ResultFolder,
) -> ScalesByFormat:
    """Scales of the formats that need them: an overlay's, those in the folder, or new from `beginnings`.

    `scales.json` also names the formats that compute scales of their own; nothing is calibrated for them.

    Raises:
        InputError: `scales.json` is there but does not hold finite positive scales of these formats, or holds
            static ones of a format that computes its own.
    """
    names = sorted({name for arm in config.all_arms for name in arm.format_names})
    static = [name for name in names if get_format(name).needs_scale]
    dynamic = [name for name in names if get_format(name).has_token_scales]
    file = results.path / SCALES_FILE
    if overlaid is None and file.exists():
        return _from_json(file.read_text(encoding="utf-8"), static, dynamic, str(file))
    scales = dict(overlaid or {})
    if overlaid is None and static:
        observation = observe_texts(model, beginnings, config.prefill_chunk)
        scales = {name: observation.scales(name) for name in static}
    content = {name: dataclasses.asdict(found) for name, found in scales.items()}
    results.write_json(SCALES_FILE, content | dict.fromkeys(dynamic, DYNAMIC))
    return scales


def arm_scales(arm: Arm, layers: Sequence[int], scales: ScalesByFormat) -> KVScales | None:
    """Scales of every layer and of the draft in their own formats; None when none of them needs any.

    Args:
        layers: Numbers of the model's QSA layers.
    """
    return scales_of(LayerFormats(arm.target_format), get_format(arm.draft_format), layers, scales)


def _from_json(text: str, static: Sequence[str], dynamic: Sequence[str], file: str) -> ScalesByFormat:
    try:
        content = json.loads(text)
        scales = {name: scales_from_json(content[name]) for name in static}
        stray = [name for name in dynamic if content[name] != DYNAMIC]
    except (ValueError, KeyError, TypeError) as error:
        formats = ", ".join([*static, *dynamic])
        raise InputError(f"{file} does not hold KV scales for {formats}: {error}") from error
    if stray:
        raise InputError(f"{file} holds static scales of {', '.join(stray)}, which computes one per token")
    return scales


def scales_from_json(content: Mapping[str, Any]) -> KVScales:
    """The scales whose fields JSON holds.

    Raises:
        KeyError, TypeError, InputError: They are no scales.
    """
    draft = content["draft"]
    target = tuple(ScalePair(**pair) for pair in content["target"])
    return KVScales(target, None if draft is None else ScalePair(**draft))
