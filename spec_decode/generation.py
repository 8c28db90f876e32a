"""Generation for a batch of prompts, with or without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from page4.kernels.errors import InputError

from .engine import SpeculativeDecoder
from .sampling import GREEDY, SamplingOptions
from .served import Served, ServingStats
from .serving import Server


@dataclass(frozen=True)
class Generation:
    """What one prompt produced.

    Attributes:
        tokens: the emitted ids, a stop token included.
        accepted: drafts accepted in each verification.
    """

    tokens: list[int]
    accepted: list[int]


def generate(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    sampling: SamplingOptions | Sequence[SamplingOptions] = GREEDY,
    overlap: bool | None = None,
) -> tuple[list[Generation], ServingStats]:
    """Decode; requests join as rows become free and leave when they finish.

    Args:
        sampling: of all prompts, or of each.
        overlap: see :class:`~page4.spec_decode.serving.Server`.
    Returns:
        One generation per prompt, in order, and the timings of the whole batch.

    Raises:
        InputError: ``max_new_tokens`` below 1, or a prompt that leaves no room for it.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingOptions) else list(sampling)
    if len(each) != len(prompts):
        raise InputError(f"{len(each)} sampling options do not match {len(prompts)} prompts")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    stop = frozenset(stop_token_ids)
    requests = [
        Served(prompt, max_new_tokens, stop, options) for prompt, options in zip(prompts, each, strict=True)
    ]
    server = Server(decoder, overlap)
    try:
        for i, request in enumerate(requests):
            try:
                server.submit(request)
            except InputError as error:
                raise InputError(f"prompt {i}: {error}") from error
        server.run()
    finally:
        server.close()
    return [Generation(request.tokens, request.accepted) for request in requests], server.stats
