"""Greedy generation for a batch of prompts, with or without speculation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from page4.kernels.errors import InputError

from .engine import SpeculativeDecoder
from .request import Phase, Request


@dataclass(frozen=True)
class Generation:
    """What one prompt produced.

    Attributes:
        tokens: the emitted ids, a stop token included.
        accepted: drafts accepted in each verification.
    """

    tokens: list[int]
    accepted: list[int]


@dataclass
class GenerationStats:
    """Where the time went.

    Attributes:
        prefill_tokens, prefill_seconds: of all steps in which some request was prefilling.
        step_seconds: wall time of each pure decode step (verification and drafting).
        decode_tokens: tokens emitted by those steps, over all requests.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    decode_tokens: int = 0


def generate(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> tuple[list[Generation], GenerationStats]:
    """Decode greedily; requests join as rows become free and leave when they finish.

    Returns:
        One generation per prompt, in order, and the timings of the whole batch.

    Raises:
        InputError: ``max_new_tokens`` below 1, or a prompt that leaves no room for it.
    """
    limit = decoder.config.max_length
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    for i, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > limit:
            raise InputError(
                f"prompt {i} has {len(prompt)} tokens and {max_new_tokens} more are asked for, "
                f"max_length is {limit}"
            )
    stats = GenerationStats()
    results: dict[int, Generation] = {}
    waiting = deque(enumerate(prompts))
    running: dict[int, Request] = {}
    drafts: dict[int, list[int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < decoder.config.max_requests:
                index, prompt = waiting.popleft()
                running[index] = decoder.open(prompt)
            drafts = _step(
                decoder, list(running.values()), drafts, max_new_tokens, set(stop_token_ids), stats
            )
            for index in [i for i, r in running.items() if r.phase is Phase.FINISHED]:
                request = running.pop(index)
                results[index] = Generation(request.emitted, request.accepted)
                decoder.close(request)
    finally:
        for request in running.values():
            decoder.close(request)
    return [results[i] for i in range(len(prompts))], stats


def _step(
    decoder: SpeculativeDecoder,
    requests: list[Request],
    drafts: dict[int, list[int]],
    max_new_tokens: int,
    stop: set[int],
    stats: GenerationStats,
) -> dict[int, list[int]]:
    """One step of every running request; returns the drafts to verify in the next one."""
    start = decoder.now()
    chunk = decoder.config.prefill_chunk
    prefill_to = {
        r.row: min(r.computed + chunk, r.prompt_length) for r in requests if r.phase is Phase.PREFILL
    }
    prefilled = sum(prefill_to[r.row] - r.computed for r in requests if r.row in prefill_to)
    logits = decoder.advance(requests, drafts, prefill_to)
    emitted = 0
    for request in requests:
        if request.phase is Phase.DECODE:
            tokens = decoder.accept(request, drafts[request.row], logits[request.row].argmax(-1))
        elif request.computed == request.prompt_length:
            request.phase = Phase.DECODE
            tokens = logits[request.row][-1].argmax(-1, keepdim=True).tolist()
            request.tokens.extend(tokens)
        else:
            continue
        emitted += len(tokens)
        _finish_if_done(request, max_new_tokens, stop)
    following = _draft(decoder, requests)
    elapsed = decoder.now() - start
    if prefilled:
        stats.prefill_tokens += prefilled
        stats.prefill_seconds += elapsed
    else:
        stats.step_seconds.append(elapsed)
        stats.decode_tokens += emitted
    return following


def _draft(decoder: SpeculativeDecoder, requests: list[Request]) -> dict[int, list[int]]:
    decoder.draft([r for r in requests if r.phase is Phase.PREFILL], 0)
    return decoder.draft([r for r in requests if r.phase is Phase.DECODE], decoder.config.num_draft_tokens)


def _finish_if_done(request: Request, max_new_tokens: int, stop: set[int]) -> None:
    emitted = request.emitted
    for i, token in enumerate(emitted[:max_new_tokens]):
        if token in stop or i + 1 == max_new_tokens:
            del request.tokens[request.prompt_length + i + 1 :]
            request.phase = Phase.FINISHED
            return
