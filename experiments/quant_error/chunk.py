"""Comparing the rows of one chunk with those of the unquantised pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from page4.experiments.quant_error.compare import flips, jaccard, kl_divergence, token_loss
from page4.experiments.quant_error.config import Arm, Window
from page4.experiments.quant_error.passes import Passage
from page4.experiments.quant_error.sums import Sums
from page4.experiments.quant_error.theory import expected_squared_error, is_subnormal, saturates
from page4.kvcache.decoded import decoded_rows
from page4.model import Qwen4ExpForCausalLM
from page4.model.observation import DRAFT_LAYER, SparseCall
from page4.model.qsa_reference import selected_blocks

TARGET = "target"
"""What the target's logits are called; the MTP head's have its layer's name."""

KV_SUMS = ("error", "power", "expected", "clipped", "subnormal", "values")
OUTPUT_SUMS = ("output_power", "output_local", "output_accumulated")


class Chunk:
    """Rows at the positions `start .. stop - 1` of the prompt in row 0 of every cache.

    Args:
        windows: Those that the rows are to be put together in; at least one, and each has some of the rows.
        stride: One row in so many has its selected blocks compared, counted from the end of each window.
        base: The rows' unquantised passage.
        following: The token after each row and one more, int64 `[rows + 1]`, on any device.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        start: int,
        stop: int,
        windows: Sequence[Window],
        stride: int,
        base: Passage,
        following: Tensor,
    ) -> None:
        self._model = model
        self._base = base
        self._windows = windows
        self._start = start
        self._first = max(start, min(window.first for window in windows))
        self._stop = min(stop, max(window.stop for window in windows))
        picked = {
            window: [p for p in self._within(window) if (window.stop - 1 - p) % stride == 0]
            for window in windows
        }
        self._positions = sorted(set().union(*picked.values()))
        place = {position: index for index, position in enumerate(self._positions)}
        self._picked = {
            window: torch.tensor([place[p] for p in positions], device=model.device)
            for window, positions in picked.items()
            if positions
        }
        self._kv = {
            name: decoded_rows(call.cache, 0, self._first, self._stop) for name, call in base.calls.items()
        }
        self._selected = {name: self._select(call) for name, call in base.calls.items()}
        self._logits = self._logits_of(base)
        following = following.to(model.device)
        # The target's row at position p predicts token p + 1; the draft's has read that one.
        self._targets = {TARGET: self._rows(following[:-1]), DRAFT_LAYER: self._rows(following[1:])}
        self._loss = {name: token_loss(logits, self._targets[name]) for name, logits in self._logits.items()}

    def compare_layers(
        self, arm: Arm, passage: Passage, replayed: Mapping[str, SparseCall], sums: Sums
    ) -> None:
        """Add what an arm changes in every sparse layer."""
        for name, base in self._base.calls.items():
            local, own = replayed[name], passage.calls[name]
            stored = decoded_rows(local.cache, 0, self._first, self._stop)
            parts = zip(self._kv[name], stored, (local.cache.k_scale, local.cache.v_scale), strict=True)
            rows = [self._kv_rows(exact, kept, arm.kv_format, scale) for exact, kept, scale in parts]
            y, y_local, y_own = (self._rows(call.output).double() for call in (base, local, own))
            rows += [y.square().sum(1), (y_local - y).square().sum(1), (y_own - y).square().sum(1)]
            names = [f"{part}_{title}" for part in "kv" for title in KV_SUMS] + list(OUTPUT_SUMS)
            self._add(sums, arm, name, names, torch.cat([row.view(-1, y.shape[0]) for row in rows]))
            overlap = jaccard(self._selected[name], self._select(own))
            for window, picked in self._picked.items():
                chosen = overlap[picked]
                values = torch.stack([chosen, torch.ones_like(chosen)])
                sums.add((arm.name, window, name), ("jaccard", "picked"), values)

    def compare_logits(self, arm: Arm, passage: Passage, sums: Sums) -> None:
        """Add how far an arm's predictions are from the unquantised ones, and both from the text."""
        for name, logits in self._logits_of(passage).items():
            base = self._logits[name]
            loss = token_loss(logits, self._targets[name])
            by_row = {
                "kl": kl_divergence(base, logits),
                "flips": flips(base, logits).double(),
                "loss": loss,
                "loss_change": loss - self._loss[name],  # row by row, so that no small change is lost
                "rows": torch.ones_like(loss),
            }
            self._add(sums, arm, name, tuple(by_row), torch.stack(list(by_row.values())))

    def _within(self, window: Window) -> range:
        return range(max(window.first, self._first), min(window.stop, self._stop))

    def _rows(self, x: Tensor) -> Tensor:
        """The compared rows of the chunk's."""
        return x[self._first - self._start : self._stop - self._start]

    def _add(self, sums: Sums, arm: Arm, name: str, names: Sequence[str], values: Tensor) -> None:
        """Add `values [names, rows]` window by window."""
        for window in self._windows:
            rows = self._within(window)
            part = values[:, rows.start - self._first : rows.stop - self._first]
            sums.add((arm.name, window, name), names, part)

    def _kv_rows(self, exact: Tensor, stored: Tensor, kv_format: str, scale: float) -> Tensor:
        """Per row and in the order of KV_SUMS, of K or V `[rows, Hkv, D]`: float64 `[6, rows]`."""
        source = exact.to(self._model.dtype)  # as it was before it was stored
        wide = exact.double()
        by_value = (
            (stored.double() - wide).square(),
            wide.square(),
            expected_squared_error(source, kv_format, scale),
            saturates(source, kv_format, scale).double(),
            is_subnormal(source, kv_format, scale).double(),
            torch.ones_like(wide),
        )
        return torch.stack([values.sum(dim=(1, 2)) for values in by_value])

    def _select(self, call: SparseCall) -> Tensor:
        """Selected blocks of the picked rows, bool `[picked, blocks]`."""
        if not self._positions:
            return torch.zeros(0, 0, dtype=torch.bool, device=call.x.device)
        positions = torch.tensor(self._positions, device=call.x.device)
        return selected_blocks(call.attention, call.x[positions - self._start], positions, 0, call.cache)

    def _logits_of(self, passage: Passage) -> dict[str, Tensor]:
        """Logits `[rows, V]` of target and draft."""
        logits = {TARGET: self._model.logits(self._rows(passage.streams))}
        if passage.draft_streams is not None:
            logits[DRAFT_LAYER] = self._model.draft_logits(self._rows(passage.draft_streams))
        return logits
