"""How each request of a batch samples, as tensors that kernels read by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError

# Beyond these, logits times the scale leave FP32's useful range; far above, the scale would be 0: greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of R requests. Filters apply to the target, as ``kept_tokens`` in ``mtp_verify.py`` says.

    Attributes:
        scale: FP32 ``[R]``, ``log2(e) / temperature``; 0: greedy.
        draft_scale: the same for what the draft samples.
        top_k: int32 ``[R]``; 0: all.
        top_p: FP32 ``[R]``; 1: all.
        log2_min_p: FP32 ``[R]``; -inf: all.
        seed: int64 ``[R]``.
        samples_drafts: whether any request's draft is sampled, so that verification needs its distributions.
    """

    scale: Tensor
    draft_scale: Tensor
    top_k: Tensor
    top_p: Tensor
    log2_min_p: Tensor
    seed: Tensor
    samples_drafts: bool

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        *,
        draft_temperature: Sequence[float] | None = None,
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        seed: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """Parameters of requests, one value each; temperature 0 is greedy, for target and draft alike.

        Without ``draft_temperature`` drafts are greedy, without a filter it is off, and seeds are 0.

        Raises:
            InputError: lists of different lengths, a temperature that is neither 0 nor 1e-4 to 1e4, a
                ``top_k`` below 0, a ``top_p`` outside (0, 1], a ``min_p`` outside [0, 1], or a seed that
                does not fit int64.
        """
        count = len(temperature)
        drafts = [0.0] * count if draft_temperature is None else list(draft_temperature)
        ks = [0] * count if top_k is None else list(top_k)
        ps = [1.0] * count if top_p is None else list(top_p)
        mins = [0.0] * count if min_p is None else list(min_p)
        seeds = [0] * count if seed is None else list(seed)
        for name, values in (
            ("draft_temperature", drafts), ("top_k", ks), ("top_p", ps), ("min_p", mins), ("seed", seeds),
        ):  # fmt: skip
            if len(values) != count:
                raise InputError(f"{name} has {len(values)} values for {count} temperatures")
        for t in (*temperature, *drafts):
            if not (t == 0 or MIN_TEMPERATURE <= t <= MAX_TEMPERATURE):
                raise InputError(
                    f"temperature is {t}, expected 0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
                )
        for k in ks:
            if not 0 <= k < 2**31:
                raise InputError(f"top_k is {k}, expected 0 (off) or a number of tokens")
        for p in ps:
            if not 0 < p <= 1:
                raise InputError(f"top_p is {p}, expected above 0 and at most 1 (off)")
        for m in mins:
            if not 0 <= m <= 1:
                raise InputError(f"min_p is {m}, expected 0 (off) to 1")
        for s in seeds:
            if not -(2**63) <= s < 2**63:
                raise InputError(f"seed {s} does not fit 64 bits")

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            scale=tensor([_scale(t) for t in temperature], torch.float32),
            draft_scale=tensor([_scale(t) for t in drafts], torch.float32),
            top_k=tensor(ks, torch.int32),
            top_p=tensor(ps, torch.float32),
            log2_min_p=tensor([math.log2(m) if m else -math.inf for m in mins], torch.float32),
            seed=tensor(seeds, torch.int64),
            samples_drafts=any(t > 0 for t in drafts),
        )


def _scale(temperature: float) -> float:
    return math.log2(math.e) / temperature if temperature else 0.0
