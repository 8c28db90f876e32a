"""What a bench may be asked for, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from page4.experiments.bench.config import KERNELS, BenchConfig
from page4.experiments.config import load_config
from page4.kernels.errors import InputError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["kernels=step,fast"], "must be one of qsa_prepare, index_scores, block_select"),
        (["implementations=cuda"], "must be one of gluon, triton, pytorch, vllm, scan"),
        (["rows=9"], "rows of a decoding step are 1..8, got 9"),
        (["contexts=2"], "4 rows do not fit into a context of 2 tokens"),
        (["heads=[[7, 2]]"], "query a multiple of KV"),
        (["overlaps=0.5,1.5"], "overlaps must lie in 0..1"),
        (["formats=fp12"], "unknown KV format 'fp12'"),
        (["requests=0"], "requests must be positive, got 0"),
        (["requests="], "requests must name at least one value"),
        (["replays=0"], "replays must be at least 1, got 0"),
        (["device=cpu"], "device must be one of auto, cuda"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_nonsense_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_config(BenchConfig, None, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_come_from_set_and_quick() -> None:
    given = ["heads=[[6, 1]]", "contexts=4096,8192", "sweep=product"]
    config = load_config(BenchConfig, None, given, quick=True, kernels=("planned_attention",))
    assert (
        config.kernels == ("planned_attention",)
        and config.heads == ((6, 1),)
        and config.contexts == (4096, 8192)
    )
    assert config.sweep == "product" and not config.bars
    assert BenchConfig().kernels == KERNELS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_without_a_gpu_there_is_no_bench(device: Any) -> None:
    with pytest.raises(InputError, match="times kernels on a CUDA GPU, and PyTorch sees none"):
        BenchConfig(device=device).resolve()
