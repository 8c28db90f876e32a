"""A model, its cache, and the requests in it: prefill and decode steps over a batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kvcache import CacheConfig, KVScales, LayerFormats
from page4.kvcache.intervention import Intervention
from page4.kvcache.layer_formats import draft_format
from page4.kvcache.prefix_cache import PrefixCache, PrefixConfig
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment

from .choosing import Chooser
from .decode_state import DecodeState
from .decode_step import DecodeStep, StepShape
from .prefix_identity import prefix_identity
from .request import Phase, Request
from .sampling import GREEDY, SamplingOptions
from .step_runner import StepRunner

MAX_DRAFT_TOKENS = 7  # a decode step has at most 8 rows per request
MAX_IN_FLIGHT = 2  # steps launched before the outcome of the first is known


@dataclass(frozen=True)
class DecoderConfig:
    """How to decode.

    Attributes:
        kv_format, draft_kv_format, scales: formats of the target's and the draft's K/V, and their
            static scales, see :class:`~page4.kvcache.CacheConfig`.
        num_draft_tokens: K, 0 to 7; 0 decodes one token a step without drafting.
        prefill_chunk: prompt tokens a request advances by in one step.
        max_length: tokens one request may reach, prompt and output together.
        max_requests: requests decoded at the same time.
        max_tokens: tokens that all requests may hold together; by default, ``max_length`` each.
        cuda_graphs: replay captured decode steps where the backend allows it.
        prefix: keep prompts' prefixes for later ones; None, the default, computes every prompt, as whoever
            measures prefill wants.
        preemption: admit requests by the pages that they need now instead of those that they may need later;
            whoever came last gives its pages back when they run out, and is computed again. Off by default:
            in a measurement no request is computed twice.

    Raises:
        InputError: a field is out of range or names no format.
    """

    kv_format: str = "fp16"
    draft_kv_format: str | None = None
    scales: KVScales | None = None
    num_draft_tokens: int = 3
    prefill_chunk: int = 2048
    max_length: int = 4096
    max_requests: int = 1
    max_tokens: int | None = None
    cuda_graphs: bool = True
    prefix: PrefixConfig | None = None
    preemption: bool = False

    def __post_init__(self) -> None:
        draft_format(LayerFormats(self.kv_format), self.draft_kv_format)
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"num_draft_tokens is {self.num_draft_tokens}, expected 0 to {MAX_DRAFT_TOKENS}")
        for name in ("prefill_chunk", "max_length", "max_requests", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, expected at least 1")
        if self.prefix is not None:
            self.prefix.check_chunk(self.prefill_chunk)

    @property
    def rows_ahead(self) -> int:
        """Tokens beyond a request's position that one decode step may write: its rows, then its drafts."""
        return self.num_draft_tokens + max(1, self.num_draft_tokens)

    @property
    def overrun(self) -> int:
        """Tokens beyond a request's last one that steps may write before they know that it is the last."""
        return (MAX_IN_FLIGHT - 1) * (self.num_draft_tokens + 1) + self.rows_ahead

    def cache_config(self) -> CacheConfig:
        """The cache these choices need."""
        exact = "fp32" in (*LayerFormats(self.kv_format).names, self.draft_kv_format)
        longest = self.max_length + self.overrun
        tokens = self.max_requests * longest if self.max_tokens is None else self.max_tokens
        return CacheConfig(
            kv_format=self.kv_format,
            draft_kv_format=self.draft_kv_format,
            scales=self.scales,
            num_draft_tokens=self.num_draft_tokens,
            max_requests=self.max_requests,
            max_tokens=tokens,
            max_request_tokens=longest,
            index_dtype=torch.float32 if exact else torch.float16,
        )


@dataclass(frozen=True)
class StepInFlight:
    """A decode step that was launched.

    Attributes:
        requests: by lane, None for padding.
        result: int64 ``[B, T + 1]`` on the host, valid once ``done``; see :meth:`DecodeStep.run`.
        done: None: it is.
    """

    requests: tuple[Request | None, ...]
    result: Tensor
    done: torch.cuda.Event | None


