"""What tables and figures both say: of intervals, of the scale rules in the arms' names, of layers."""

from __future__ import annotations

from collections.abc import Iterable

from page4.experiments.quant_error.config import Arm, QuantErrorConfig
from page4.experiments.statistics import LEAST_CLUSTERS, TOO_FEW_PROMPTS
from page4.model.observation import DRAFT_LAYER


def intervals(config: QuantErrorConfig, shown: str) -> str:
    """What the intervals are, which are `shown` as bars or in brackets, or why there are none."""
    assert config.num_prompts is not None
    if config.num_prompts < LEAST_CLUSTERS:
        return TOO_FEW_PROMPTS
    return f"{shown}: {100 * config.confidence:g} % bootstrap intervals over {config.num_prompts} prompts"


def scale_rules(config: QuantErrorConfig, arms: Iterable[Arm]) -> str:
    """What the arms' names end in; empty where no arm has static scales."""
    meanings = {
        "max": "max clips nothing observed",
        "percentile": f"percentile clips nothing up to {config.percent:g} %",
        "mse": "mse has the least squared error",
    }
    used = dict.fromkeys(arm.rule for arm in arms if arm.rule is not None)
    if not used:
        return ""
    return f"names end in the rule of static scales: {'; '.join(meanings[rule] for rule in used)}"


def layer_title(layer: str) -> str:
    """A sparse layer's name in words."""
    return layer if layer == DRAFT_LAYER else f"layer {layer}"
