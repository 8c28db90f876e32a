"""A run trains, stops, goes on, and exports a checkpoint that the model loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from page4.experiments.corpus.pack import PackedData, SourceSpan, save
from page4.experiments.training.config import Phase, TrainConfig
from page4.experiments.training.evaluation import Evaluator
from page4.experiments.training.loop import Trainer, evaluation_sizes, train
from page4.experiments.training.sequence import SequenceModel
from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed tokens of a text that repeats a few words, so that a few steps already help."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 40, 24_000).astype(np.uint16)
    texts = {f"first/{i}": rng.integers(1, 40, 400).astype(np.uint16) for i in range(2)}
    spans = (SourceSpan("first", "prose", 0, 12_000), SourceSpan("second", "code", 12_000, 24_000))
    folder = tmp_path_factory.mktemp("packed")
    save(PackedData(tokens, spans, texts, {"second/a": texts["first/1"]}), folder, workers=1)
    return folder


def _config(data: Path, folder: Path, **changes: object) -> TrainConfig:
    base = TrainConfig(
        data=data,
        out=folder / "out",
        state=folder / "state.pt",
        device="cpu",
        model_size="tiny",
        total_steps=12,
        tokens_per_step=512,
        chain_rows=32,
        warmup_steps=2,
        rollout_sequences=4,
        rollout_prefix=24,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = _config(data, tmp_path_factory.mktemp("run"))
    assert train(config, log=lambda _: None).finished
    return config


def test_the_loss_starts_at_a_uniform_guess_and_falls(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(_config(data, tmp_path), log=lambda _: None)
    phase = Phase(1.0, 64)
    trainer._set_trainable(phase)
    losses = []
    for _ in range(8):
        losses.append(trainer._step(phase)[0].item())
        trainer.progress.step += 1
    assert losses[0] == pytest.approx(np.log(4096), abs=0.1)
    assert losses[-1] < losses[0] - 0.3


def test_the_exported_checkpoint_loads_and_gives_the_same_logits(finished: TrainConfig) -> None:
    trainer = Trainer(finished, log=lambda _: None)
    assert trainer.resume()
    ids = torch.randint(1, 40, (1, 100))
    hidden, _ = SequenceModel(trainer.model, torch.float32).trunk(trainer.sequence.begin(ids, sparse=True))
    loaded = Qwen4ExpForCausalLM.from_pretrained(finished.out)
    torch.testing.assert_close(
        loaded(ids).logits[0], trainer.model.head(hidden).detach(), rtol=1e-2, atol=2e-2
    )


def test_resuming_gives_what_one_call_gives(data: Path, finished: TrainConfig, tmp_path: Path) -> None:
    """Stopped after every step and started again, on the same data and seeds."""
    config = _config(data, tmp_path, call_seconds=1e-9)
    for _ in range(finished.total_steps or 0):
        trainer = Trainer(config, log=lambda _: None)
        trainer.resume()
        phase = next(p for p in config.schedule if trainer.fraction < p.until)
        trainer._set_trainable(phase)
        trainer._step(phase)
        trainer.progress.step += 1
        trainer.save()
    ours = torch.load(config.state, weights_only=True)["model"]
    theirs = torch.load(finished.state, weights_only=True)["model"]
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_draft_phases_leave_the_trunk_alone(finished: TrainConfig) -> None:
    trainer = Trainer(finished, log=lambda _: None)
    trainer.resume()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    phase = Phase(1.0, 64, "rollout")
    trainer._set_trainable(phase)
    trainer.progress.step = 10
    trainer._step(phase)
    changed = {name for name, value in trainer.model.state_dict().items() if not value.equal(before[name])}
    assert changed and all(name.startswith("mtp.") for name in changed)


def test_evaluation_is_written_beside_the_checkpoint(finished: TrainConfig) -> None:
    trainer = Trainer(finished, log=lambda _: None)
    trainer.resume()
    trainer.evaluate(evaluation_sizes(finished))
    results = json.loads((finished.out / "eval.json").read_text())
    assert set(results) >= {"held_out", "train", "acceptance_64", "loss_by_context", "loss_by_position"}
    assert 0 <= results["acceptance_64"]["greedy"]["mean"] <= 1


def test_one_sample_has_no_standard_error(finished: TrainConfig) -> None:
    """None, which JSON has, and not a NaN, which it has not."""
    trainer = Trainer(finished, log=lambda _: None)
    evaluator = Evaluator(trainer.sequence, evaluation_sizes(finished), trainer.device, trainer.autocast)
    text = {"a": torch.randint(1, 40, (150,))}
    accepted = [evaluator.acceptance(text, 64, count)["greedy"]["se"] for count in (1, 2)]
    assert accepted[0] is None and accepted[1] >= 0
    losses = [evaluator.loss_by_context({"a": text["a"][:n]}, 32) for n in (150, 130)]
    assert [found["windows"] for found in losses] == [1, 1]
    assert all(found["se_of_change"] == {"128": None} for found in losses)


def test_a_call_removes_what_a_killed_one_was_writing(data: Path, tmp_path: Path) -> None:
    """Beside states of other runs in the same folder, which may be running."""
    config = _config(data, tmp_path)
    for name in (".state.partial-0123abcd.pt", ".other.partial-0123abcd.pt"):
        (tmp_path / name).write_bytes(b"half")
    assert not Trainer(config, log=lambda _: None).resume()
    assert {file.name for file in tmp_path.iterdir()} == {".other.partial-0123abcd.pt"}


def test_a_required_state_that_is_missing_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training state"):
        train(_config(data, tmp_path, require_state=True), log=lambda _: None)


def test_a_folder_without_packed_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no packed corpus"):
        train(_config(tmp_path / "nothing", tmp_path), log=lambda _: None)
