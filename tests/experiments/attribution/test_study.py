"""The study end to end on a tiny model: what its arms store, how it resumes, what it refuses."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from page4.experiments.acceptance.cells import plan_cells
from page4.experiments.acceptance.config import Arm
from page4.experiments.acceptance.metrics import Metric, Metrics
from page4.experiments.acceptance.prompts import Prompts
from page4.experiments.acceptance.study import load_encoder
from page4.experiments.attribution import AttributionConfig, measure, run
from page4.experiments.attribution.arms import GROUPS, Condition
from page4.experiments.attribution.calibration import Calibration
from page4.experiments.attribution.measure import Measurer
from page4.experiments.attribution.summary import costs_nothing
from page4.experiments.attribution.treatments import FrozenChoice
from page4.experiments.cli import run as command
from page4.experiments.statistics import Estimate
from page4.kernels.codecs import decode_kv
from page4.kernels.errors import InputError
from page4.kvcache.intervention import hadamard
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import Request, SpeculativeDecoder
from tests.experiments.reporters import Interrupter

FILES = {
    "config.yaml",
    "inputs.json",
    "samples.csv",
    "calibration.json",
    "summary.json",
    "summary.csv",
    "table.md",
    "effects.png",
    "provenance.json",
}
ARMS = [
    "fp16", "fp16_again", "e4m3",
    "e4m3_target", "e4m3_draft", "e4m3_layer1", "e4m3_not_layer1", "e4m3_layer2", "e4m3_not_layer2",
    "noise_layer", "noise_value",
    "e4m3_x0.25", "e4m3_x0.5", "e4m3_x2", "e4m3_x8", "e4m3_x64", "e4m3_draft_x0.5", "e4m3_draft_x2",
    "e4m3_frozen",
    "e5m2", "e3m4", "e2m5", "int8",
    "e4m3_per_head", "e4m3_rotated", "e2m5_per_head", "e2m5_rotated", "e2m5_mse",
]  # fmt: skip


def tiny(checkpoint: Path, texts: Path, **changes: Any) -> AttributionConfig:
    """Sparse from 20 tokens on, so that choices of blocks differ."""
    values: dict[str, Any] = {
        "model": checkpoint,
        "prompts": texts,
        "device": "cpu",
        "lengths": (64, 96),
        "num_prompts": 6,
        "rounds_per_prompt": 2,
        "round_stride": 5,
        "batch_size": 6,
        "prefill_chunk": 64,
        "calibration_tokens": 40,
        "resamples": 200,
    }
    return AttributionConfig(**(values | changes))


class Watched(SpeculativeDecoder):
    """Remembers what its last request stored of 64 tokens: K and V of the target's sparse layers, FP32."""

    made: ClassVar[list[Watched]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)

    def close(self, request: Request) -> None:
        self.stored = [
            decode_kv(values, layer.format.name) * scale
            for layer in self.cache.qsa
            for values, scale in zip(
                layer.stored(request.row, 64), (layer.k_scale, layer.v_scale), strict=True
            )
        ]
        super().close(request)


Finished = tuple[Path, dict[str, Any], dict[str, list[Tensor]]]


