"""The shipped overlays are what calibrating the shipped checkpoint gives; what their scales are good for."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.numpy import load_file

from page4.experiments.calibrate import CalibrateConfig, run
from page4.experiments.calibrate.overlay import write_overlay
from page4.experiments.calibrate.state import load
from page4.experiments.cli import run as command
from page4.experiments.info import CHECKPOINT, OVERLAYS
from page4.kvcache import RECOMMENDED, get_format
from page4.kvcache.overlay_folder import formats_in
from page4.kvcache.overlay_names import DRAFT_FILE, TARGET_FILE
from page4.kvcache.scale_rules import choose_scale, relative_rms_error
from page4.model import Qwen4ExpConfig
from page4.model.kv_scales import load_overlay
from page4.spec_decode import KVObservation

E4M3 = get_format("e4m3")
FORMATS = ("e4m3", RECOMMENDED)
PUBLISHED = Path(__file__).resolve().parents[3] / "experiments/results/calibrate"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibration with its default settings: what `page4 calibrate` does on a CPU."""
    folder = tmp_path_factory.mktemp("shipped") / "calibration"
    run(CalibrateConfig(device="cpu"), folder)
    return folder


@pytest.fixture(scope="module")
def observed(calibration: Path) -> KVObservation:
    """What it saw of K and V."""
    state = load(calibration)
    assert state is not None and state.observation is not None
    return state.observation


def test_overlays_ship_for_these_formats() -> None:
    assert set(formats_in(OVERLAYS)) == set(FORMATS)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_calibration_reproduces_the_shipped_overlay_bit_for_bit(
    kv_format: str, calibration: Path, tmp_path: Path
) -> None:
    """One calibration gives both: what is seen does not depend on the format."""
    overlay = write_overlay(tmp_path / "again", CHECKPOINT, calibration, kv_format=kv_format)
    for file in (TARGET_FILE, DRAFT_FILE):
        assert (tmp_path / "again" / file).read_bytes() == (OVERLAYS / kv_format / file).read_bytes()
    layers = Qwen4ExpConfig.from_file(CHECKPOINT / "config.json").qsa_layers
    assert set(overlay.target) == set(layers) and overlay.draft is not None


def test_the_shipped_overlays_are_those_of_the_published_calibration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["scales", "verify", "shipped", "--calibration", str(PUBLISHED)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"shipped in {name}: 6 scales, 2 of 2 target layers, would load" for name in FORMATS
    ]
    digest = hashlib.sha256((PUBLISHED / "report.json").read_bytes()).hexdigest()
    for name in FORMATS:
        provenance = json.loads((OVERLAYS / name / "provenance.json").read_text(encoding="utf-8"))
        assert provenance["calibration"]["sha256"] == digest and provenance["calibration"]["rule"] == "max"


def test_a_folder_of_the_users_that_is_named_shipped_is_read_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where there is none, the shipped scales do not stand in for it."""
    monkeypatch.chdir(tmp_path)
    text = ["generate", str(CHECKPOINT / "README.md"), "--device", "cpu", "--scales", "./shipped"]
    commands = (
        ["scales", "verify", "./shipped"],
        ["scales", "inspect", "./shipped"],
        text,
        ["acceptance", "--quick", "--device", "cpu", "--set", "scales=./shipped"],
    )
    for arguments in commands:
        assert command(arguments) == 2
        assert "shipped does not exist" in capsys.readouterr().err
    shutil.copytree(OVERLAYS / "e4m3", "shipped")
    assert command(["scales", "verify", "./shipped"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "./shipped in e4m3: 6 scales, 2 of 2 target layers, would load"
    ]
    assert command([*text, "-n", "2", "--set", "prefill_chunk=512", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["kv_format"], record["scales"]) == ("e4m3", "./shipped")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_shipped_scale_is_loaded(kv_format: str) -> None:
    scales, folder = load_overlay(OVERLAYS, CHECKPOINT, kv_format), OVERLAYS / kv_format
    assert scales == load_overlay(folder, CHECKPOINT) and scales.draft is not None
    loaded = [value for pair in (*scales.target, scales.draft) for value in (pair.k, pair.v)]
    stored = [float(v) for file in (TARGET_FILE, DRAFT_FILE) for v in load_file(folder / file).values()]
    assert sorted(loaded) == sorted(stored) and len(stored) == 6


@pytest.mark.parametrize(("kv_format", "most"), [("e4m3", 0.0266), (RECOMMENDED, 0.01)])
def test_the_shipped_scales_clip_nothing_of_it_and_round_as_finely_as_the_format_can(
    kv_format: str, most: float, observed: KVObservation
) -> None:
    scales, used = load_overlay(OVERLAYS, CHECKPOINT, kv_format), get_format(kv_format)
    assert scales.draft is not None
    held = [scale for pair in (*scales.target, scales.draft) for scale in (pair.k, pair.v)]
    parts = [part for pair in observed.layers.values() for part in pair]
    for part, scale in zip(parts, held, strict=True):
        assert part.share_above(scale * used.max_value) == 0
        assert relative_rms_error(part, used, scale) < most


def test_scales_64_times_too_large_cost_nothing_and_too_small_ones_clip(observed: KVObservation) -> None:
    """On what the shipped model stores: up to 64 times the scale leaves E4M3's error, half of it clips."""
    scales = observed.scales("e4m3")
    assert scales.draft is not None
    parts = [part for pair in observed.layers.values() for part in pair]
    calibrated = [scale for pair in (*scales.target, scales.draft) for scale in (pair.k, pair.v)]
    for part, scale in zip(parts, calibrated, strict=True):
        errors = {octave: relative_rms_error(part, E4M3, scale * 2.0**octave) for octave in range(-6, 7)}
        clipped = {octave: part.share_above(448 * scale * 2.0**octave) for octave in range(-6, 7)}
        assert all(errors[octave] == pytest.approx(errors[0], rel=0.02) for octave in range(1, 7))
        assert all(clipped[octave] == 0 for octave in range(7))
        assert part.share_above(448 * scale * (1 - 2**-10)) > 0  # the calibrated scale is where it starts
        assert 0 < clipped[-1] < clipped[-2] < clipped[-3] < clipped[-6]
        assert errors[-2] > 1.5 * errors[0] and errors[-6] > 0.5


def test_a_scale_of_e2m5_has_no_room_above(observed: KVObservation) -> None:
    """Twice the calibrated one: more values are below an eighth of the largest, where steps are fixed."""
    used = get_format("e2m5")
    for part in (part for pair in observed.layers.values() for part in pair):
        scale = choose_scale(part, used)
        assert relative_rms_error(part, used, 2 * scale) > 1.4 * relative_rms_error(part, used, scale)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_gpu_finds_nearly_the_same_scales(backend: Literal["reference", "triton"], tmp_path: Path) -> None:
    """FP16 activations move each maximum a little; the bits are a CPU's."""
    report = run(CalibrateConfig(device="cuda", backend=backend), tmp_path / "out")
    scales = load_overlay(OVERLAYS, CHECKPOINT, "e4m3")
    assert scales.draft is not None
    for pair, layer in zip((*scales.target, scales.draft), report["layers"].values(), strict=True):
        assert layer["k"]["scale"] == pytest.approx(pair.k, rel=0.03)
        assert layer["v"]["scale"] == pytest.approx(pair.v, rel=0.03)
