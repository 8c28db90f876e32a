"""Whole decode steps of a model: is the captured one right, and how long does it take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from page4.experiments.bench.step_config import StepBenchConfig
from page4.experiments.samples import Row
from page4.experiments.step_timing import time_steps
from page4.kvcache import KVScales
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, SpeculativeDecoder
from page4.spec_decode.step_runner import StepRunner

COLUMNS: dict[str, type] = {
    "length": int,
    "batch": int,
    "kv_format": str,
    "backend": str,
    "graph": bool,
    "check": str,
    "steps": int,
    "step_p50_ms": float,
    "step_p10_ms": float,
    "step_p90_ms": float,
    "tokens_per_s": float,
    "tokens_per_step": float,
    "launches": int,
    "kernels": int,
}
"""A row per length, batch and format. ``check``: whether a replayed step left the same bits as an eager one
(``equal``, ``WRONG``, or ``no graph``); ``tokens_per_step`` is a request's; ``launches`` counts what the host
starts per step, ``kernels`` what the GPU runs. A wrong row has no times."""

KEY = ("length", "batch", "kv_format")


class StepCase:
    """The requests of a cell in one format, prefilled and ready to decode."""

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        config: StepBenchConfig,
        kv_format: str,
        texts: Sequence[Sequence[int]],
        scales: KVScales | None,
    ) -> None:
        self.kv_format, self.backend, self.drafts = kv_format, model.backend, config.num_draft_tokens
        length = len(texts[0])
        self.decoder = SpeculativeDecoder(
            model,
            DecoderConfig(
                kv_format=kv_format,
                scales=scales,
                num_draft_tokens=config.num_draft_tokens,
                prefill_chunk=config.prefill_chunk,
                max_length=length + config.tokens_emitted,
                max_requests=len(texts),
            ),
        )
        self.requests = [self.decoder.open(text) for text in texts]
        while self.requests[0].computed < length - 1:
            for request in self.requests:  # one by one: a long batch at once would not fit
                self.decoder.prefill({request: min(request.computed + config.prefill_chunk, length - 1)})
        for request in self.requests:
            self.decoder.start(request)
        self._step()  # drafts
        self.seconds: list[float] = []
        self.emitted = 0

    def check(self) -> str:
        """Whether a captured step leaves the bits of an eager one, from the same state.

        Compared are the emitted tokens, what the requests carry to the next step, and all their recurrent
        states and index keys; K and V of the last sparse layer and the draft layer, too.
        """
        if not self.decoder.runner.graphs:
            return "no graph"
        before = self._kept()
        outcomes = []
        graphs = self.decoder.runner
        eager = StepRunner(graphs.step, graphs.max_lanes, graphs.max_tokens, graphs=False)
        for runner in (eager, graphs):
            self._put_back(before)
            shape = self.decoder.shape(self.requests)
            for request in self.requests:
                self.decoder.reserve(request)
            lanes = [request.row for request in self.requests]
            result = runner.run(lanes + [-1] * (shape.lanes - len(lanes)), shape)
            outcomes.append([result[: len(lanes)].clone(), *self._kept(), *self._pages()])
        self._put_back(before)
        same = all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(*outcomes, strict=True))
        return "equal" if same else "WRONG"

    def time(self, steps: int) -> None:
        """Times steps as a server runs them."""
        self._step()  # compiles, captures, or finds its caches warm
        timed = time_steps(self.decoder, self.requests, steps)
        self.seconds += timed.seconds
        self.emitted += timed.tokens

    def kernels(self) -> int | None:
        """What a GPU runs in a step, copies included; None without one."""
        if self.decoder.model.device.type != "cuda":
            return None
        runner = self.decoder.runner
        shape = self.decoder.shape(self.requests)
        lanes = torch.full((shape.lanes,), -1, device=self.decoder.model.device)  # padding: nothing changes
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            runner.step.run(lanes, shape)
            torch.cuda.synchronize()
        events = profile.events() or []
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events) or None

    def row(self, length: int, check: str) -> Row:
        """The finished row."""
        wrong = check == "WRONG"
        milliseconds = 1000 * np.asarray(self.seconds) if self.seconds else np.full(1, np.nan)
        steps, batch, graph = len(self.seconds), len(self.requests), self.decoder.runner.graphs
        kernels = self.kernels()
        p10, p50, p90 = (float(np.quantile(milliseconds, q)) for q in (0.1, 0.5, 0.9))
        return {
            "length": length,
            "batch": batch,
            "kv_format": self.kv_format,
            "backend": self.backend,
            "graph": graph,
            "check": check,
            "steps": steps,
            "step_p50_ms": None if wrong else p50,
            "step_p10_ms": None if wrong else p10,
            "step_p90_ms": None if wrong else p90,
            "tokens_per_s": None if wrong else self.emitted / sum(self.seconds),
            "tokens_per_step": None if wrong else self.emitted / steps / batch,
            "launches": 1 if graph else kernels,
            "kernels": kernels,
        }

    def _step(self) -> None:
        self.decoder.collect(self.decoder.launch(self.requests))

    def _kept(self) -> list[Tensor]:
        rows = [request.row for request in self.requests]
        return [self.decoder.state.values[rows].clone(), *self.decoder.cache.snapshot(rows)]

    def _put_back(self, kept: Sequence[Tensor]) -> None:
        values, *states = kept
        rows = [request.row for request in self.requests]
        self.decoder.state.values[rows] = values
        self.decoder.cache.restore(rows, states)

    def _pages(self) -> list[Tensor]:
        cache = self.decoder.cache
        layers = [cache.qsa[-1], *([cache.draft.mixer] if cache.draft is not None else [])]
        return [pages.clone() for layer in layers for pages in (layer.k_pages, layer.v_pages)]  # type: ignore[union-attr]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def measure_cell(
    model: Qwen4ExpForCausalLM,
    config: StepBenchConfig,
    texts: Sequence[Sequence[int]],
    scales: dict[str, KVScales | None],
) -> list[Row]:
    """All formats at one length and batch; they take turns, so that a machine that drifts favours none."""
    cases = [StepCase(model, config, name, texts, scales[name]) for name in config.formats]
    checks = [case.check() for case in cases]
    for _ in range(config.turns):
        for case, check in zip(cases, checks, strict=True):
            if check != "WRONG":
                case.time(config.steps)
    return [case.row(len(texts[0]), check) for case, check in zip(cases, checks, strict=True)]
