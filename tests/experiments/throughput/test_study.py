"""`page4 throughput`: what it measures, compares and keeps."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments.cli import run as run_command
from page4.experiments.samples import Row
from page4.experiments.throughput import ThroughputConfig, measure, run, study
from page4.experiments.throughput.measure import COLUMNS
from page4.experiments.throughput.public_layers import public_config, random_model
from page4.experiments.throughput.report import plot_throughput, read_found, table
from page4.experiments.throughput.summary import figures
from page4.kernels.errors import InputError
from page4.model import Qwen4ExpConfig
from page4.spec_decode.decode_step import StepShape
from page4.spec_decode.step_runner import StepRunner
from tests.experiments.acceptance.tiny_study import LAYERS, write_checkpoint, write_texts
from tests.experiments.reporters import Interrupter, Recorder
from tests.oracle.tiny import tiny_dict


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ThroughputConfig:
    folder = tmp_path_factory.mktemp("sources")
    return ThroughputConfig(
        arms=(("fp16", "fp16", "fp16", 0), ("e4m3", "e4m3", "e4m3", 0), ("fp16_again", "fp16", "fp16", 1)),
        model=write_checkpoint(folder / "checkpoint"),
        prompts=write_texts(folder / "texts", first=300, second=400),
        device="cpu",
        lengths=(48, 96),
        num_prompts=2,
        steps=3,
        prefill_chunk=64,
        calibration_tokens=40,
        resamples=200,
    )


@pytest.fixture(scope="module")
def finished(
    small: ThroughputConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("throughput") / "out"
    return out, run(small, out)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_per_arm_length_and_prompt(
    small: ThroughputConfig, finished: tuple[Path, dict[str, Any]]
) -> None:
    rows = read(finished[0] / "samples.csv")
    assert len({(row["arm"], row["length"], row["prompt"]) for row in rows}) == len(rows) == 3 * 2 * 2
    for row in rows:
        assert int(row["prefill_tokens"]) == int(row["length"]) - 1, "a decode step takes the last one"
        assert int(row["steps"]) == small.steps
        assert 3 <= int(row["decode_tokens"]) <= 3 * 4
        assert 0 <= int(row["accepted"]) <= int(row["drafted"])
        assert 0 < float(row["step_p50_ms"]) <= float(row["step_p90_ms"])


def test_no_prompt_token_comes_from_a_cache(finished: tuple[Path, dict[str, Any]]) -> None:
    assert finished[1]["reused_tokens"] == 0
    assert "; 0 prompt tokens were found in a cache" in (finished[0] / "table.md").read_text()


def test_the_figure_can_be_drawn_again_from_the_summary(
    small: ThroughputConfig, finished: tuple[Path, dict[str, Any]]
) -> None:
    config = small.resolve()
    found = read_found(finished[0] / "summary.csv")
    assert [figure.to_row() for figure in found.values()] == finished[1]["figures"]
    assert {(figure.arm, figure.against) for figure in found.values()} == {
        ("fp16", None), ("e4m3", "fp16"), ("fp16_again", "fp16"),
    }  # fmt: skip
    assert all((figure.change is None) == (figure.against is None) for figure in found.values())
    figure = plot_throughput(config, found)
    assert [axes.get_title() for axes in figure.axes] == [
        "prefill", "decode", "tokens/step", "MTP acceptance", "step p50", "step p90",
    ]  # fmt: skip


def test_nonces_keep_prompts_from_the_prefixes_that_a_server_keeps(
    small: ThroughputConfig, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    keeping = dataclasses.replace(small, prefill_chunk=16, prefix_interval=16)
    assert run(keeping, tmp_path / "out")["reused_tokens"] == 0
    kept = json.loads((tmp_path / "out" / "provenance.json").read_text())["runs"][-1]["prefix"]
    assert list(kept) == [arm.name for arm in small.all_arms]
    for metrics in kept.values():
        assert metrics["reused_tokens"] == 0 and metrics["pages"]["held"] == 0 and metrics["snapshots"] > 0
    counted = ("arm", "length", "prompt", "decode_tokens", "accepted")
    plain = dataclasses.replace(small, prefill_chunk=16)
    run(plain, tmp_path / "plain")
    rows = [
        [[row[name] for name in counted] for row in read(tmp_path / name / "samples.csv")]
        for name in ("out", "plain")
    ]
    assert rows[0] == rows[1]


def test_a_prompt_that_is_found_in_a_cache_ends_the_study(
    small: ThroughputConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one nonce for all, the second of two equal prompts is found."""
    monkeypatch.setattr(study, "nonce", lambda *of: "The same.\n\n")
    config = dataclasses.replace(small, prefill_chunk=16, prefix_interval=16, num_prompts=1)
    with pytest.raises(RuntimeError, match="tokens of a prompt were found in a cache"):
        run(config, tmp_path / "out")


