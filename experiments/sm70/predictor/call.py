"""Predicts what a launcher would launch on a V100: compiles it, emulates it on real values, replays it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from page4.experiments.config import DataclassInstance
from page4.experiments.sm70 import emulator
from page4.experiments.sm70.assembly import Program, parse
from page4.experiments.sm70.compiling import Binary, Compiler
from page4.experiments.sm70.emulator.global_memory import RANGE_BYTES
from page4.experiments.sm70.launches import Launch, recorded_launches
from page4.experiments.sm70.predictor.caches import Lines
from page4.experiments.sm70.predictor.machine import V100, Machine
from page4.experiments.sm70.predictor.predict import Geometry, Place, Prediction, predict
from page4.experiments.sm70.predictor.sm_model import usual_l2
from page4.experiments.sm70.pretend_gpu import GPUS, pretend_gpu
from page4.experiments.sm70.toolchain import VERSION
from page4.experiments.sm70.trace import SECTOR_BYTES, Trace
from page4.kernels import tuning
from page4.kernels.errors import InputError

InputsT = TypeVar("InputsT", bound=DataclassInstance)

CAPABILITY = 70
_DEFAULT_WARPS = 4  # Triton's


@dataclass(frozen=True)
class KernelPrediction:
    """One kernel of a call.

    Attributes:
        kernel: name of the function.
        launch: as the launcher made it.
        binary: what was compiled.
        prediction: its time.
    """

    kernel: str
    launch: Launch
    binary: Binary
    prediction: Prediction


@contextmanager
def v100_stack() -> Iterator[torch.device]:
    """Within the block the GPU is a V100, and configurations are those for the Triton that compiles for it.

    New tensors have no values.
    """
    version = ".".join(VERSION.split(".")[:2])
    with (
        mock.patch.object(tuning, "triton_version", lambda: version),
        pretend_gpu(GPUS[CAPABILITY]) as device,
    ):
        yield device


def own_storages(inputs: InputsT) -> InputsT:
    """A dataclass of tensors without values in which no two fields share memory, as launched ones do not."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            size = value.untyped_storage().nbytes() // value.element_size()
            storage = torch.empty(size, dtype=value.dtype)
            changed[field.name] = storage.as_strided(value.shape, value.stride(), value.storage_offset())
        elif dataclasses.is_dataclass(value):
            changed[field.name] = own_storages(cast(Any, value))
    return dataclasses.replace(inputs, **changed)


def launches_on_v100(call: Callable[[], object]) -> list[Launch]:
    """What a launcher launches where the GPU is a V100. Tensors that ``call`` makes have no values."""
    with v100_stack(), recorded_launches() as launches:
        call()
    return launches