@pytest.fixture(scope="module")
def finished(checkpoint: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Folder, summary, and what each arm stored."""
    out = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SpeculativeDecoder", Watched)
        summary = run(tiny(checkpoint, texts), out)
    shorter = Watched.made[: len(ARMS) + 1]  # a frozen choice is recorded by a decoder before its own
    names = [name for name in ARMS if name != "e4m3_frozen"]
    names.insert(ARMS.index("e4m3_frozen"), "recording")
    names.insert(ARMS.index("e4m3_frozen") + 1, "e4m3_frozen")
    return out, summary, {name: made.stored for name, made in zip(names, shorter, strict=True)}


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "samples.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def accepted(out: Path) -> dict[str, list[int]]:
    """Accepted drafts of every arm, in one order of lengths, prompts and rounds."""
    found: dict[str, list[int]] = {}
    for row in sorted(rows(out), key=lambda row: (int(row["length"]), row["prompt"], int(row["round"]))):
        found.setdefault(row["arm"], []).append(int(row["accepted"]))
    return found


def test_the_folder_holds_every_promised_file_and_every_arm(finished: Finished) -> None:
    out, summary, _ = finished
    assert {file.name for file in out.iterdir()} - {".lock"} == FILES
    assert json.loads((out / "summary.json").read_text()) == summary
    assert list(summary["arms"]) == list(json.loads((out / "calibration.json").read_text())) == ARMS
    seen = Counter((row["arm"], row["length"]) for row in rows(out))
    assert seen == {(arm, length): 6 * 2 for arm in ARMS for length in ("64", "96")}
    table = (out / "table.md").read_text(encoding="utf-8")
    assert all(f"| {arm} |" in table for arm in ARMS)


def test_effects_are_what_the_samples_say(finished: Finished) -> None:
    out = finished[0]
    counts = accepted(out)
    with (out / "summary.csv").open(encoding="utf-8", newline="") as file:
        metrics = [row for row in csv.DictReader(file) if row["length"] == "all"]
    found = {(m["metric"], m["arm"]): float(m["value"]) for m in metrics}
    drafted = 3 * len(counts["fp16"])
    by_format = sum(a != b for a, b in zip(counts["e4m3"], counts["fp16"], strict=True))
    for arm in ARMS[1:]:
        difference = 100 * (sum(counts[arm]) - sum(counts["fp16"])) / drafted
        assert found["acceptance_difference", arm] == pytest.approx(difference)
        changed = sum(a != b for a, b in zip(counts[arm], counts["fp16"], strict=True))
        assert found["changed_rounds", arm] == pytest.approx(100 * changed / len(counts[arm]))
        if arm != "e4m3":
            more = 100 * (changed - by_format) / len(counts[arm])
            assert found["changed_rounds_to_format", arm] == pytest.approx(more, abs=1e-9)
    for arm in ("noise_layer", "noise_value", "e4m3_frozen"):
        difference = 100 * (sum(counts[arm]) - sum(counts["e4m3"])) / drafted
        assert found["difference_to_format", arm] == pytest.approx(difference)


def errors(stored: dict[str, list[Tensor]], part: int) -> dict[str, float]:
    """RMS of what arms stored against FP16: K or V of the first sparse layer, then of the second."""
    base = stored["fp16"][part]
    return {name: float((tensors[part] - base).square().mean().sqrt()) for name, tensors in stored.items()}


@pytest.mark.parametrize("part", [0, 1], ids=["k", "v"])
def test_the_first_layer_stores_what_each_arm_says(finished: Finished, part: int) -> None:
    """Its input is the same in all arms, so that all of its error is its own.

    Errors of formats are in the ratios of their steps; noise was matched on the prompts' beginnings, and is
    drawn for 64 tokens of 2 x 32 values, so a tenth is 9 standard errors of its deviation.
    """
    found = errors(finished[2], part)
    exact = {"fp16", "recording", "e4m3_draft", "e4m3_layer2", "e4m3_not_layer1"}
    assert {name for name, error in found.items() if error == 0} == exact
    e4m3 = found["e4m3"]
    for name in ("e4m3_target", "e4m3_layer1", "e4m3_not_layer2", "e4m3_frozen", "e4m3_draft_x2"):
        assert found[name] == e4m3
    for name in ("noise_layer", "noise_value"):
        assert found[name] == pytest.approx(e4m3, rel=0.1)
    assert found["e4m3_x2"] == pytest.approx(e4m3, rel=0.01)  # a power of two in an exponent with room
    assert found["e4m3_x0.25"] > found["e4m3_x0.5"] > 1.5 * e4m3
    assert found["e5m2"] == pytest.approx(2 * e4m3, rel=0.15)
    assert found["e3m4"] == pytest.approx(e4m3 / 2, rel=0.15)
    assert found["e2m5_mse"] < 1.1 * found["e2m5"] < found["e3m4"]


def test_errors_reach_the_second_layer_through_the_first(finished: Finished) -> None:
    found = errors(finished[2], part=2)
    assert found["e4m3_layer1"] > 0 and found["e4m3_draft"] == 0
    assert found["e4m3"] > found["e4m3_layer2"] > 0


def test_a_rotated_k_is_stored_rotated_and_v_as_it_was(finished: Finished) -> None:
    stored = finished[2]
    k, v, *_ = stored["e4m3_rotated"]
    back = k @ hadamard(k.shape[-1]).float()
    exact, whole = stored["fp16"], errors(stored, 0)["e4m3"]
    assert not torch.allclose(k, exact[0], atol=4 * whole)
    assert float((back - exact[0]).square().mean().sqrt()) == pytest.approx(whole, rel=0.3)
    assert torch.equal(v, stored["e4m3"][1])


def test_a_frozen_choice_in_fp16_changes_nothing(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    """Recorded and replayed over the same steps, it is the run itself."""
    conditions = [
        Condition(Arm("fp16", "fp16", "fp16", 0), "control", ""),
        Condition(Arm("frozen", "fp16", "fp16", 0), "choice", "", FrozenChoice()),
    ]
    config = tiny(checkpoint, texts, lengths=(96,), num_prompts=3).resolve()
    measured = config.rounds(conditions)
    prompts = Prompts.choose(measured, load_encoder(checkpoint))
    model = Qwen4ExpForCausalLM.from_pretrained(checkpoint, backend="reference")
    calibration = Calibration(model, prompts.beginnings(), config.prefill_chunk)
    numbers = {"fp16": {"scales": None}, "frozen": {"scales": None}}
    measurer = Measurer(model, measured, conditions, prompts, calibration, numbers)
    free, frozen = (measurer.rounds(cell) for cell in plan_cells(measured))
    assert [row["accepted"] for row in free] == [row["accepted"] for row in frozen]
    assert {row["arm"] for row in frozen} == {"frozen"}


def test_an_interrupted_study_resumes_to_the_same_result(
    checkpoint: Path, texts: Path, tmp_path: Path, finished: Finished
) -> None:
    """Noise included: it follows from the cell and not from what was measured before it."""
    config = tiny(checkpoint, texts, groups=("noise",))
    run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", Interrupter(after=3))
    assert 0 < len(rows(tmp_path / "out")) < len(rows(tmp_path / "whole"))
    run(config, tmp_path / "out")
    assert accepted(tmp_path / "out") == accepted(tmp_path / "whole")
    shared = accepted(finished[0])
    assert all(shared[arm] == counts for arm, counts in accepted(tmp_path / "out").items())


def test_numbers_in_the_folder_are_used_again_or_refused(
    checkpoint: Path, texts: Path, tmp_path: Path, finished: Finished
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    numbers = json.loads((out / "calibration.json").read_text())
    run(tiny(checkpoint, texts), out)
    assert json.loads((out / "calibration.json").read_text()) == numbers
    numbers["e4m3"]["scales"]["draft"]["k"] = -1.0
    (out / "calibration.json").write_text(json.dumps(numbers))
    with pytest.raises(InputError, match="does not hold the numbers of all arms: k_scale"):
        run(tiny(checkpoint, texts), out)
    del numbers["noise_layer"]["rounding"]
    (out / "calibration.json").write_text(json.dumps(numbers | {"e4m3": numbers["e4m3_x2"]}))
    with pytest.raises(InputError, match="does not hold the numbers of all arms: 'rounding'"):
        run(tiny(checkpoint, texts), out)


def test_another_format_is_attributed_in_the_same_way() -> None:
    config = AttributionConfig(kv_format="e5m2", groups=("place", "formats"))
    names = [condition.arm.name for condition in config.conditions((3, 7))]
    assert names[:5] == ["fp16", "fp16_again", "e5m2", "e5m2_target", "e5m2_draft"]
    assert "e4m3" in names and names.count("e5m2") == 1 and not any("noise" in name for name in names)


@pytest.mark.parametrize("layers", [(), (3,), (3, 7), (0, 1, 2, 3)])
def test_every_layer_is_tried_alone_and_left_out_once(layers: tuple[int, ...]) -> None:
    """One layer alone is the whole target, which is an arm already."""
    conditions = AttributionConfig(groups=("place",)).conditions(layers)
    targets = [condition.arm.target_format for condition in conditions]
    for layer in layers if len(layers) > 1 else ():
        assert targets.count(f"fp16,{layer}:e4m3") == targets.count(f"e4m3,{layer}:fp16") == 1
    assert len({condition.arm.name for condition in conditions}) == len(conditions)
    assert len({condition.arm.formats for condition in conditions}) == len(conditions) - 1  # the A/A arm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "fp16"}, "kv_format fp16 has no static scales to study"),
        ({"kv_format": "int8"}, "kv_format int8 has no static scales to study"),
        ({"kv_format": "fp8"}, "KV format 'fp8' is unknown"),
        ({"groups": ("place", "luck")}, f"groups must name some of {', '.join(GROUPS)}"),
        ({"groups": ("place", "place")}, "none twice; got place, place"),
        ({"lengths": (96, 48)}, "lengths must be positive and ascending"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be 1 to 7"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"rounds_per_prompt": 0}, "rounds_per_prompt must be at least 1"),
        ({"confidence": 1.0}, "confidence must lie between 0 and 1"),
    ],
)
def test_bad_settings_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        AttributionConfig(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_ends_with_a_line_for_bad_input(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["attribution", "--out", str(tmp_path / "out"), "--set", f"model={checkpoint}"]
    assert command([*arguments, "--format", "int8"]) == 2
    assert capsys.readouterr().err.startswith("page4: kv_format int8 has no static scales")
    assert command([*arguments, "--device", "cpu", "--set", "lengths=99999"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("page4: a length of 99999 tokens") and captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def change(low: float, value: float, clusters: int = 40, length: int = 64) -> Metric:
    estimate = Estimate(value, low, value + 1, clusters)
    return Metric("acceptance_change", "arm", length, "all", None, "percent", estimate)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([(-1.9, -0.9), (-0.5, 0.2)], True),
        ([(-1.9, -1.1), (-0.5, 0.2)], False),
        ([(-0.5, 0.2), (-2.0, -0.9)], False),
        ([(math.nan, 0.0), (-0.5, 0.2)], None),
    ],
)
def test_a_format_costs_nothing_if_no_length_loses(
    found: list[tuple[float, float]], verdict: bool | None
) -> None:
    config = AttributionConfig(device="cpu", lengths=(64, 96), rounds_per_prompt=10)
    measured = config.rounds(config.conditions(()))
    metrics = [
        change(low, value, length=length) for length, (low, value) in zip((64, 96), found, strict=True)
    ]
    assert costs_nothing(measured, Metrics(metrics), "arm") is verdict
    few = [change(low, value, 39, length) for length, (low, value) in zip((64, 96), found, strict=True)]
    assert costs_nothing(measured, Metrics(few), "arm") is None
