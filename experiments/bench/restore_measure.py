"""A prefix computed and brought back, alone and beside requests that decode."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from page4.experiments.bench.restore_config import RestoreBenchConfig
from page4.experiments.samples import Row
from page4.kvcache import KVScales
from page4.kvcache.capacity import page_bytes, snapshot_bytes
from page4.kvcache.host_tier import host_arena
from page4.kvcache.pages import PAGE_TOKENS, pages_for
from page4.kvcache.prefix_cache import GIB, PrefixConfig
from page4.model import Qwen4ExpForCausalLM
from page4.model.cache_geometry import cache_geometry
from page4.spec_decode import DecoderConfig, Request, SpeculativeDecoder

COLUMNS: dict[str, type] = {
    "kv_format": str,
    "length": int,
    "check": str,
    "restored_bytes": int,
    "recompute_s": float,
    "restore_p50_ms": float,
    "restore_p90_ms": float,
    "admission_p50_ms": float,
    "copy_gb_per_s": float,
    "pinned_gb_per_s": float,
    "step_p50_ms": float,
    "step_p90_ms": float,
    "step_beside_p50_ms": float,
    "step_beside_p90_ms": float,
    "restores_beside": int,
}
"""A row per format. ``check``: whether what came back are the bits that were computed (``equal`` or
``WRONG``); ``restore``: from a prompt's arrival until it can be decoded, with the ``admission``, the host's
share, which finds the prefix and launches the copies; ``copy_gb_per_s``: of the copies and the scattering
into pages, 10^9 bytes; ``pinned_gb_per_s``: of plain copies from pinned memory of a group's size; ``step``:
decode steps of the others without, and ``beside``: with restores one after another. A wrong row has no
times."""

KEY = ("kv_format",)


class RestoreCase:
    """A decoder of one format whose pages hold the others and one long prompt, and whose host holds two.

    So each of two long prompts takes the other's pages, and comes back from the host every time.
    """

    def __init__(
        self, model: Qwen4ExpForCausalLM, config: RestoreBenchConfig, kv_format: str, scales: KVScales | None
    ) -> None:
        self.config, self.kv_format = config, kv_format
        self._tokens = torch.Generator().manual_seed(config.seed)
        self._vocabulary = model.config.vocab_size
        pages = config.others * pages_for(config.max_length) + pages_for(config.length + 1)
        options = DecoderConfig(
            kv_format=kv_format,
            scales=scales,
            num_draft_tokens=config.num_draft_tokens,
            prefill_chunk=config.prefill_chunk,
            max_length=config.max_length,
            max_requests=config.others + 1,
            max_tokens=pages * PAGE_TOKENS,
        )
        self.group_bytes = _group_bytes(model, options, config.interval)
        groups = 2 * -(-config.length // config.interval)
        groups += config.others * (config.other_length // config.interval + 2)
        host = groups * self.group_bytes / GIB
        self.decoder = SpeculativeDecoder(
            model, dataclasses.replace(options, prefix=PrefixConfig(config.interval, 0, host))
        )
        self.others = [self._computed(self._prompt(config.other_length)) for _ in range(config.others)]
        for request in self.others:  # all that they will ever need: what is left holds one long prompt
            self.decoder.cache.reserve(request.row, config.max_length)

    def run(self) -> Row:
        """Everything of the format's row."""
        config, decoder = self.config, self.decoder
        prompts = [self._prompt(config.length + 1) for _ in range(2)]
        self._computed(prompts[0], close=True)  # compiles, and finds its caches warm
        start = decoder.now()
        request = self._computed(prompts[1])
        recompute = decoder.now() - start
        expected = self._bits(request)
        decoder.close(request)
        turns = itertools.cycle(prompts)
        self._restored(next(turns))
        request = self._restored(next(turns), close=False)
        check = "equal" if all(map(torch.equal, self._bits(request), expected)) else "WRONG"
        decoder.close(request)
        del expected
        reuse = decoder.prefix
        assert reuse is not None and reuse.host is not None
        reuse.host.drain()
        moved, spent = reuse.host.back.bytes, reuse.host.back.seconds
        restores = [self._timed_restore(next(turns)) for _ in range(config.restores)]
        reuse.host.drain()
        moved, spent = reuse.host.back.bytes - moved, reuse.host.back.seconds - spent
        alone, beside, count = self._decode(turns)
        milliseconds = 1000 * np.asarray(restores)
        wrong = check == "WRONG"
        row: Row = {
            "restored_bytes": moved // config.restores,
            "recompute_s": recompute,
            "restore_p50_ms": _quantile(milliseconds[:, 0], 0.5),
            "restore_p90_ms": _quantile(milliseconds[:, 0], 0.9),
            "admission_p50_ms": _quantile(milliseconds[:, 1], 0.5),
            "copy_gb_per_s": moved / spent / 1e9,
            "pinned_gb_per_s": pinned_bandwidth(decoder.model.device, self.group_bytes) / 1e9,
            "step_p50_ms": 1000 * _quantile(alone, 0.5),
            "step_p90_ms": 1000 * _quantile(alone, 0.9),
            "step_beside_p50_ms": 1000 * _quantile(beside, 0.5),
            "step_beside_p90_ms": 1000 * _quantile(beside, 0.9),
            "restores_beside": count,
        }
        measured = dict.fromkeys(row) if wrong else row
        return {"kv_format": self.kv_format, "length": config.length, "check": check} | measured

    def _prompt(self, length: int) -> list[int]:
        tokens: list[int] = torch.randint(1, self._vocabulary, (length,), generator=self._tokens).tolist()
        return tokens

    def _computed(self, tokens: Sequence[int], close: bool = False) -> Request:
        """A request prefilled from wherever it begins, ready to decode."""
        decoder, last = self.decoder, len(tokens) - 1
        request = decoder.open(tokens)
        while request.computed < last:
            stop = min(request.computed + self.config.prefill_chunk, last)
            decoder.prefill({request: stop})
        if close:
            decoder.close(request)
        else:
            decoder.start(request)
        return request

    def _timed_restore(self, tokens: Sequence[int]) -> tuple[float, float]:
        """Seconds until a prompt can be decoded, and until the host has launched what that takes."""
        start = self.decoder.now()
        request = self.decoder.open(tokens)
        admitted = time.perf_counter()
        assert request.computed == self.config.length, "the prefix is not in the host tier"
        self.decoder.start(request)
        seconds = self.decoder.now() - start
        self.decoder.close(request)
        return seconds, admitted - start

    def _restored(self, tokens: Sequence[int], close: bool = True) -> Request:
        request = self.decoder.open(tokens)
        self.decoder.start(request)
        if close:
            self.decoder.close(request)
        return request

    def _bits(self, request: Request) -> list[Tensor]:
        """Copies of the request's pages and state."""
        cache = self.decoder.cache
        pages = cache.tables.pages(request.row)[: pages_for(self.config.length)]
        parts = [stored[pages] for stored in cache.paged_tensors()]
        parts += [state.clone() for state in cache.prefilled_state(request.row)]
        return [part.contiguous().view(torch.uint8) for part in parts]

    def _decode(self, prompts: Iterator[Sequence[int]]) -> tuple[list[float], list[float], int]:
        """Seconds of the others' steps without and with restores beside them, and the restores."""
        alone: list[float] = []
        beside: list[float] = []
        restores = 0
        for _ in range(self.config.turns):
            alone += self._steps(None)[0]
            seconds, count = self._steps(prompts)
            beside += seconds
            restores += count
        return alone, beside, restores

    def _steps(self, prompts: Iterator[Sequence[int]] | None) -> tuple[list[float], int]:
        """Seconds between outcomes of steps; with prompts, one after another comes back meanwhile."""
        decoder, overlap = self.decoder, self.decoder.model.device.type == "cuda"
        settling, seconds, restores = 2, [], 0
        in_flight = decoder.launch(self.others) if overlap else None
        coming: Request | None = None
        since = decoder.now()
        for turn in range(-settling, self.config.steps):
            if prompts is not None and (coming is None or decoder.restored(coming)):
                if coming is not None:
                    decoder.close(coming)
                    restores += turn > 0
                coming = decoder.open(next(prompts))
            launched = decoder.launch(self.others)
            done, in_flight = (in_flight, launched) if overlap else (launched, None)
            assert done is not None
            decoder.collect(done)
            now = time.perf_counter()
            if turn >= 0:
                seconds.append(now - since)
            since = now
        if in_flight is not None:
            decoder.collect(in_flight)
        if coming is not None:
            decoder.close(coming)
        decoder.now()
        return seconds, restores


def pinned_bandwidth(device: torch.device, nbytes: int, repeats: int = 9) -> float:
    """Bytes per second of copies of so many bytes from host to device: the best that a restore can reach.

    The median. On a CPU, of copies within its memory.
    """
    source = host_arena((nbytes,), device).fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - begin)
    return nbytes / float(np.median(seconds[1:]))


def _group_bytes(model: Qwen4ExpForCausalLM, options: DecoderConfig, tokens: int) -> int:
    """Bytes of a group in the host tier, and 1 % for the alignment of its parts."""
    geometry, cache = cache_geometry(model.config), options.cache_config()
    pages = tokens // PAGE_TOKENS * page_bytes(geometry, cache).total
    return int(1.01 * (pages + snapshot_bytes(geometry, cache, model.dtype).total)) + 4096


def _quantile(values: Sequence[float] | np.ndarray, q: float) -> float:
    return float(np.quantile(values, q))
