"""The bench on a real GPU, at shapes that take seconds."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.study import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_every_kernel_is_right_and_gets_a_time(tmp_path: Path) -> None:
    quick = BenchConfig(**BenchConfig.QUICK | {"formats": ("e4m3", "fp16", "int8"), "replays": 5})
    summary = run(quick, tmp_path / "out")
    assert summary["wrong"] == summary["failed"] == summary["no_room"] == 0
    with (tmp_path / "out" / "bench.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["kernel"] for row in rows} == set(quick.kernels)
    for row in rows:
        assert row["status"] == "ok" and int(row["samples"]) == 5
        # Selection and the write move too few bytes here to flush a cache with any number of copies.
        assert row["cold"] == "True" or row["kernel"] in ("qsa_prepare", "block_select")
        # Nothing is faster than the bytes that cannot be avoided; a little for the noise of both times.
        assert 0 < float(row["floor_fraction"]) < 1.1
    assert (tmp_path / "out" / "roofline.png").stat().st_size > 10_000
