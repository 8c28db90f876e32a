"""GPUs that are not there, and the launches that are recorded on them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from page4.experiments.sm70.launches import Launch, recorded_launches
from page4.experiments.sm70.pretend_gpu import GPUS, pretend_gpu
from page4.experiments.sm70.step_inputs import USUAL, attention_inputs
from page4.kernels import dependent_launch, page4_attention_merge_triton
from page4.kernels.page4_attention_dispatch import page4_attention
from page4.kernels.page4_attention_triton import multiprocessor_count


@triton.jit(do_not_specialize=["rows"])
def some_kernel(p_x, p_y, p_none, n, one, rows, scale, N: tl.constexpr):
    """Never launched."""


def launch(**changes: object) -> Launch:
    x = torch.zeros(64, dtype=torch.float16)
    arguments = {"p_x": x, "p_y": x[1:], "p_none": None, "n": 48, "one": 1, "rows": 16, "scale": 0.5, "N": 4}
    return Launch(some_kernel, (1,), arguments | changes, {"num_warps": 4})


def test_arguments_are_specialised_as_triton_does() -> None:
    job = launch().job(70)
    assert dict(job.signature) == {
        "p_x": "*fp16", "p_y": "*fp16:unaligned", "n": "i32:16", "rows": "i32", "scale": "fp32",
    }  # fmt: skip
    assert dict(job.constants) == {"p_none": None, "one": 1, "N": 4}
    assert (job.capability, dict(job.options)) == (70, {"num_warps": 4})
    assert launch(n=2**31, rows=1, one=3).job(70).signature["n"] == "i64:16"
    assert launch(rows=1).job(70).signature["rows"] == "i32"


def test_a_pretended_gpu_answers_like_one_and_leaves_nothing_behind() -> None:
    with pretend_gpu(GPUS[70]) as device:
        x = torch.empty(4, 8)
        assert x.device == x[1:].device == x.new_zeros(3).device == device and x.is_cuda
        assert torch.cuda.get_device_capability(device) == (7, 0)
        assert multiprocessor_count(device) == 80
        assert not dependent_launch.launches_dependents(device)
    with pretend_gpu(GPUS[90]) as device:
        assert dependent_launch.launches_dependents(device)
    assert torch.empty(1).device.type == "cpu"
    assert not hasattr(torch.cuda.get_device_capability, "mock")


def test_launchers_record_instead_of_launching() -> None:
    kernel = page4_attention_merge_triton.merge_kernel
    with pretend_gpu(GPUS[80]), recorded_launches() as launches:
        page4_attention(attention_inputs(USUAL))
    assert [one.kernel.fn.__name__ for one in launches] == ["page4_attention_ampere_kernel", "merge_kernel"]
    assert page4_attention_merge_triton.merge_kernel is kernel
    attention, merge = launches
    splits = attention.arguments["SPLITS"]
    assert attention.grid == (1, 1, splits) and merge.arguments["splits"] == splits
    assert list(merge.arguments) == list(kernel.arg_names)
    assert "launch_pdl" not in attention.options
