"""Verification and draft sampling over vocabularies of a few tokens: code of its own that must compile."""

from __future__ import annotations

import pytest

from page4.experiments.sm70 import sampling_calls
from page4.experiments.sm70.compiling import CAPABILITIES, Compiler
from page4.experiments.sm70.launches import recorded_launches
from page4.experiments.sm70.pretend_gpu import GPUS, pretend_gpu


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("vocabulary", [1, 33])
def test_small_vocabularies_compile(
    vocabulary: int, capability: int, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of one is a constant: loops over it may be dead code, tensors may become scalars."""
    monkeypatch.setattr(sampling_calls, "VOCABULARY", vocabulary)
    with pretend_gpu(GPUS[capability]), recorded_launches() as launches:
        sampling_calls._verify(2, sampled=True, constrained=True)
        sampling_calls._draft(sampled=True)
    kernels = {launch.kernel.fn.__name__ for launch in launches}
    assert kernels == {"tile_sums_kernel", "gather_rows_kernel", "decide_kernel", "choose_draft_kernel"}
    for launch in launches:
        assert compiler.compile(launch.job(capability)).capability == capability