def test_an_arm_emits_what_it_emits_alone(
    small: ThroughputConfig, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Arms that take turns do not touch each other, and the seed decides every token."""
    run(dataclasses.replace(small, arms=small.arms[:2][::-1]), tmp_path / "out")
    counted = ("decode_tokens", "drafted", "accepted", "repeated_4grams")
    both = [
        {
            (row["arm"], row["length"], row["prompt"]): [row[name] for name in counted]
            for row in read(folder / "samples.csv")
        }
        for folder in (finished[0], tmp_path / "out")
    ]
    assert {key: both[0][key] for key in both[1]} == both[1]


def test_prompts_take_the_decoders_of_an_arm_in_turn(
    small: ThroughputConfig,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[study.ArmDecoder] = []
    measure = study.ArmDecoder.measure

    def spy(self: study.ArmDecoder, *arguments: Any) -> Any:
        used.append(self)
        return measure(self, *arguments)

    monkeypatch.setattr(study.ArmDecoder, "measure", spy)
    run(dataclasses.replace(small, builds=2), tmp_path / "out")
    assert len({id(decoder.decoder.cache) for decoder in used}) == 2 * 3
    counted = ("arm", "length", "prompt", "decode_tokens", "accepted")
    one, two = (
        [[row[name] for name in counted] for row in read(folder / "samples.csv")]
        for folder in (finished[0], tmp_path / "out")
    )
    assert one == two, "decoders differ in nothing but their buffers"


def test_the_same_command_goes_on(small: ThroughputConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(small, out, Interrupter(4))
    first = read(out / "samples.csv")
    assert len(first) == 4
    recorder = Recorder()
    run(small, out, recorder)
    assert read(out / "samples.csv")[:4] == first, "nothing is measured twice"
    assert recorder.before == 3 * 48, "one prompt of three arms was done, another one begun"
    assert recorder.done == recorder.total - 48, "its first arm is not measured again"


def row_of(arm: str, prompt: int, **values: Any) -> Row:
    blank: Row = {name: kind() for name, kind in COLUMNS.items()}
    return blank | {"arm": arm, "length": 48, "prompt": f"p{prompt}"} | values


def synthetic() -> tuple[ThroughputConfig, list[Row]]:
    config = ThroughputConfig(
        arms=(("fp16", "fp16", "fp16", 0), ("e4m3", "e4m3", "e4m3", 0)), lengths=(48,), steps=2, num_prompts=3
    )
    rows = []
    for arm, factors in (("fp16", (1, 1, 1)), ("e4m3", (2, 3, 10))):
        for prompt, factor in enumerate(factors):
            rows.append(
                row_of(
                    arm, prompt, prefill_tokens=60, prefill_seconds=6 / factor, steps=2, decode_tokens=4,
                    decode_seconds=1.0, step_p50_ms=5.0, step_p90_ms=6.0, drafted=10, accepted=factor,
                )
            )  # fmt: skip
    return config, rows


def test_changes_are_medians_of_each_prompts_own_or_of_sums() -> None:
    found = {(f.quantity, f.arm): f for f in figures(*synthetic())}
    assert found["prefill", "fp16"].value.value == 10
    change = found["prefill", "e4m3"].change
    assert change is not None and change.value == pytest.approx(200), "the median of 2, 3 and 10 times"
    assert found["acceptance", "e4m3"].value.value == pytest.approx(15 / 30)
    change = found["acceptance", "e4m3"].change
    assert change is not None and change.value == pytest.approx(400), "15 of 30 against 3 of 30"
    assert found["decode", "e4m3"].value.value == 4
    assert found["tokens_per_step", "e4m3"].value.value == 2


def test_treated_arms_are_compared_with_the_first_of_them_on_the_same_prompts() -> None:
    """Medians of each prompt's own quotient: not the quotient of the changes against the baseline."""
    config, rows = synthetic()
    arms = (*config.arms, ("e2m5", "e2m5", "e2m5", 0), ("fp16_again", "fp16", "fp16", 1))
    config = dataclasses.replace(config, arms=arms, builds=1)
    steps = {"fp16": (5, 5, 5), "e4m3": (4, 8, 10), "e2m5": (8, 6, 11), "fp16_again": (5, 5, 5)}
    samples = [
        next(row for row in rows if row["prompt"] == f"p{prompt}") | {"arm": arm, "step_p50_ms": step}
        for arm, of_arm in steps.items()
        for prompt, step in enumerate(of_arm)
    ]
    found = {figure.key: figure for figure in figures(config, samples)}
    assert {key[1:3] for key in found} == {
        ("fp16", None), ("e4m3", "fp16"), ("e2m5", "fp16"), ("fp16_again", "fp16"), ("e2m5", "e4m3"),
    }  # fmt: skip
    for arm, against, expected in (("e4m3", "fp16", 60), ("e2m5", "fp16", 60), ("e2m5", "e4m3", 10)):
        change = found["step_p50", arm, against, 48].change
        assert change is not None and change.value == pytest.approx(expected)
    text = table(config, found, samples)
    section = text.partition("**e2m5 against e4m3**")[2].partition("\n\n1")[0]
    assert "| 48 | " in section and "| +10.0 % |" in section
    drawn = plot_throughput(config, found).axes[0].get_legend_handles_labels()[1]
    assert drawn == ["e4m3", "e2m5", "fp16_again"], "the figure stays against the baseline"


def test_no_step_is_timed_while_its_shape_is_captured(
    small: ThroughputConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step's shape is captured when it is first met: as it grows, a request meets several.

    Here shapes are padded as there, from short ones on, and what would be captured is noted by decoder.
    """
    captured: set[tuple[StepRunner, StepShape]] = set()
    timed: list[tuple[bool, int]] = []
    timing = [False]
    run_step, time_steps = StepRunner.run, measure.time_steps

    def bucket(self: StepRunner, lanes: int, longest: int) -> tuple[int, int]:
        return lanes, min(max(16, 1 << (longest - 1).bit_length()), self.max_tokens)

    def run_noted(self: StepRunner, lanes: list[int], shape: StepShape) -> torch.Tensor:
        if timing[0]:
            timed.append(((self, shape) in captured, shape.longest))
        self.prepare(shape)
        return run_step(self, lanes, shape)

    def time_noted(*arguments: Any) -> Any:
        timing[0] = True
        try:
            return time_steps(*arguments)
        finally:
            timing[0] = False

    monkeypatch.setattr(StepRunner, "bucket", bucket)
    monkeypatch.setattr(StepRunner, "prepare", lambda self, shape: captured.add((self, shape)))
    monkeypatch.setattr(StepRunner, "run", run_noted)
    monkeypatch.setattr(measure, "time_steps", time_noted)
    run(dataclasses.replace(small, lengths=(48,), steps=16, builds=2), tmp_path / "out")
    assert all(was_captured for was_captured, _ in timed)
    assert {64, 128} <= {longest for _, longest in timed}, "the requests did grow into another shape"


@pytest.mark.parametrize(
    ("settings", "builds"),
    [
        ({"num_prompts": 3, "builds": 16}, 3),
        ({"num_prompts": 16, "builds": 3}, 3),
        ({"builds": 16}, 6),
        (ThroughputConfig.QUICK, 2),
    ],
    ids=str,
)
def test_no_arm_has_more_decoders_than_prompts(settings: dict[str, Any], builds: int) -> None:
    """Others would be named in the table and never used."""
    config = ThroughputConfig(device="cpu", **settings).resolve()
    assert config.builds == builds and config.resolve() == config


@pytest.mark.parametrize(
    ("builds", "words"), [(None, "1 decoder an arm"), (1, "1 decoder an arm"), (2, "2 decoders an arm")]
)
def test_the_table_says_how_many_decoders_an_arm_has(builds: int | None, words: str) -> None:
    """A configuration from before there were several names none."""
    config, rows = synthetic()
    config = dataclasses.replace(config, builds=builds)
    assert words in table(config, {figure.key: figure for figure in figures(config, rows)}, rows)


def test_random_weights_report_times_alone() -> None:
    config, rows = synthetic()
    quantities = {f.quantity for f in figures(dataclasses.replace(config, public_layers=4), rows)}
    assert quantities == {"prefill", "step_p50", "step_p90"}


def test_public_layers_have_the_public_sizes() -> None:
    config = public_config(8)
    assert config.qsa_layers == (3, 7)
    assert (config.hidden_size, config.num_experts, config.vocab_size) == (2560, 512, 248320)
    with pytest.raises(InputError, match="public_layers is 49, the public model has 1 to 48"):
        public_config(49)


def test_a_random_model_is_finite_and_the_seeds() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = [
        random_model(Qwen4ExpConfig.from_dict(tiny_dict(**LAYERS)), "cpu", "reference", seed)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    first, again, other = (model(tokens).logits for model in models)
    assert first.isfinite().all()
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lengths=4,8"], "a length of 4 tokens has no room beside a nonce of"),
        (["public_layers=4", "model=nowhere"], "model and public_layers exclude each other"),
        (["arms=[]"], "arms must be at least one"),
        (["lengths=8,4"], "lengths must be positive and ascending"),
        (["temperature=1e-5"], "temperature is 1e-05, expected 0 (greedy) or 0.0001 to 10000"),
        ([f"seed={2**63}"], "does not fit 64 bits"),
        (["steps=0"], "steps must be at least 1, got 0"),
        (["prefix_interval=100"], "the snapshot interval is 100, expected a multiple of prefill_chunk, 2048"),
    ],
)
def test_bad_settings_get_one_line_and_no_folder(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [part for setting in settings for part in ("--set", setting)]
    assert run_command(["throughput", "--device", "cpu", *options, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists()


def test_the_command_ends_with_the_table(
    small: ThroughputConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    values = {"model": small.model, "prompts": small.prompts, "lengths": 48, "num_prompts": 1, "steps": 1}
    options = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    assert run_command(["throughput", "--device", "cpu", *options, "--json", "--out", str(out)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["samples"] == 4
    assert (out / "throughput.png").exists() and (out / "provenance.json").exists()
