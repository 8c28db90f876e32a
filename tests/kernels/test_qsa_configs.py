"""The kernels beside attention get recorded configurations, which change their speed, not their results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments.kernel_cases import StepShape, prepare_copies, score_copies
from page4.experiments.sm70.pretend_gpu import GPUS, pretend_gpu
from page4.kernels.errors import InputError
from page4.kernels.index_scores_triton import ScoresConfig, default_scores_config, index_scores_triton
from page4.kernels.qsa_configs import prepare_config, scores_config
from page4.kernels.qsa_prepare_triton import PrepareConfig, default_prepare_config
from page4.kernels.tunable import TUNABLE, PrepareKey, ScoresKey
from page4.kernels.tuning import device_name, triton_version, use_configurations
from page4.kernels.tuning_file import Entry, TuningFile, tuning_path

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = StepShape(
    requests=2, rows=3, query_heads=4, kv_heads=1, head_dim=32, context=70, overlap=0.5, kv_format="e4m3",
    index_dim=32, topk=6,
)  # fmt: skip
SCORES, PREPARE = TUNABLE["index_scores_triton"], TUNABLE["qsa_prepare_triton"]


def record(folder: Path, kernel: Any, key: Any, config: Any) -> None:
    gpu, version = device_name(DEVICE), triton_version()
    file = folder / tuning_path(kernel.name, gpu, version)
    file.parent.mkdir(parents=True, exist_ok=True)
    entry = Entry(key, config, 5.0, 6.0, "2026-11-29", {})
    file.write_text(TuningFile(kernel, gpu, version, {key: entry}).text(), encoding="utf-8")


@pytest.mark.parametrize("tile_blocks", [16, 64])
@pytest.mark.parametrize("programs", [1, 9])
def test_scores_do_not_depend_on_the_configuration(tile_blocks: int, programs: int) -> None:
    (case,) = score_copies(STEP, DEVICE)
    call = vars(case)
    expected = index_scores_triton(**call | {"scores": torch.full_like(case.scores, torch.nan)})
    config = ScoresConfig(tile_blocks, programs, num_warps=4, num_stages=2)
    scores = index_scores_triton(**call | {"scores": torch.full_like(case.scores, torch.nan)}, config=config)
    visible = (case.positions + 1) // 4
    assert visible.min() > 16  # more than one small tile
    seen = torch.arange(scores.shape[1], device=DEVICE) < visible[:, None]
    torch.testing.assert_close(scores[seen], expected[seen], rtol=1e-5, atol=1e-5)
    assert scores[~seen].isnan().all()


def test_recorded_configurations_are_used_and_noted(tmp_path: Path) -> None:
    (score,), (prepare,) = score_copies(STEP, DEVICE), prepare_copies(STEP, DEVICE)
    scores_key = ScoresKey.of(score.index_q, score.groups, score.scores)
    prepare_key = PrepareKey.of(prepare.q_gate, prepare.k, prepare.index, prepare.storage)
    assert dataclasses.astuple(scores_key) == (2, 3, 4, 32, 32)  # 18 blocks, in a power of two
    assert dataclasses.astuple(prepare_key) == (6, 4, 1, 32, 4, 32, "e4m3")
    record(tmp_path, SCORES, scores_key, ScoresConfig(16, 7, 2, 1))
    record(tmp_path, PREPARE, dataclasses.replace(prepare_key, rows=12), PrepareConfig(4))
    with use_configurations(tmp_path) as configurations:
        for _ in range(2):
            config = scores_config(score.index_q, score.compressed_pages, score.groups, score.scores)
            assert config == ScoresConfig(16, 7, 2, 1)
            assert prepare_config(prepare.q_gate, prepare.k, prepare.index, prepare.storage) == PrepareConfig(
                4
            )
        used = configurations.record()["used"]
    assert [(use["kernel"], use["origin"]) for use in used] == [
        (SCORES.name, "exact"),
        (PREPARE.name, "bucket"),
    ]


def test_wide_numbers_and_unknown_shapes_get_the_default(tmp_path: Path) -> None:
    (score,) = score_copies(STEP, DEVICE)
    key = ScoresKey.of(score.index_q, score.groups, score.scores)
    record(tmp_path, SCORES, key, ScoresConfig(16, 7, 2, 1))
    wide = score.index_q.float(), score.compressed_pages.float()
    with use_configurations(tmp_path):
        assert scores_config(*wide, score.groups, score.scores) == default_scores_config(narrow=False)
        many = torch.zeros(6, 5000, device=DEVICE)
        narrow = score.index_q, score.compressed_pages
        assert scores_config(*narrow, score.groups, many) == default_scores_config(narrow=True)
    (prepare,) = prepare_copies(STEP, DEVICE)
    with use_configurations("defaults"):
        config = prepare_config(prepare.q_gate, prepare.k, prepare.index, prepare.storage)
    assert config == default_prepare_config(6, DEVICE)


@pytest.mark.parametrize(
    ("capability", "rows_per_program"), [(70, [1, 1, 1]), (80, [1, 2, 8]), (90, [1, 2, 8])]
)
def test_rows_of_a_program_by_rule(capability: int, rows_per_program: list[int]) -> None:
    with pretend_gpu(GPUS[capability]) as device:
        configs = [default_prepare_config(num_rows, device) for num_rows in (64, 256, 8192)]
    assert [config.rows_per_program for config in configs] == rows_per_program


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        (SCORES, {"tile_blocks": 8}, "tile_blocks must be a power of two from 16 on"),
        (SCORES, {"tile_blocks": 48}, "tile_blocks must be a power of two from 16 on"),
        (SCORES, {"programs": 0}, "programs must be at least 1"),
        (SCORES, {"num_warps": 3}, "num_warps must be a power of two"),
        (SCORES, {"num_stages": 9}, "num_stages must lie in 1..8"),
        (PREPARE, {"rows_per_program": 3}, "rows_per_program must be a power of two"),
        (PREPARE, {"rows_per_program": 128}, "rows_per_program must be a power of two"),
    ],
)
def test_impossible_configurations_are_refused(kernel: Any, changes: dict[str, int], message: str) -> None:
    valid = ScoresConfig(16, 1, 4, 1) if kernel is SCORES else PrepareConfig(1)
    kernel.check(None, valid)
    with pytest.raises(InputError, match=message):
        kernel.check(None, dataclasses.replace(valid, **changes))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScoresKey(1, 9, 4, 128, 1024),
        lambda: ScoresKey(0, 4, 4, 128, 1024),
        lambda: ScoresKey(1, 4, 4, 128, 1000),
        lambda: PrepareKey(0, 6, 1, 256, 4, 128, "e4m3"),
        lambda: PrepareKey(1, 6, 1, 256, 4, 128, "fp4"),
    ],
)
def test_keys_that_no_call_has_are_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()
