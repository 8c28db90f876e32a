"""What a checkpoint is judged by: held-out loss, loss against context, and acceptance of its drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.experiments.training.sequence import SequenceModel

T = TypeVar("T")
Texts = dict[str, Tensor]
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
EDGES = (0, 256, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class EvaluationConfig:
    """Sizes of an evaluation; the defaults are the shipped ``eval.json``'s.

    Attributes:
        tokens: tokens of one forward pass.
        windows: 2k windows per text.
        max_windows: most windows of the two long-context measurements, evenly spread.
        prefixes: (prefix length, number of prefixes).
    """

    tokens: int = 131072
    windows: int = 16
    loss_context: int = 2048
    contexts: tuple[int, ...] = CONTEXTS
    edges: tuple[int, ...] = EDGES
    max_windows: int = 64
    prefixes: tuple[tuple[int, int], ...] = ((1024, 800), (4096, 480), (8192, 320), (32768, 120))
    num_drafts: int = 3
    seed: int = 2


class Evaluator:
    """Measures a model on texts, with QSA selection as at inference."""

    def __init__(
        self,
        sequence: SequenceModel,
        config: EvaluationConfig,
        device: torch.device,
        autocast: Callable[[], Any],
    ) -> None:
        self.sequence, self.config, self.device, self.autocast = sequence, config, device, autocast

    @torch.no_grad()
    def _hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[B, T, H]`` and streams ``[B, T, S*H]``."""
        run = self.sequence.begin(ids, sparse=True)
        hidden, streams = self.sequence.trunk(run)
        return hidden.unflatten(0, ids.shape), streams.unflatten(0, ids.shape)

    @torch.no_grad()
    def _losses(self, windows: Tensor, last: int | None = None) -> Tensor:
        """Loss per token ``[n, last]`` of windows ``[n, T + 1]``, nats."""
        results = []
        context = windows.shape[1] - 1
        last = last or context
        for part in windows.split(max(1, self.config.tokens // context)):
            part = part.to(self.device)
            with self.autocast():
                hidden, _ = self._hidden(part[:, :-1])
                for one, targets in zip(hidden[:, -last:], part[:, -last:], strict=True):
                    logits = F.linear(one, self.sequence.head).float()
                    results.append(F.cross_entropy(logits, targets, reduction="none").cpu())
        return torch.stack(results)

    def text_loss(self, texts: Texts) -> dict[str, Any]:
        """Mean loss of random windows, by text."""
        context = self.config.loss_context
        generator = torch.Generator().manual_seed(self.config.seed)
        by_text = {}
        for name, text in sorted(texts.items()):
            if len(text) <= context + 1:
                continue
            starts = torch.randint(0, len(text) - context - 1, (self.config.windows,), generator=generator)
            windows = text[starts[:, None] + torch.arange(context + 1)]
            by_text[name] = round(self._losses(windows).mean().item(), 4)
        return {"context": context, "mean": _mean(by_text.values()), "by_text": by_text}

    def loss_by_position(self, texts: Texts) -> dict[str, Any]:
        """Loss at positions of windows of the longest context."""
        edges = self.config.edges
        context = edges[-1]
        windows = [
            text[start : start + context + 1]
            for _, text in sorted(texts.items())
            for start in range(0, len(text) - context - 1, context)
        ]
        if not windows:
            return {"windows": 0, "edges": list(edges), "nats": []}
        windows = _spread(windows, self.config.max_windows)
        losses = self._losses(torch.stack(windows))
        nats = [round(losses[:, a:b].mean().item(), 4) for a, b in pairwise(edges)]
        return {"windows": len(windows), "edges": list(edges), "nats": nats}

    def loss_by_context(self, texts: Texts, targets: int = 512) -> dict[str, Any]:
        """Loss of the same target tokens under growing context."""
        longest = self.config.contexts[-1]
        ends = [
            (text, end)
            for _, text in sorted(texts.items())
            for end in range(longest, len(text) - 1, longest // 2)
        ]
        ends = _spread(ends, self.config.max_windows)
        nats: dict[str, float] = {}
        error: dict[str, float | None] = {}
        previous: Tensor | None = None
        for context in self.config.contexts if ends else ():
            windows = torch.stack([text[end - context : end + 1] for text, end in ends])
            losses = self._losses(windows, last=min(targets, context)).mean(1)
            nats[str(context)] = round(losses.mean().item(), 4)
            if previous is not None:
                error[str(context)] = _standard_error(losses - previous)
            previous = losses
        return {"windows": len(ends), "targets": targets, "nats": nats, "se_of_change": error}

    @torch.no_grad()
    def _round(self, prefix: Tensor, sample: bool) -> tuple[Tensor, Tensor, Tensor]:
        """One speculative round after real prefixes ``[B, P]``.

        Returns drafts ``[B, K]``, draft logits and the target's logits ``[B, K, V]``.
        """
        count, length = self.config.num_drafts, prefix.shape[1]
        head = self.sequence.head

        def pick(logits: Tensor) -> Tensor:
            return torch.multinomial(logits.softmax(-1), 1)[:, 0] if sample else logits.argmax(-1)

        run = self.sequence.begin(prefix, sparse=True)
        hidden, streams = self.sequence.trunk(run)
        first = pick(F.linear(hidden.unflatten(0, prefix.shape)[:, -1], head).float())
        shifted = torch.cat([prefix[:, 1:], first[:, None]], 1)
        drafted, state, chain = self.sequence.first_draft(run, streams, shifted)
        drafted, state = drafted.unflatten(0, prefix.shape)[:, -1], state.unflatten(0, prefix.shape)[:, -1]
        root = torch.tensor([length - 1], device=prefix.device)
        drafts, logits = [], []
        for step in range(1, count + 1):
            logits.append(F.linear(drafted, head).float())
            drafts.append(pick(logits[-1]))
            if step < count:
                drafted, state = self.sequence.next_draft(run, state, drafts[-1], root, step, chain)
        tokens = torch.cat([prefix, first[:, None], torch.stack(drafts, 1)], 1)
        verified, _ = self._hidden(tokens)
        target = F.linear(verified[:, length : length + count], head).float()
        return torch.stack(drafts, 1), torch.stack(logits, 1), target

    def acceptance(self, texts: Texts, length: int, count: int) -> dict[str, Any]:
        """Acceptance of one round from real prefixes of ``length`` tokens: greedy, and sampled at T = 1.

        ``by_position[j]`` is the probability that drafts 1..j+1 are all accepted; the mean is the acceptance.
        """
        generator = torch.Generator().manual_seed(self.config.seed)
        torch.manual_seed(self.config.seed)
        long_enough = {n: t for n, t in sorted(texts.items()) if len(t) > length + 16}
        if not long_enough:
            return {"prefixes": 0, "texts": 0}
        each = -(-count // len(long_enough))
        prefixes, names = [], []
        for name, text in long_enough.items():
            for start in torch.randint(0, len(text) - length, (each,), generator=generator):
                prefixes.append(text[start : start + length])
                names.append(name)
        greedy, sampled = [], []
        for part in torch.stack(prefixes).split(max(1, self.config.tokens // length)):
            part = part.to(self.device)
            with self.autocast():
                drafts, _, target = self._round(part, sample=False)
                greedy.append((target.argmax(-1) == drafts).float().cumprod(1).cpu())
                drafts, logits, target = self._round(part, sample=True)
                p, q = (x.softmax(-1).gather(-1, drafts[..., None])[..., 0] for x in (target, logits))
                sampled.append((p / q).clamp(max=1).cumprod(1).cpu())
        accepted = torch.cat(greedy)
        by_text: dict[str, list[float]] = {}
        for name, value in zip(names, accepted.mean(1).tolist(), strict=True):
            by_text.setdefault(name, []).append(value)
        return {
            "prefixes": len(prefixes),
            "texts": len(long_enough),
            "greedy": _summary(accepted),
            "sampled": _summary(torch.cat(sampled)),
            "greedy_by_text": {name: _mean(values) for name, values in by_text.items()},
        }


def _spread(items: list[T], limit: int) -> list[T]:
    """At most ``limit`` items, evenly spaced."""
    return items[:: -(-len(items) // limit)] if items else items


def _mean(values: Any) -> float:
    values = list(values)
    return round(sum(values) / max(1, len(values)), 4)


def _summary(accepted: Tensor) -> dict[str, Any]:
    by_position = accepted.mean(0).tolist()
    return {
        "by_position": [round(x, 4) for x in by_position],
        "mean": _mean(by_position),
        "se": _standard_error(accepted.mean(1)),
    }


def _standard_error(values: Tensor) -> float | None:
    """Of the mean of values ``[n]``; None for a single one."""
    return round((values.std() / len(values) ** 0.5).item(), 4) if len(values) > 1 else None


def evaluate(
    evaluator: Evaluator, held_out: Texts, train: Texts, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All of the above on the held-out texts; ``train`` are training texts of the same sources, for the gap.

    ``save`` receives the results after every part, so that an interrupt loses little.
    """
    results: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        results[name] = value
        save(results)

    add("held_out", evaluator.text_loss(held_out))
    add("train", evaluator.text_loss(train))
    for length, count in evaluator.config.prefixes:
        add(f"acceptance_{length}", evaluator.acceptance(held_out, length, count))
    add("loss_by_context", evaluator.loss_by_context(held_out))
    add("loss_by_position", evaluator.loss_by_position(held_out))
    return results
