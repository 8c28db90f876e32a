"""What tuning needs of the machine that it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

from page4.experiments.gpu_timing import cold_copies, time_launches
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_triton import multiprocessor_count
from page4.kernels.tuning import device_name


@dataclass(frozen=True)
class Machine:
    """A device and its clock.

    Attributes:
        device: where kernels run.
        gpu: its name, as the driver gives it.
        multiprocessors: how many it has.
        shared_memory: bytes that a program can have of it.
        time_us: microseconds of a call; the calls given do the same work on copies of the inputs.
        cold_copies: how many copies it takes that no cache holds the bytes of a call when it begins.
        now: seconds, from any beginning.
    """

    device: torch.device
    gpu: str
    multiprocessors: int
    shared_memory: int
    time_us: Callable[[Sequence[Callable[[], object]]], float]
    cold_copies: Callable[[int], int]
    now: Callable[[], float] = time.monotonic


def this_gpu(replays: int) -> Machine:
    """The current GPU, timed by CUDA graphs.

    Raises:
        InputError: there is none.
    """
    if not torch.cuda.is_available():
        raise InputError("tuning measures on a CUDA GPU, and PyTorch sees none; --show needs none")
    device = torch.device("cuda", torch.cuda.current_device())
    return Machine(
        device=device,
        gpu=device_name(device),
        multiprocessors=multiprocessor_count(device),
        shared_memory=triton.runtime.driver.active.utils.get_device_properties(device.index)[
            "max_shared_mem"
        ],
        time_us=lambda launches: time_launches(launches, replays=replays).median_us,
        cold_copies=lambda size: cold_copies(size, device),
    )
