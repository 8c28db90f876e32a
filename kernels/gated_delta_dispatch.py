"""Which form of the gated delta rule takes a prompt's rows, said by one rule."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.gated_delta_chunk_triton import chunk_gated_delta_triton
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights, gated_delta_triton
from page4.kernels.page4_attention_dispatch import device_capability
from page4.kernels.recurrent_rows import RequestRows

PrefillForm = Literal["auto", "chunk", "scan"]
PREFILL_FORMS: tuple[PrefillForm, ...] = get_args(PrefillForm)


def choose_prefill_form(
    form: str, capability: tuple[int, int] | None
) -> tuple[Literal["chunk", "scan"], str]:
    """The form that a prompt's rows get, and why. An explicit request never falls back.

    ``chunk`` multiplies matrices of 64 rows, ``scan`` takes one row after another. The number of rows does
    not matter: a prompt's last rows get the form, and the bits, that they have as part of a longer step.

    Args:
        form: ``auto``, ``chunk`` or ``scan``.
        capability: the GPU's (major, minor), or None for Triton's interpreter.

    Raises:
        InputError: an unknown name, or a form that cannot run on the GPU.
    """
    if form not in PREFILL_FORMS:
        raise InputError(f"prefill form {form!r} is unknown, expected one of {', '.join(PREFILL_FORMS)}")
    if form == "scan":
        return "scan", "asked for"
    if capability is not None and capability < (8, 0):
        obstacle = (
            "it needs tensor cores for TF32, compute capability 8.0 or newer, "
            f"the GPU has {capability[0]}.{capability[1]}"
        )
        if form == "chunk":
            raise InputError(f"prefill form 'chunk' cannot run: {obstacle}")
        return "scan", f"chunk cannot run: {obstacle}"
    return "chunk", "asked for" if form == "chunk" else "the fastest that can run"


def prefill_gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    ring: Tensor,
    state: Tensor,
    rows: RequestRows,
    eps: float = 1e-6,
    out: Tensor | None = None,
    form: PrefillForm = "auto",
) -> Tensor:
    """A layer's prompt rows from projections to the output projection's input; advances its state.

    Arguments and result are those of :func:`~page4.kernels.gated_delta_triton.gated_delta_triton` with
    ``every_row=False``; ``form`` as for :func:`choose_prefill_form`.

    Raises:
        InputError: as there, or a form that is unknown or cannot run.
    """
    chosen, _ = choose_prefill_form(form, device_capability(inputs.mixed.device))
    if chosen == "chunk":
        return chunk_gated_delta_triton(inputs, weights, ring, state, rows, eps, out)
    return gated_delta_triton(inputs, weights, ring, state, rows, every_row=False, eps=eps, out=out)
