"""The tables of the study: theory beside what was stored, and what an arm changes at every length."""

from __future__ import annotations

import math

from page4.experiments.markdown import table
from page4.experiments.plots import format_tokens
from page4.experiments.quant_error.config import QuantErrorConfig
from page4.experiments.quant_error.summary import UNQUANTISED, Metrics, reference_arm, unquantised_format
from page4.experiments.quant_error.theory import rounding_error
from page4.experiments.statistics import LEAST_CLUSTERS, Estimate


def markdown_table(config: QuantErrorConfig, metrics: Metrics) -> str:
    """All tables as Markdown."""
    parts = [_stored(config, metrics), _predictions(config, metrics)]
    if metrics.has_loss:
        parts.append(_context(config, metrics))
    parts.append(_notes(config, metrics))
    return "\n\n".join(parts) + "\n"


def _stored(config: QuantErrorConfig, metrics: Metrics) -> str:
    """K, V, outputs and selections by layer, at the end of the longest prompts."""
    assert config.lengths is not None
    length = config.lengths[-1]
    end = config.scored(length)
    header = [
        "arm", "layer", "rounding", "K error", "expected", "clipped", "V error", "expected", "clipped",
        "output, local", "output, accumulated", "Jaccard",
    ]  # fmt: skip
    rows = []
    for arm in config.arms:
        for layer in metrics.layers:

            def get(name: str, arm: str = arm.name, layer: str = layer) -> Estimate:
                return metrics.get(name, arm, length, end, layer)

            theory = rounding_error(arm.kv_format)
            cells = [arm.name, layer, "-" if theory is None else f"{100 * theory:.3g} %"]
            for part in "kv":
                cells += [_percent(get(f"{part}_{name}")) for name in ("error", "expected", "clipped")]
            cells += [_percent(get("output_local")), _percent(get("output_accumulated"), True)]
            rows.append([*cells, _number(get("jaccard"), "{:.4f}")])
    title = f"**By layer, last {end.stop - end.first} of {format_tokens(length)} tokens**"
    return f"{title}\n\n{table(header, rows)}"


def _predictions(config: QuantErrorConfig, metrics: Metrics) -> str:
    """Logits by arm and length."""
    reference = reference_arm(config)
    header = ["arm", "context"]
    for name in metrics.logits:
        header += [f"{name} KL, millinats", f"{name} flips"]
        if reference is not None:
            header.append(f"{name} KL against {reference}")
        if metrics.has_loss:
            header.append(f"{name} loss change, millinats")
    rows = []
    for arm in config.arms:
        for length in config.lengths or ():
            place = (arm.name, length, config.scored(length))
            cells = [arm.name, format_tokens(length)]
            for name in metrics.logits:
                kl = metrics.get("kl", *place, name)
                cells += [
                    _number(kl.scaled(1000), "{:.3g}"),
                    _percent(metrics.get("flips", *place, name), True),
                ]
                if reference is not None:
                    cells.append(_number(metrics.get("kl_change", *place, name), "{:+.0f}", " %"))
                if metrics.has_loss:
                    cells.append(_millinats(metrics.get("loss_change", *place, name)))
            rows.append(cells)
    return f"**Predictions, last {config.scored_tokens} tokens of every context**\n\n{table(header, rows)}"


def _context(config: QuantErrorConfig, metrics: Metrics) -> str:
    """What more context is worth to the unquantised pass."""
    header = ["context"]
    for name in metrics.logits:
        header += [f"{name} loss, nats", "from the next shorter, millinats"]
    rows = []
    for length in config.lengths or ():
        cells = [format_tokens(length)]
        for name in metrics.logits:
            place = (UNQUANTISED, length, config.scored(length), name)
            cells.append(_number(metrics.get("loss", *place), "{:.4f}"))
            cells.append(_millinats(metrics.get("loss_from_shorter", *place)))
        rows.append(cells)
    title = f"**Unquantised loss, last {config.scored_tokens} tokens of every context**"
    return f"{title}\n\n{table(header, rows)}"


def _notes(config: QuantErrorConfig, metrics: Metrics) -> str:
    own = unquantised_format(config)
    control = f" The arm {own} stores what that pass stores: a control." if own in config.formats else ""
    loss = (
        " The loss is the mean negative log-likelihood of the text's next token, for the draft of the next "
        "but one; its change is against the unquantised pass, or against the next shorter context, where "
        "that is asked for the same tokens."
    )
    return (
        f"{config.num_prompts} prompts of real text on {config.device}, against a pass with an unquantised "
        f"({own}) cache.{control} In brackets: {100 * config.confidence:g} % bootstrap intervals over "
        f"prompts, if there are at least {LEAST_CLUSTERS}. Errors are relative RMS. *rounding*: of the "
        "format's normal values, whatever they are; *expected*: of the values that were stored. *local*: "
        "the layer alone, on the unquantised pass's inputs; *accumulated*: on the arm's own. The KL "
        "divergence is that of the unquantised prediction from the arm's; the draft's is of its first step."
        f"{loss if metrics.has_loss else ''}"
    )


def _percent(estimate: Estimate, interval: bool = False) -> str:
    shown = estimate if interval else Estimate(estimate.value, math.nan, math.nan, estimate.clusters)
    return _number(shown.scaled(100), "{:.3g}", " %")


def _millinats(change: Estimate) -> str:
    return _number(change.scaled(1000), "{:+.3g}")


def _number(estimate: Estimate, style: str, unit: str = "") -> str:
    if math.isnan(estimate.value):
        return "-"
    interval = ""
    if not math.isnan(estimate.low):
        interval = f" [{style.format(estimate.low)}, {style.format(estimate.high)}]"
    return f"{style.format(estimate.value)}{unit}{interval}"
