"""The tables of the study: theory beside what was stored, and what an arm changes at every length."""

from __future__ import annotations

import math

from page4.experiments.markdown import table
from page4.experiments.plots import format_tokens
from page4.experiments.quant_error.config import QuantErrorConfig
from page4.experiments.quant_error.notes import intervals, layer_title, scale_rules
from page4.experiments.quant_error.summary import UNQUANTISED, Metrics, reference_arm, unquantised_format
from page4.experiments.quant_error.theory import rounding_error
from page4.experiments.statistics import Estimate


def markdown_table(config: QuantErrorConfig, metrics: Metrics) -> str:
    """All tables as Markdown."""
    parts = [_stored(config, metrics), _predictions(config, metrics)]
    if metrics.has("kl_from_shortest"):
        parts.append(_growth(config, metrics))
    if metrics.has("loss"):
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
        if metrics.has("loss"):
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
                if metrics.has("loss"):
                    cells.append(_millinats(metrics.get("loss_change", *place, name)))
            rows.append(cells)
    return f"**Predictions, last {config.scored_tokens} tokens of every context**\n\n{table(header, rows)}"


def _growth(config: QuantErrorConfig, metrics: Metrics) -> str:
    """What the longest context adds to the errors at the shortest."""
    assert config.lengths is not None
    shortest, longest = config.lengths[0], config.lengths[-1]
    header = ["arm"]
    for name in metrics.logits:
        header += [f"{name} KL, millinats", f"{name} flips, points"]
    header += [f"output, accumulated, {layer_title(layer)}, points" for layer in metrics.layers]
    rows = []
    for arm in config.arms:
        place = (arm.name, longest, config.scored(longest))
        cells = [arm.name]
        for name in metrics.logits:
            cells.append(_millinats(metrics.get("kl_from_shortest", *place, name)))
            cells.append(_points(metrics.get("flips_from_shortest", *place, name)))
        for layer in metrics.layers:
            cells.append(_points(metrics.get("output_accumulated_from_shortest", *place, layer)))
        rows.append(cells)
    title = (
        f"**Growth with context, {format_tokens(longest)} against the shortest, {format_tokens(shortest)}, "
        f"last {config.scored_tokens} tokens of both**"
    )
    return f"{title}\n\n{table(header, rows)}"


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
    said_of_intervals, said_of_rules = (
        f" {text[0].upper()}{text[1:]}." if text else ""
        for text in (intervals(config, "in brackets"), scale_rules(config, config.arms))
    )
    growth = (
        " Growth is paired on the prompt: an arm's error at the longest context minus its error at the "
        "shortest, of the same tokens."
    )
    loss = (
        " The loss is the mean negative log-likelihood of the text's next token, for the draft of the next "
        "but one; its change is against the unquantised pass, or against the next shorter context, where "
        "that is asked for the same tokens."
    )
    return (
        f"{config.num_prompts} prompts of real text on {config.device}, against a pass with an unquantised "
        f"({own}) cache.{control}{said_of_intervals}{said_of_rules} Errors are relative RMS. *rounding*: of "
        "the format's normal values, whatever they are; *expected*: of the values that were stored. *local*: "
        "the layer alone, on the unquantised pass's inputs; *accumulated*: on the arm's own. The KL "
        "divergence is that of the unquantised prediction from the arm's; the draft's is of its first step."
        f"{growth if metrics.has('kl_from_shortest') else ''}{loss if metrics.has('loss') else ''}"
    )


def _percent(estimate: Estimate, interval: bool = False) -> str:
    shown = estimate if interval else Estimate(estimate.value, math.nan, math.nan, estimate.clusters)
    return _number(shown.scaled(100), "{:.3g}", " %")


def _millinats(change: Estimate) -> str:
    return _number(change.scaled(1000), "{:+.3g}")


def _points(change: Estimate) -> str:
    return _number(change.scaled(100), "{:+.3g}")


def _number(estimate: Estimate, style: str, unit: str = "") -> str:
    if math.isnan(estimate.value):
        return "-"
    interval = ""
    if not math.isnan(estimate.low):
        interval = f" [{style.format(estimate.low)}, {style.format(estimate.high)}]"
    return f"{style.format(estimate.value)}{unit}{interval}"
