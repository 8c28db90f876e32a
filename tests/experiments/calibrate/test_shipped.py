"""The shipped overlay is what calibrating the shipped checkpoint gives, and what its scales are good for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.numpy import load_file

from page4.experiments.calibrate import CalibrateConfig, run
from page4.experiments.calibrate.overlay import write_overlay
from page4.experiments.calibrate.state import load
from page4.experiments.info import CHECKPOINT, OVERLAY
from page4.kvcache import get_format
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE
from page4.kvcache.scale_rules import relative_rms_error
from page4.model import Qwen4ExpConfig
from page4.model.kv_scales import load_overlay

E4M3 = get_format("e4m3")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibration with its default settings: what `page4 calibrate` does on a CPU."""
    folder = tmp_path_factory.mktemp("shipped") / "calibration"
    run(CalibrateConfig(device="cpu"), folder)
    return folder


def test_calibration_reproduces_the_shipped_overlay_bit_for_bit(calibration: Path, tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path / "again", CHECKPOINT, calibration)
    for file in (TARGET_FILE, DRAFT_FILE):
        assert (tmp_path / "again" / file).read_bytes() == (OVERLAY / file).read_bytes()
    layers = Qwen4ExpConfig.from_file(CHECKPOINT / "config.json").qsa_layers
    assert set(overlay.target) == set(layers) and overlay.draft is not None


def test_every_shipped_scale_is_loaded() -> None:
    scales = load_overlay(OVERLAY, CHECKPOINT)
    assert scales.draft is not None
    loaded = [value for pair in (*scales.target, scales.draft) for value in (pair.k, pair.v)]
    stored = [float(v) for file in (TARGET_FILE, DRAFT_FILE) for v in load_file(OVERLAY / file).values()]
    assert sorted(loaded) == sorted(stored) and len(stored) == 6


def test_scales_64_times_too_large_cost_nothing_and_too_small_ones_clip(calibration: Path) -> None:
    """On what the shipped model stores: up to 64 times the scale leaves E4M3's error, half of it clips."""
    state = load(calibration)
    assert state is not None and state.observation is not None
    scales = state.observation.scales("e4m3")
    assert scales.draft is not None
    parts = [part for pair in state.observation.layers.values() for part in pair]
    calibrated = [scale for pair in (*scales.target, scales.draft) for scale in (pair.k, pair.v)]
    for observed, scale in zip(parts, calibrated, strict=True):
        errors = {octave: relative_rms_error(observed, E4M3, scale * 2.0**octave) for octave in range(-6, 7)}
        clipped = {octave: observed.share_above(448 * scale * 2.0**octave) for octave in range(-6, 7)}
        assert all(errors[octave] == pytest.approx(errors[0], rel=0.02) for octave in range(1, 7))
        assert all(clipped[octave] == 0 for octave in range(7))
        assert observed.share_above(448 * scale * (1 - 2**-10)) > 0  # the calibrated scale is where it starts
        assert 0 < clipped[-1] < clipped[-2] < clipped[-3] < clipped[-6]
        assert errors[-2] > 1.5 * errors[0] and errors[-6] > 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_gpu_finds_nearly_the_same_scales(backend: Literal["reference", "triton"], tmp_path: Path) -> None:
    """FP16 activations move each maximum a little; the bits are a CPU's."""
    report = run(CalibrateConfig(device="cuda", backend=backend), tmp_path / "out")
    scales = load_overlay(OVERLAY, CHECKPOINT)
    assert scales.draft is not None
    for pair, layer in zip((*scales.target, scales.draft), report["layers"].values(), strict=True):
        assert layer["k"]["scale"] == pytest.approx(pair.k, rel=0.03)
        assert layer["v"]["scale"] == pytest.approx(pair.v, rel=0.03)
