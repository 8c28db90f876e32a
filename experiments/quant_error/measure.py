"""Measuring one prompt at one length: all arms go through it chunk by chunk beside the unquantised pass."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from page4.experiments.quant_error.chunk import Chunk
from page4.experiments.quant_error.config import QuantErrorConfig
from page4.experiments.quant_error.passes import Pass, Replay
from page4.experiments.quant_error.prompts import Prompts
from page4.experiments.quant_error.scales import ScalesByArm
from page4.experiments.quant_error.sums import Key, Sums
from page4.experiments.samples import Row
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment

_ABOUT: dict[str, type] = {"arm": str, "length": int, "first": int, "stop": int, "layer": str, "prompt": str}

LAYER_COLUMNS: dict[str, type] = _ABOUT | dict.fromkeys(
    (
        "k_error", "v_error", "k_expected", "v_expected", "k_clipped", "v_clipped", "k_subnormal",
        "v_subnormal", "output_local", "output_accumulated", "jaccard",
    ),
    float,
)  # fmt: skip
"""A row per arm, length, window of positions, sparse layer and prompt.

Errors are relative RMS; `expected` is what theory says of the same values. `clipped` and `subnormal` are
shares of the values. `output` is the attention layer's, of the unquantised pass's inputs (`local`) and of the
arm's own (`accumulated`). `jaccard` is the mean over rows.
"""

_LOGIT_MEANS = ("kl", "flips", "loss", "loss_change")

LOGIT_COLUMNS: dict[str, type] = _ABOUT | dict.fromkeys(_LOGIT_MEANS, float)
"""The same for the logits of target and draft, which stand in the column `layer`.

`kl` is the mean KL divergence of the unquantised pass from the arm in nats, `flips` the share of rows whose
most likely token is another. `loss` is the mean negative log-likelihood in nats of the text's next token, for
the draft of its next but one. `loss_change` is that minus the unquantised pass's on the same rows, so
`loss - loss_change` is that pass's own.
"""

KEY = tuple(_ABOUT)


class Measurer:
    """Runs prompts on one model.

    Args:
        model: The model, on its device.
        config: Resolved.
        prompts: The study's prompts.
        scales: Static scales of the arms that have them.
    """

    def __init__(
        self, model: Qwen4ExpForCausalLM, config: QuantErrorConfig, prompts: Prompts, scales: ScalesByArm
    ) -> None:
        self._model = model
        self._config = config
        self._prompts = prompts
        self._scales = scales

    @torch.inference_mode()
    def measure(self, index: int, length: int) -> tuple[list[Row], list[Row]]:
        """Rows of :data:`LAYER_COLUMNS` and of :data:`LOGIT_COLUMNS` of one prompt, for all arms."""
        config, model = self._config, self._model
        assert config.prefill_chunk is not None
        tokens = torch.tensor(self._prompts.tokens(index, length))
        layers, logits = Sums(), Sums()
        unquantised = Pass(model, length, None)
        passes = [
            (
                arm,
                Pass(model, length, arm.kv_format, self._scales[arm]),
                Replay(model, length, arm.kv_format, self._scales[arm]),
            )
            for arm in config.arms
        ]
        for start in range(0, length, config.prefill_chunk):
            stop = min(start + config.prefill_chunk, length)
            batch = self._rows(tokens, start, stop)
            drafting = self._rows(tokens[1:], start, stop)
            base = unquantised.advance(batch, drafting)
            windows = [w for w in config.windows(length) if w.first < stop and start < w.stop]
            chunk = None
            if windows:
                following = tokens[start + 1 : stop + 2]
                chunk = Chunk(model, start, stop, windows, config.selection_stride, base, following)
            for arm, own, replay in passes:
                passage = own.advance(batch, drafting)
                replayed = replay.advance(base.calls)
                if chunk is not None:
                    chunk.compare_layers(arm, passage, replayed, layers)
                    chunk.compare_logits(arm, passage, logits)
        about = {"length": length, "prompt": self._prompts.anchors[index].id}
        return (
            [about | _names(key) | _layer_row(sums) for key, sums in layers.items()],
            [about | _names(key) | _logit_row(sums) for key, sums in logits.items()],
        )

    def _rows(self, tokens: Tensor, start: int, stop: int) -> RowBatch:
        preceding = self._model.preceding(tokens, start)
        segment = Segment(0, start, tokens[start:stop], preceding, decode=False)
        return RowBatch.pack([segment], self._model.device)


def _names(key: Key) -> Row:
    arm, window, layer = key
    return {"arm": arm, "first": window.first, "stop": window.stop, "layer": layer}


def _layer_row(sums: Mapping[str, float]) -> Row:
    row = {
        "output_local": _relative(sums["output_local"], sums["output_power"]),
        "output_accumulated": _relative(sums["output_accumulated"], sums["output_power"]),
        "jaccard": _short(sums["jaccard"] / sums["picked"]),
    }
    for part in "kv":
        power, values = sums[f"{part}_power"], sums[f"{part}_values"]
        row |= {
            f"{part}_error": _relative(sums[f"{part}_error"], power),
            f"{part}_expected": _relative(sums[f"{part}_expected"], power),
            f"{part}_clipped": _short(sums[f"{part}_clipped"] / values),
            f"{part}_subnormal": _short(sums[f"{part}_subnormal"] / values),
        }
    return row


def _logit_row(sums: Mapping[str, float]) -> Row:
    return {name: _short(sums[name] / sums["rows"]) for name in _LOGIT_MEANS}


def _relative(error: float, power: float) -> float:
    """RMS of an error over that of what it is an error of; nothing is lost of nothing."""
    return _short(math.sqrt(error / power)) if power else 0.0


def _short(value: float) -> float:
    """Six digits: a study has some ten thousand rows."""
    return float(f"{value:.6g}")
