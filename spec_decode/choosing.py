"""Verification and draft sampling on the backend of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from page4.kernels.backend import Backend
from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.mtp_verify import verify_greedy_reference, verify_reference
from page4.kernels.sampling_params import SamplingParams

if TYPE_CHECKING:
    from page4.kernels.draft_sampling_triton import DraftWorkspace
    from page4.kernels.mtp_verify_triton import VerifyWorkspace


@dataclass(frozen=True)
class Chooser:
    """Chooses the tokens of up to B requests.

    Attributes:
        backend: of the model.
        verify_workspace, draft_workspace: of the Triton kernels; they outlive captured steps.
    """

    backend: Backend
    verify_workspace: VerifyWorkspace | None = None
    draft_workspace: DraftWorkspace | None = None

    @classmethod
    def of(
        cls, backend: Backend, requests: int, num_drafts: int, vocabulary: int, device: torch.device
    ) -> Chooser:
        """For a model's backend; allocates what its kernels share."""
        if backend == "reference":
            return cls(backend)
        from page4.kernels.draft_sampling_triton import DraftWorkspace
        from page4.kernels.mtp_verify_triton import VerifyWorkspace

        return cls(
            backend,
            VerifyWorkspace.allocate(requests, num_drafts, vocabulary, device),
            DraftWorkspace.allocate(requests, vocabulary, device),
        )

    def verify(
        self,
        logits: Tensor,
        drafts: Tensor,
        positions: Tensor,
        params: SamplingParams | None,
        distributions: DraftDistributions | None,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Accepted counts ``[B]`` and emitted tokens ``[B, T]``, see :func:`~.mtp_verify.verify_reference`.

        ``params`` is None when all requests are greedy and may emit any token; the reference is a comparison
        with the argmax then.
        """
        if self.verify_workspace is not None:
            from page4.kernels.mtp_verify_triton import verify_triton

            assert params is not None
            return verify_triton(
                logits, drafts, positions, params, self.verify_workspace, distributions, allowed
            )
        if params is None:
            return verify_greedy_reference(logits.argmax(-1), drafts)
        return verify_reference(logits, drafts, positions, params, distributions, allowed)

    def draft(
        self,
        logits: Tensor,
        positions: Tensor,
        params: SamplingParams | None,
        distributions: DraftDistributions | None,
        step: int,
    ) -> Tensor:
        """Draft number ``step`` of each request, ``[B]``; ``params`` as for :meth:`verify`."""
        if self.draft_workspace is not None:
            from page4.kernels.draft_sampling_triton import sample_drafts_triton

            assert params is not None
            return sample_drafts_triton(logits, positions, params, self.draft_workspace, distributions, step)
        if params is None:
            return logits.argmax(-1)
        return sample_drafts_reference(logits, positions, params, distributions, step)