@dataclass(frozen=True)
class Sample:
    """How much of a call is emulated, and how much replayed. The call is for equal requests.

    Attributes:
        requests: of the call.
        emulated: requests that there is data for; programs of the others repeat theirs.
        divisor: of requests and machine: a quarter of the requests on a quarter of the multiprocessors, of
            L2 and of bandwidth takes as long as all on all. Divides both.
        axis: of the grids that requests, or their rows, are counted along; 0 for x.
        most_blocks: of a launch are emulated at most, evenly spread. A later launch finds nothing in L2 that
            blocks wrote which were not emulated.

    Raises:
        InputError: numbers that do not divide each other.
    """

    requests: int
    emulated: int
    divisor: int = 1
    axis: int = 0
    most_blocks: int = 256

    def __post_init__(self) -> None:
        """Refuse what is no sample."""
        if not 1 <= self.emulated <= self.requests:
            raise InputError(f"{self.emulated} of {self.requests} requests cannot be emulated")
        if self.requests % self.divisor or V100.multiprocessors % self.divisor:
            raise InputError(
                f"{self.requests} requests on {V100.multiprocessors} multiprocessors do not divide by "
                f"{self.divisor}"
            )

    def geometry(self, launch: Launch, warps: int, shared_bytes: int) -> Geometry:
        """What is emulated and replayed of a launch.

        Raises:
            InputError: the grid does not count requests along the axis.
        """
        x, y, z = (*launch.grid, 1, 1)[:3]
        grid = [x, y, z]
        places = grid[self.axis]
        if places % self.requests:
            raise InputError(
                f"{launch.kernel.fn.__name__} has {places} places along an axis for {self.requests} requests"
            )
        grid[self.axis] = places // self.divisor
        part = min(places // self.requests * self.emulated, grid[self.axis])
        whole = grid[0], grid[1], grid[2]
        return Geometry(whole, warps, shared_bytes, self.axis, part, self.most_blocks)


def predict_launches(
    launches: Sequence[Launch], whole: object, data: object, compiler: Compiler, sample: Sample
) -> list[KernelPrediction]:
    """Predict the kernels of a call, one after the other.

    The first finds an L2 full of dirty lines of others, every other one what the one before left there. Time
    between the kernels is not included.

    Tensors that are in ``whole`` get the values of their counterparts in ``data``; all others, outputs and
    workspaces, begin as zeros and are shared by the launches.

    Args:
        launches: of a call on ``whole``.
        whole: a dataclass of the call's inputs, of tensors and of other such dataclasses, without values.
        data: the same dataclass with values on the CPU, of the emulated requests.
        compiler: for the V100.
        sample: how much is emulated and replayed.

    Raises:
        CompilationError: a kernel does not compile.
        EmulationError: the emulator cannot run a kernel on these values.
        InputError: a block that does not fit on a V100, or a grid that does not count requests.
    """
    machine = V100.part(V100.multiprocessors // sample.divisor)
    memory, l2 = _Memory(whole, data), usual_l2(machine)
    return [_predict_launch(launch, memory, compiler, sample, machine, l2) for launch in launches]


def _predict_launch(
    launch: Launch, memory: _Memory, compiler: Compiler, sample: Sample, machine: Machine, l2: Lines
) -> KernelPrediction:
    job = launch.job(CAPABILITY)
    binary = compiler.compile(job)
    program = _program(compiler, binary.cubin)
    warps = int(launch.options.get("num_warps", _DEFAULT_WARPS))
    geometry = sample.geometry(launch, warps, binary.shared_bytes)
    values = [launch.arguments[name] for name in job.signature]
    x, y, z = (*launch.grid, 1, 1)[:3]

    def trace_blocks(blocks: Sequence[Place]) -> Trace:
        run = emulator.run(
            program,
            grid=(x, y, z),
            warps=warps,
            arguments=[memory.argument(value) for value in values],
            shared_bytes=binary.shared_bytes,
            blocks=blocks,
            trace=True,
            check_races=False,
        )
        assert run.trace is not None
        return memory.placed(run.trace, values)

    prediction = predict(program, geometry, trace_blocks, machine, l2)
    return KernelPrediction(launch.kernel.fn.__name__, launch, binary, prediction)


@functools.lru_cache(maxsize=64)
def _program(compiler: Compiler, cubin: bytes) -> Program:
    return parse(compiler.toolchain.disassemble(cubin))


class _Memory:
    """Values for tensors that have none, and a place in memory for each of them."""

    def __init__(self, whole: object, data: object) -> None:
        # The tensors are kept, and so the names of their storages.
        self._kept = list(_tensor_pairs(whole, data))
        self._values = {_place_of(a): b for a, b in self._kept}
        self._names = {storage: n for n, (storage, _) in enumerate(self._values)}

    def argument(self, value: Any) -> emulator.Argument:
        """What the emulator gets for an argument."""
        if not isinstance(value, Tensor):
            return cast(emulator.Argument, value)
        storage, offset = place = _place_of(value)
        if place not in self._values:
            self._kept.append((value, value))
            self._values[place] = torch.zeros(value.untyped_storage().nbytes() - offset, dtype=torch.uint8)
            self._names.setdefault(storage, len(self._values))
        return _bytes_from(self._values[place])

    def placed(self, trace: Trace, values: Sequence[Any]) -> Trace:
        """The trace with one address for a byte in all launches; the emulator counts the arrays of each."""
        number, within = np.divmod(trace.sectors, RANGE_BYTES // SECTOR_BYTES)
        first = np.arange(len(values) + 1) * (RANGE_BYTES // SECTOR_BYTES)
        for n, (storage, offset) in enumerate(_place_of(v) for v in values if isinstance(v, Tensor)):
            first[n + 1] = (RANGE_BYTES * self._names[storage] + offset) // SECTOR_BYTES
        is_global = number < len(first)
        moved = first[np.where(is_global, number, 0)] + within
        return dataclasses.replace(trace, sectors=np.where(is_global, moved, trace.sectors))


def _tensor_pairs(whole: Any, data: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of two dataclasses that stand in the same place."""
    for field in dataclasses.fields(whole):
        a, b = getattr(whole, field.name), getattr(data, field.name)
        if isinstance(a, Tensor):
            yield a, b
        elif dataclasses.is_dataclass(a):
            yield from _tensor_pairs(a, b)


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Storage and first byte: a view of another dtype has those of the tensor that it is a view of."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()


def _bytes_from(tensor: Tensor) -> Any:
    """The memory from a tensor's first element to the end of its storage, as an array."""
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole[start:].numpy()