class SpeculativeDecoder:
    """Runs requests, one call for each step of a batch.

    A prompt is prefilled but for its last token, which the first decode step takes: so every token a request
    emits comes from a decode step, and between steps the draft layer is never behind the target. Decode steps
    are launched (:meth:`launch`) and their outcome read later (:meth:`collect`), after the next one was
    launched if the caller likes, so that the device need not wait for the host.

    Args:
        interventions: what a study changes in layers, see :meth:`HybridCache.intervene`.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        config: DecoderConfig,
        interventions: Mapping[int | None, Intervention] | None = None,
    ) -> None:
        if config.num_draft_tokens and model.mtp is None:
            raise InputError("this checkpoint has no MTP head: set num_draft_tokens to 0")
        limit = model.config.max_position_embeddings
        if config.max_length > limit:
            raise InputError(f"max_length is {config.max_length}, the model's positions end at {limit}")
        self.model = model
        self.config = config
        self.cache = model.new_cache(config.cache_config())
        self.cache.intervene(interventions or {})
        rows, drafts, vocabulary = config.max_requests, config.num_draft_tokens, model.config.vocab_size
        self.state = DecodeState(rows, drafts, model.config.ngram_size - 1, vocabulary, model.device)
        chooser = Chooser.of(model.backend, rows, drafts, vocabulary, model.device)
        step = DecodeStep(model, self.cache, self.state, chooser)
        self.runner = StepRunner(step, rows, config.max_length + config.overrun, config.cuda_graphs)
        self._lanes: list[Request | None] = [None] * rows
        self.prefix: PrefixCache | None = None
        if config.prefix is not None:
            if interventions:
                raise InputError("a study that intervenes in layers computes every prompt: leave prefix out")
            identity = prefix_identity(model, config.cache_config(), config.prefill_chunk)
            self.prefix = PrefixCache(self.cache, config.prefix, config.prefill_chunk, identity)

    def open(self, tokens: Sequence[int], sampling: SamplingOptions = GREEDY) -> Request:
        """Takes a cache row for a new request over ``tokens``, and what is known of its prefix.

        Raises:
            InputError: the prompt is empty, holds an id outside the vocabulary, or is too long, or the
                request may emit none but tokens outside the vocabulary; or a prefix is known, and there are
                too few pages for it.
        """
        self.check(tokens, sampling)
        request = Request(self.cache.open(), list(tokens), len(tokens), sampling)
        if self.prefix is not None:
            request.prefix = self.prefix.chain(request.tokens)
            try:
                request.computed, request.restoration = self.prefix.join(request.prefix, request.row)
            except InputError:
                self.cache.close(request.row)
                raise
        return request

    def check(self, tokens: Sequence[int], sampling: SamplingOptions = GREEDY) -> None:
        """Refuses what :meth:`open` refuses."""
        vocabulary = self.model.config.vocab_size
        if not tokens:
            raise InputError("the prompt is empty, expected at least one token")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise InputError(f"the prompt holds a token id outside 0..{vocabulary - 1}")
        if len(tokens) > self.config.max_length:
            raise InputError(f"the prompt has {len(tokens)} tokens, max_length is {self.config.max_length}")
        sampling.allowed_words(vocabulary)

    def close(self, request: Request) -> None:
        """Frees the request's row and pages.

        Steps in flight may still write there; whoever gets them next writes later.
        """
        self._settle(request)  # its pages may have other owners soon
        request.phase = Phase.FINISHED
        self._lanes = [None if held is request else held for held in self._lanes]
        self.cache.close(request.row)

    def prefill(self, stops: Mapping[Request, int]) -> None:
        """One step of prefilling requests, each up to the given number of its tokens.

        The draft layer sees the same rows, but for that of a request's very last token, as long as it is not
        known what follows it.
        """
        if not stops:
            return
        segments, following = [], []
        for request, stop in stops.items():
            self._settle(request)
            self.cache.reserve(request.row, stop)
            start = request.computed
            preceding = self.model.preceding(request.tokens, start)
            ids = torch.tensor(request.tokens[start : stop + 1])
            segments.append(Segment(request.row, start, ids[: stop - start], preceding, decode=False))
            if len(ids) > 1:
                following.append(Segment(request.row, start, ids[1:], (), decode=False))
            self._follow_chunks(request, stop, alone=len(stops) == 1)
            request.computed = stop
        batch = RowBatch.pack(segments, self.model.device)
        streams = self.model.forward_rows(batch, self.cache)
        if self.config.num_draft_tokens and following:
            drafting = RowBatch.pack(following, self.model.device)
            parts = [streams[batch.rows(s.request)][: s.length] for s in drafting.segments]
            self.model.draft_rows(drafting, torch.cat(parts), self.cache)
        for request in stops:
            self._keep(request)

    def start(self, request: Request) -> None:
        """From prefill to decode: all tokens but the last one are computed.

        Raises:
            RuntimeError: they are not.
        """
        if request.computed != len(request.tokens) - 1:
            raise RuntimeError(f"{request.computed} of {len(request.tokens)} tokens are prefilled")
        self._settle(request)
        history = self.model.preceding(request.tokens, request.computed)
        self.state.begin(request.row, request.tokens[-1], request.computed, history, request.sampling)
        if request.sampling.samples_drafts and self.config.num_draft_tokens:
            self.state.distributions(self.model.dtype)
        request.phase = Phase.DECODE
        request.drafted = False

    def launch(
        self, requests: Sequence[Request], rows: int | None = None, drafts: int | None = None
    ) -> StepInFlight:
        """Launches a decode step of requests; at most :data:`MAX_IN_FLIGHT` may be in flight.

        Args:
            rows: of each request; all K + 1 by default. Fewer leave later drafts unverified.
            drafts: to be drafted; K by default.
        """
        shape = self.shape(requests, rows, drafts)
        for request in requests:
            self.reserve(request)
        held = self._assign(requests, shape.lanes)
        result = self.runner.run([-1 if request is None else request.row for request in held], shape)
        done = None
        if result.device.type == "cuda":
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            result = host.copy_(result, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        for request in requests:
            request.in_flight += 1
        return StepInFlight(tuple(held), result, done)

    def collect(self, step: StepInFlight) -> dict[Request, list[int]]:
        """Waits for a step; the emitted tokens of its requests, but for those that have finished since.

        Raises:
            InputError: a request has no token to emit.
        """
        if step.done is not None:
            step.done.synchronize()
        emitted = {}
        for request, (count, *tokens) in zip(step.requests, step.result.tolist(), strict=True):
            if request is None:
                continue
            request.in_flight -= 1
            if request.phase is not Phase.DECODE:
                continue
            new = tokens[: count + 1]
            if new[-1] < 0:
                raise InputError("no token can follow: the logits are not finite, or none is allowed")
            request.tokens.extend(new)
            request.computed += len(new)
            if request.drafted:
                request.accepted.append(count)
            request.drafted = True
            emitted[request] = new
        return emitted

    def shape(
        self, requests: Sequence[Request], rows: int | None = None, drafts: int | None = None
    ) -> StepShape:
        """The shape of :meth:`launch`."""
        lanes, longest = self.runner.bucket(len(requests), max(map(self._bound, requests)))
        masked = any(r.sampling.allowed_tokens is not None for r in requests)
        return StepShape(
            lanes=lanes,
            longest=longest,
            rows=self.config.num_draft_tokens + 1 if rows is None else rows,
            drafts=self.config.num_draft_tokens if drafts is None else drafts,
            samples=masked or any(r.sampling.samples for r in requests),  # decides what the reference runs
            samples_drafts=any(r.sampling.samples_drafts for r in requests)
            and self.config.num_draft_tokens > 0,
            masked=masked,
        )

    def prepare(
        self,
        requests: Sequence[Request],
        rows: int | None = None,
        drafts: int | None = None,
        growth: int = 0,
    ) -> None:
        """Captures what :meth:`launch` would run unless that is done; a step takes no longer for it then.

        Args:
            rows, drafts: of :meth:`launch`.
            growth: tokens by which the longest request may grow in the steps to come, whose shapes are
                captured as well.
        """
        shape = self.shape(requests, rows, drafts)
        last = self.runner.bucket(len(requests), max(map(self._bound, requests)) + growth)[1]
        self.runner.prepare(shape)
        while shape.longest < last:
            longest = self.runner.bucket(len(requests), shape.longest + 1)[1]
            shape = replace(shape, longest=longest)
            self.runner.prepare(shape)

    def reserve(self, request: Request) -> None:
        """Makes room for whatever the next step of a request may write."""
        self.cache.reserve(request.row, self._bound(request))

    def restored(self, request: Request) -> bool:
        """Whether all of the request's prefix is back from the host; decoding others need not wait for it."""
        return request.restoration is None or request.restoration.done()

    def now(self) -> float:
        """Seconds, after the device has finished what was asked of it."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def _settle(self, request: Request) -> None:
        """The computation waits for a prefix that is on its way back."""
        if self.prefix is not None and request.restoration is not None:
            self.prefix.settle(request.restoration)
            request.restoration = None

    def _follow_chunks(self, request: Request, stop: int, alone: bool) -> None:
        """Prompts that are computed in another way than one chunk after the other, alone, are not kept."""
        chunk, last = self.config.prefill_chunk, request.prompt_length - 1
        if not alone or request.computed % chunk or stop != min(request.computed + chunk, last):
            request.prefix = None

    def _keep(self, request: Request) -> None:
        if self.prefix is not None and request.prefix is not None:
            self.prefix.keep(request.prefix, request.computed, request.row)

    def missing_pages(self, requests: Sequence[Request]) -> int:
        """Pages that :meth:`launch` would take beyond those that the requests have."""
        return sum(self.cache.tables.missing(request.row, self._bound(request)) for request in requests)

    def _bound(self, request: Request) -> int:
        """Tokens that a request may hold after the next step, whatever the steps in flight accept."""
        ahead = request.in_flight * (self.config.num_draft_tokens + 1)
        return request.computed + ahead + self.config.rows_ahead

    def _assign(self, requests: Sequence[Request], lanes: int) -> list[Request | None]:
        """Lanes of a step; requests keep theirs where they can, else their draft distributions move along."""
        before = {request: lane for lane, request in enumerate(self._lanes) if request is not None}
        held: list[Request | None] = [None] * len(self._lanes)
        waiting = []
        for request in requests:
            lane = before.get(request, lanes)
            if lane < lanes:
                held[lane] = request
            else:
                waiting.append(request)
        free = (lane for lane in range(lanes) if held[lane] is None)
        moves, begun = [], []
        for request, lane in zip(waiting, free, strict=False):
            held[lane] = request
            if request in before:
                moves.append((before[request], lane))
            else:
                begun.append(lane)
        self.state.assign_lanes(moves, begun)
        self._lanes = held
        return held[:lanes]
