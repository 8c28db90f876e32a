"""Kernels of recurrent layers compile with the installed Triton as well as with the one for sm_70."""

from __future__ import annotations

import pytest

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.experiments.sm70.launches import recorded_launches
from page4.experiments.sm70.pretend_gpu import GPUS, pretend_gpu
from page4.experiments.sm70.recurrent_calls import recurrent_calls

CALLS = dict(recurrent_calls())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("words", CALLS)
def test_compiles_without_spills(words: str, capability: int) -> None:
    with pretend_gpu(GPUS[capability]), recorded_launches() as launches:
        CALLS[words]()
    assert launches
    for launch in launches:
        job = launch.job(capability)
        binary = compile_for(job.function, job.signature, job.constants, capability, **job.options)
        assert binary.stack_bytes == 0
        assert "bf16" not in binary.ptx
