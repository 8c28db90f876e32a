"""The steps of speculative decoding over a batch: target rows, draft rows, verification."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.mtp_verify import verify_greedy_reference
from page4.kvcache import CacheConfig, KVScales, get_format
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment

from .request import Phase, Request

MAX_DRAFT_TOKENS = 7  # a decode step has at most 8 rows per request


@dataclass(frozen=True)
class DecoderConfig:
    """How to decode.

    Attributes:
        kv_format, draft_kv_format, scales: formats of the target's and the draft's K/V, and their
            static scales.
        num_draft_tokens: K, 0 to 7; 0 decodes one token a step without drafting.
        prefill_chunk: prompt tokens a request advances by in one step.
        max_length: tokens one request may reach, prompt and output together.
        max_requests: requests decoded at the same time.

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

    def __post_init__(self) -> None:
        get_format(self.kv_format)
        if self.draft_kv_format is not None:
            get_format(self.draft_kv_format)
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"num_draft_tokens is {self.num_draft_tokens}, expected 0 to {MAX_DRAFT_TOKENS}")
        for name in ("prefill_chunk", "max_length", "max_requests"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 1")

    def cache_config(self) -> CacheConfig:
        """The cache these choices need; drafted rows run past ``max_length`` by up to K + 1 tokens."""
        exact = "fp32" in (self.kv_format, self.draft_kv_format or self.kv_format)
        return CacheConfig(
            kv_format=self.kv_format,
            draft_kv_format=self.draft_kv_format,
            scales=self.scales,
            num_draft_tokens=self.num_draft_tokens,
            max_requests=self.max_requests,
            max_tokens=self.max_requests * (self.max_length + self.num_draft_tokens + 1),
            index_dtype=torch.float32 if exact else torch.float16,
        )


class SpeculativeDecoder:
    """A model, its cache, and one step's worth of everything that happens between them.

    A step of a decoding request: verify the rows ``[last token, d1..dK]``, accept the longest prefix that the
    target's argmax confirms, emit it and one further token of the target's own, then draft K tokens from the
    accepted rows. Draft step 0 reads the target's streams, steps 1..K-1 the draft's own; the rows those wrote
    are written again, from true streams, by the next step 0.
    """

    def __init__(self, model: Qwen4ExpForCausalLM, config: DecoderConfig) -> None:
        if config.num_draft_tokens and model.mtp is None:
            raise InputError("this checkpoint has no MTP head: set num_draft_tokens to 0")
        limit = model.config.max_position_embeddings
        if config.max_length > limit:
            raise InputError(f"max_length is {config.max_length}, the model's positions end at {limit}")
        self.model = model
        self.config = config
        self.cache = model.new_cache(config.cache_config())

    def open(self, tokens: Sequence[int]) -> Request:
        """Takes a cache row for a new request over ``tokens``.

        Raises:
            InputError: the prompt is empty, holds an id outside the vocabulary, or is too long.
        """
        vocabulary = self.model.config.vocab_size
        if not tokens:
            raise InputError("the prompt is empty, expected at least one token")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise InputError(f"the prompt holds a token id outside 0..{vocabulary - 1}")
        if len(tokens) > self.config.max_length:
            raise InputError(f"the prompt has {len(tokens)} tokens, max_length is {self.config.max_length}")
        return Request(row=self.cache.open(), tokens=list(tokens), prompt_length=len(tokens))

    def close(self, request: Request) -> None:
        """Frees the request's row and pages."""
        request.phase = Phase.FINISHED
        request.undrafted = None
        self.cache.close(request.row)

    def advance(
        self, requests: Sequence[Request], drafts: dict[int, list[int]], prefill_to: dict[int, int]
    ) -> dict[int, Tensor]:
        """One target step over all requests.

        Args:
            drafts: for decoding requests (by cache row), the drafts to verify after its last token
                (-1: none).
            prefill_to: for prefilling requests (by cache row), the length to reach.
        Returns:
            By cache row, target logits ``[rows, V]`` of a decoding request, or ``[1, V]`` of the last row
            of a prefilling one. The recurrent slot to read next is set for prefilling requests only; a
            decoding one needs its number of accepted drafts first.
        """
        segments = []
        for request in requests:
            decode = request.phase is Phase.DECODE
            if decode:
                # Where nothing was drafted (-1), any token serves: verification ends the prefix before it.
                ids = request.tokens[request.computed :] + [max(d, 0) for d in drafts[request.row]]
            else:
                ids = request.tokens[request.computed : prefill_to[request.row]]
            self.cache.reserve(request.row, request.computed + len(ids))
            segments.append(
                Segment(
                    request=request.row,
                    position=request.computed,
                    token_ids=torch.tensor(ids),
                    preceding=self.model.preceding(request.tokens, request.computed),
                    decode=decode,
                    read_slot=request.read_slot,
                )
            )
        batch = RowBatch.pack(segments, self.model.device)
        streams = self.model.forward_rows(batch, self.cache)
        wanted = []
        for request in requests:
            rows = batch.rows(request.row)
            wanted.append(
                streams[rows] if request.phase is Phase.DECODE else streams[rows.stop - 1 : rows.stop]
            )
            new = streams[rows]
            if request.phase is Phase.PREFILL:
                request.computed += new.shape[0]
                request.read_slot = 0
            kept = request.undrafted
            request.undrafted = new if kept is None else torch.cat([kept, new])
        logits = self.model.logits(torch.cat(wanted)).split([w.shape[0] for w in wanted])
        return {request.row: rows for request, rows in zip(requests, logits, strict=True)}

    def accept(self, request: Request, drafts: list[int], target_tokens: Tensor) -> list[int]:
        """Greedy verification of one decoding request's rows.

        Args:
            drafts: d1..dK as verified. target_tokens: ``[K+1]``, the target's argmax after each row.
        Returns:
            The emitted tokens: accepted drafts and one token of the target's own.
        """
        accepted, emitted = verify_greedy_reference(
            target_tokens[None].cpu(), torch.tensor([drafts], dtype=torch.int64)
        )
        count = int(accepted[0])
        tokens = emitted[0, : count + 1].tolist()
        assert request.undrafted is not None
        old = request.undrafted.shape[0] - (len(drafts) + 1)
        request.undrafted = request.undrafted[: old + count + 1]
        request.computed += count + 1
        request.read_slot = count
        request.tokens.extend(tokens)
        request.accepted.append(count)
        return tokens

    def draft(self, requests: Sequence[Request], tokens: int) -> dict[int, list[int]]:
        """Feeds the draft layer all rows whose next token is known, then drafts greedily.

        Args:
            tokens: how many to draft; 0 only brings the draft's caches up to date (prefill).
        Returns:
            By cache row, the drafts.
        """
        drafts: dict[int, list[int]] = {request.row: [] for request in requests}
        if self.model.mtp is None or self.config.num_draft_tokens == 0:
            for request in requests:
                request.undrafted = None
            return drafts
        segments, parts = [], {}
        for request in requests:
            first = request.computed - (0 if request.undrafted is None else request.undrafted.shape[0])
            known = min(len(request.tokens) - 1, request.computed) - first
            if request.undrafted is None or known < 1:
                continue
            decode = request.phase is Phase.DECODE and known <= MAX_DRAFT_TOKENS + 1
            ids = torch.tensor(request.tokens[first + 1 : first + 1 + known])
            segments.append(Segment(request.row, first, ids, (), decode))
            parts[request.row] = request.undrafted[:known]
            rest = request.undrafted[known:]
            request.undrafted = rest if rest.shape[0] else None
        for step in range(max(1, tokens)):
            if not segments:
                break
            batch = RowBatch.pack(segments, self.model.device)
            streams = self.model.draft_rows(
                batch, torch.cat([parts[s.request] for s in batch.segments]), self.cache
            )
            if tokens == 0:
                break
            ends = torch.tensor(
                [batch.rows(s.request).stop - 1 for s in batch.segments], device=streams.device
            )
            last = streams[ends]
            picked = self.model.draft_logits(last).argmax(-1).tolist()
            parts = {s.request: last[i : i + 1] for i, s in enumerate(batch.segments)}
            following = []
            for segment, token in zip(batch.segments, picked, strict=True):
                drafts[segment.request].append(token)
                position = segment.position + segment.length
                if step + 1 < tokens:
                    self.cache.reserve(segment.request, position + 1)
                following.append(Segment(segment.request, position, torch.tensor([token]), (), decode=True))
            segments = following
        return drafts

    def rewind(self, request: Request, to: Request) -> None:
        """Puts a request back where :func:`copy_of` found it; K/V rows beyond are rewritten later."""
        request.__dict__.update(to.__dict__)

    def now(self) -> float:
        """Seconds, after the device has finished what was asked of it."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def copy_of(request: Request) -> Request:
    """A request as it stands: token lists are copied, tensors, never written to, are shared."""
    return replace(request, tokens=list(request.tokens), accepted=list(request.accepted))
