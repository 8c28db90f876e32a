"""An explicit device is never replaced by another."""

from __future__ import annotations

import pytest
import torch

from page4.experiments.device import resolve_device
from page4.kernels.errors import InputError


@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, available: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert resolve_device("auto") == torch.device(device)
    assert resolve_device("cpu") == torch.device("cpu")


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="sees no CUDA device"):
        resolve_device("cuda")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="choose one of auto, cpu, cuda"):
        resolve_device("tpu")
