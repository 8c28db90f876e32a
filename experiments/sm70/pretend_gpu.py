"""A GPU that is not there: tensors without values, and the answers that launchers ask of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class GPU:
    """What launchers can know of a GPU.

    Attributes:
        name: as the driver gives it.
        models: parts of the names of GPUs with the same code.
        capability: compute capability, such as 70.
        multiprocessors: how many it has.
    """

    name: str
    models: tuple[str, ...]
    capability: int
    multiprocessors: int

    @property
    def device(self) -> torch.device:
        """A device that no machine has: nothing that is remembered by device is that of a real one."""
        return torch.device("cuda", self.capability)


GPUS = {
    gpu.capability: gpu
    for gpu in (
        GPU("Tesla V100-SXM2-16GB", ("V100",), 70, 80),
        GPU("NVIDIA A100-SXM4-80GB", ("A100",), 80, 108),
        GPU("NVIDIA H200", ("H100", "H200"), 90, 132),
    )
}


@contextmanager
def pretend_gpu(gpu: GPU) -> Iterator[torch.device]:
    """Within the block all new tensors are on the GPU; they have shapes, dtypes and strides, no values."""
    with answers_of(gpu), _OnDevice(gpu.device):
        yield gpu.device


@contextmanager
def answers_of(gpu: GPU) -> Iterator[None]:
    """Within the block PyTorch says of every device that it is the GPU."""
    properties = SimpleNamespace(multi_processor_count=gpu.multiprocessors, name=gpu.name)
    answers = {
        "get_device_capability": lambda device=None: divmod(gpu.capability, 10),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: gpu.name,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        yield


_FACTORIES = (torch.empty, torch.zeros, torch.tensor, torch.arange)


class _OnDevice(TorchFunctionMode):
    """Makes tensors on the meta device, which call themselves tensors of another one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == torch.Tensor.device.__get__:
            return self._device
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        arguments = dict(kwargs or {})
        if "device" in arguments or func in _FACTORIES:
            arguments["device"] = "meta"
        return func(*args, **arguments)
