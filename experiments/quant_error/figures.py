"""The figures of the study."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.figure import Figure

from page4.experiments.plots import format_tokens
from page4.experiments.quant_error.chunk import TARGET
from page4.experiments.quant_error.config import Arm, QuantErrorConfig, Window
from page4.experiments.quant_error.notes import intervals, layer_title, scale_rules
from page4.experiments.quant_error.panels import Line, Panel, plot_panels
from page4.experiments.quant_error.summary import UNQUANTISED, Metrics, unquantised_format
from page4.experiments.quant_error.theory import rounding_error
from page4.model.observation import DRAFT_LAYER

_ERROR = "relative RMS error"
_OFF = "an arm without error is not on a logarithmic axis"
_MILLINATS = ("kl", "loss_change")
"""What is shown in the unit of the tables."""


class Figures:
    """Figures by file name.

    Args:
        config: Resolved.
        metrics: Of the finished study.
    """

    def __init__(self, config: QuantErrorConfig, metrics: Metrics) -> None:
        assert config.lengths is not None
        self._config, self._metrics = config, metrics
        self._longest = config.lengths[-1]
        self._bars = intervals(config, "bars")
        # Lines of every rule hide each other; points side by side do not.
        self._lined = [arm for arm in config.arms if arm.rule in (None, config.rules[0])]
        self._base = f"against an unquantised ({unquantised_format(config)}) cache"

    def all(self) -> dict[str, Figure]:
        """Every figure."""
        return {
            "kv_error.png": self._kv_error(),
            "output_error.png": self._output_error(),
            "overlap.png": self._overlap(),
            "by_length.png": self._by_length(),
            "by_position.png": self._by_position(),
        }

    def _kv_error(self) -> Figure:
        panels = [self._layers(part.upper(), f"{part}_error", f"{part}_expected") for part in "kv"]
        theory = (
            "dashed: rounding of a format's normal values, 2^-m / sqrt(32 ln 2); black: expected of the "
            "stored values,\nwith subnormals, saturation and int8's steps"
        )
        title = f"Quantisation error of stored K and V, {self._base}"
        return plot_panels(panels, 2, title, self._note(self._end, _OFF, theory=theory))

    def _output_error(self) -> Figure:
        panels = [
            self._layers("on the unquantised pass's inputs", "output_local"),
            self._layers("on the arm's own inputs (accumulated)", "output_accumulated"),
        ]
        title = f"Error of the attention layers' outputs, {self._base}"
        return plot_panels(panels, 2, title, self._note(self._end, _OFF))

    def _overlap(self) -> Figure:
        panels = [
            self._lengths(layer_title(layer), "Jaccard index", "jaccard", layer, logarithmic=False)
            for layer in self._metrics.layers
        ]
        all_chosen = "a row that sees no more blocks than it selects selects all of them"
        note = self._note(f"{self._scored}, mean over rows", all_chosen, lines=True)
        return plot_panels(panels, len(panels), f"Overlap of selected blocks, {self._base}", note, True)

    def _by_length(self) -> Figure:
        names = self._metrics.logits
        panels = [self._lengths(f"KL divergence, {name}", "KL (millinats)", "kl", name) for name in names]
        panels += [
            self._lengths(f"argmax flips, {name}", "share of rows", "flips", name, True, False)
            for name in names
        ]
        if self._metrics.has("loss"):
            panels += [self._loss_change(name) for name in names]
            panels += [self._unquantised_loss(name) for name in names]
        title = f"Predictions by context length, {self._base}"
        return plot_panels(panels, len(names), title, self._note(self._scored, _OFF, lines=True))

    def _by_position(self) -> Figure:
        last = [layer for layer in self._metrics.layers if layer != DRAFT_LAYER][-1]
        output = f"output of layer {last}, accumulated"
        panels = [
            self._positions(f"K, layer {last}", _ERROR, "k_error", last, True),
            self._positions(f"V, layer {last}", _ERROR, "v_error", last, True),
            self._positions(output, _ERROR, "output_accumulated", last, True),
        ]
        panels += [
            self._positions(f"KL divergence, {name}", "KL (millinats)", "kl", name)
            for name in self._metrics.logits
        ]
        panels.append(self._positions("argmax flips, target", "share of rows", "flips", TARGET, True, False))
        title = f"By position in prompts of {format_tokens(self._longest)} tokens, {self._base}"
        note = self._note("positions since the tick before", _OFF, lines=True)
        return plot_panels(panels, 3, title, note)

    def _note(self, about: str, limit: str, theory: str = "", lines: bool = False) -> str:
        """The small print: what the rows are, intervals, what is not shown, the arms' names."""
        arms = self._lined if lines else self._config.arms
        names = [scale_rules(self._config, arms)]
        if len(arms) < len(self._config.arms):
            names.append("the other rules are in summary.csv")
        printed = [f"{about}; {self._bars}", limit, theory, "; ".join(filter(None, names))]
        return "\n".join(filter(None, printed))

    @property
    def _end(self) -> str:
        first, stop = self._config.scored(self._longest)
        return f"last {stop - first} of {format_tokens(self._longest)} tokens"

    @property
    def _scored(self) -> str:
        return f"last {self._config.scored_tokens} tokens of every context"

    def _layers(self, title: str, name: str, expected: str | None = None) -> Panel:
        """By layer, at the end of the longest prompts; with theory where there is one."""
        places = [
            (self._longest, self._config.scored(self._longest), layer) for layer in self._metrics.layers
        ]
        own = unquantised_format(self._config)
        levels = [(f, rounding_error(f)) for f in self._config.formats if f != own] if expected else []
        return Panel(
            title,
            "sparse layer",
            _ERROR,
            [layer_title(layer) for layer in self._metrics.layers],
            self._lines(self._config.arms, name, places, expected),
            percent=True,
            levels=[(kv_format, level) for kv_format, level in levels if level is not None],
        )

    def _lengths(
        self,
        title: str,
        ylabel: str,
        name: str,
        layer: str,
        percent: bool = False,
        logarithmic: bool = True,
    ) -> Panel:
        """By context length, at the end of every prompt."""
        lengths = self._config.lengths or ()
        places = [(length, self._config.scored(length), layer) for length in lengths]
        lines = self._lines(self._lined, name, places)
        return Panel(title, "context length (tokens)", ylabel, lengths, lines, percent, logarithmic)

    def _loss_change(self, name: str) -> Panel:
        """What arms add to the loss, by context length."""
        panel = self._lengths(
            f"loss change, {name}", "change (millinats)", "loss_change", name, logarithmic=False
        )
        return dataclasses.replace(panel, zero=True)

    def _unquantised_loss(self, name: str) -> Panel:
        """What context is worth without an arm."""
        lengths = self._config.lengths or ()
        losses = [
            self._metrics.get("loss", UNQUANTISED, length, self._config.scored(length), name)
            for length in lengths
        ]
        title, x = f"loss of the unquantised pass, {name}", "context length (tokens)"
        return Panel(title, x, "loss (nats)", lengths, [Line(None, losses)], logarithmic=False)

    def _positions(
        self,
        title: str,
        ylabel: str,
        name: str,
        layer: str,
        percent: bool = False,
        logarithmic: bool = True,
    ) -> Panel:
        """By position in the longest prompts."""
        buckets = self._config.buckets
        lines = self._lines(self._lined, name, [(self._longest, bucket, layer) for bucket in buckets])
        ticks = [bucket.stop for bucket in buckets]
        return Panel(title, "position, up to (tokens)", ylabel, ticks, lines, percent, logarithmic)

    def _lines(
        self,
        arms: Sequence[Arm],
        name: str,
        places: Sequence[tuple[int, Window, str]],
        expected: str | None = None,
    ) -> list[Line]:
        get, factor = self._metrics.get, 1000 if name in _MILLINATS else 1
        return [
            Line(
                arm,
                [get(name, arm.name, *place).scaled(factor) for place in places],
                [get(expected, arm.name, *place).value for place in places] if expected else None,
            )
            for arm in arms
        ]
