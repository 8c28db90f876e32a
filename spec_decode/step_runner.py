"""Runs decode steps, as captured CUDA graphs where that is possible."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .decode_step import DecodeStep, StepShape

SHORTEST_BUCKET = 256  # tokens


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    lanes: Tensor
    result: Tensor


class StepRunner:
    """Steps of a few shapes: as many lanes and tokens as the next power of two, padded.

    A step of the ``triton`` backend on a GPU is captured when its shape is first met, and replayed from then
    on. The reference backend synchronises with the host, and takes shapes as they are.

    Args:
        step: what to run.
        max_lanes, max_tokens: the largest shape.
        graphs: capture; without, the same launches are made one by one.
    """

    def __init__(self, step: DecodeStep, max_lanes: int, max_tokens: int, graphs: bool) -> None:
        self.step = step
        self.device = step.state.device
        self.padded = step.chooser.backend == "triton"
        self.graphs = graphs and self.padded and self.device.type == "cuda"
        self.max_lanes, self.max_tokens = max_lanes, max_tokens
        self._captured: dict[StepShape, _Captured] = {}
        # All graphs share their memory: no two run at once, and results are copied before the next one does.
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def bucket(self, lanes: int, longest: int) -> tuple[int, int]:
        """Lanes and tokens of the shape that takes so many."""
        if not self.padded:
            return lanes, longest
        tokens = max(SHORTEST_BUCKET, _power_of_two(longest))
        return min(_power_of_two(lanes), self.max_lanes), min(tokens, self.max_tokens)

    def prepare(self, shape: StepShape) -> None:
        """Captures a shape unless that is done, so that the next step of it takes no longer than others."""
        if self.graphs and shape not in self._captured:
            self._captured[shape] = self._capture(shape)

    def run(self, lanes: list[int], shape: StepShape) -> Tensor:
        """One step, see :meth:`DecodeStep.run`; the result is overwritten by the next one.

        Args:
            lanes: the cache's row of each request, -1 for padding.
        """
        host = torch.tensor(lanes, pin_memory=self.device.type == "cuda")
        if not self.graphs:
            return self.step.run(host.to(self.device, non_blocking=True), shape)
        self.prepare(shape)
        captured = self._captured[shape]
        captured.lanes.copy_(host, non_blocking=True)
        captured.graph.replay()
        return captured.result

    def _capture(self, shape: StepShape) -> _Captured:
        """Runs the step over padding alone until everything is compiled and allocated, then records it."""
        lanes = torch.full((shape.lanes,), -1, device=self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step.run(lanes, shape)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self.step.run(lanes, shape)
        return _Captured(graph, lanes, result)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
