"""Copies beside the computation: in order among themselves, and with it by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Ticket(Protocol):
    """A copy that was queued."""

    def done(self) -> bool:
        """Whether it has been made; does not wait."""

    def before_computation(self) -> None:
        """Lets no later work of the computation begin before it; the host need not wait."""

    def wait(self) -> None:
        """Returns when it has been made."""

    def seconds(self) -> float:
        """How long it took, once it is done."""


class CopyQueue(Protocol):
    """Takes copies that begin after all earlier work of the computation and of the queue."""

    def submit(self, copy: Callable[[], object]) -> Ticket:
        """Queues what ``copy`` launches; memory that it uses stays alive until it is done."""


class ImmediateQueue:
    """Copies at once: on a CPU, where nothing runs beside the computation."""

    def submit(self, copy: Callable[[], object]) -> Ticket:
        """See :class:`CopyQueue`."""
        start = time.perf_counter()
        copy()
        return _Done(time.perf_counter() - start)


class StreamQueue:
    """A CUDA stream of its own; reading pages of the computation waits for what it has launched so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def submit(self, copy: Callable[[], object]) -> Ticket:
        """See :class:`CopyQueue`."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            copy()
            end.record(self.stream)
        return _Recorded(start, end, self._device, copy)


def copy_queue(device: torch.device) -> CopyQueue:
    """The queue for a device."""
    return StreamQueue(device) if device.type == "cuda" else ImmediateQueue()


class _Done:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def before_computation(self) -> None:
        return

    def wait(self) -> None:
        return

    def seconds(self) -> float:
        return self._seconds


class _Recorded:
    def __init__(
        self, start: torch.cuda.Event, end: torch.cuda.Event, device: torch.device, copy: Callable[[], object]
    ) -> None:
        self._start, self._end, self._device = start, end, device
        self._copy: Callable[[], object] | None = copy  # holds on to the tensors that it reads

    def done(self) -> bool:
        if self._copy is not None and self._end.query():
            self._copy = None
        return self._copy is None

    def before_computation(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def wait(self) -> None:
        self._end.synchronize()
        self._copy = None

    def seconds(self) -> float:
        return self._start.elapsed_time(self._end) / 1000
