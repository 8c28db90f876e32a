"""Verification of a speculative draft: which drafted tokens the target accepts, and what is emitted."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.errors import InputError


def verify_greedy_reference(target_tokens: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of the draft that greedy decoding of the target would have produced.

    ``target_tokens[b, j]`` is the target's argmax after the verify row that holds draft ``j`` (row 0 holds
    the last accepted token), so draft ``j + 1`` is accepted when it equals ``target_tokens[b, j]`` and every
    earlier draft was accepted. A draft of -1 (nothing was drafted there) ends the prefix. The token after the
    accepted prefix is the target's own: the bonus token when all drafts are accepted, the correction
    otherwise.

    Shapes: ``target_tokens`` is int64 ``[B, K + 1]``, ``drafts`` is int64 ``[B, K]`` (``K = 0`` is plain
    greedy decoding). Returns ``accepted`` as int64 ``[B]`` in ``0..K`` and ``emitted`` as int64
    ``[B, K + 1]``: the ``accepted + 1`` tokens of this step, then -1.

    Raises:
        InputError: shapes that disagree.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), greedy case.
    """
    batch, num_drafts = drafts.shape
    if target_tokens.shape != (batch, num_drafts + 1):
        raise InputError(
            f"target_tokens has shape {list(target_tokens.shape)}; needs {[batch, num_drafts + 1]}"
        )
    matches = (drafts == target_tokens[:, :num_drafts]) & (drafts >= 0)
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    column = torch.arange(num_drafts + 1, device=drafts.device)
    # Accepted drafts equal the target's tokens, so one select covers the prefix and the token after it.
    emitted = torch.where(column <= accepted[:, None], target_tokens, -1)
    return accepted, emitted
