"""The training loop: schedule, progress, resuming, export."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from page4.experiments.atomic import remove_leftovers, write_json
from page4.experiments.corpus.pack import PackedData, load
from page4.experiments.device import resolve_device
from page4.experiments.training.checkpoint import export, load_state, save_state
from page4.experiments.training.compiled import set_compile
from page4.experiments.training.config import Phase, TrainConfig
from page4.experiments.training.data import WindowSampler
from page4.experiments.training.evaluation import EvaluationConfig, Evaluator, Texts, evaluate
from page4.experiments.training.losses import batch_losses, sample_rows, total_loss
from page4.experiments.training.optimiser import Optimiser
from page4.experiments.training.rollout import rollouts
from page4.experiments.training.sequence import SequenceModel
from page4.kernels.errors import InputError
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM

REPORT_EVERY = 50
SAVE_SECONDS = 150.0
VALIDATE_SECONDS = 100.0
# Steps at the start of a phase that compile or tune; they do not count as training time.
UNCOUNTED_STEPS = 3
EMBEDDING_STD = 0.02


@dataclass
class Progress:
    """How far a run has come; part of the state file."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    phase_tokens: dict[str, int] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class TrainResult:
    """Where a call stopped: ``finished`` says whether the schedule is complete."""

    finished: bool
    step: int
    tokens: int
    out: Path


class Trainer:
    """One run; :meth:`train` may be called again by a later process with the same state file."""

    def __init__(self, config: TrainConfig, log: Callable[[str], None]) -> None:
        self.config, self.log = config, log
        self.device = resolve_device(config.device)
        cuda = self.device.type == "cuda"
        self.data: PackedData = load(config.data)
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(config.seed)
        self.model = build_model(config.model).to(self.device)
        self.sequence = SequenceModel(self.model, torch.bfloat16 if cuda else torch.float32)
        self.optimiser = Optimiser(self.model, config, fused=cuda)
        self.sampler = WindowSampler(self.data, config.seed).to(self.device)
        # The head's own phases read the text once more; that is not an epoch of the trunk.
        self.draft_sampler = WindowSampler(self.data, config.seed + 1, max_epochs=math.inf).to(self.device)
        self.generator = torch.Generator(device=self.device).manual_seed(config.seed)
        self.progress = Progress()
        self.pool: Tensor | None = None
        self.pool_left = 0
        set_compile(config.compile and cuda)
        if cuda:
            torch._dynamo.config.recompile_limit = 64

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 on a GPU, nothing on a CPU."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @property
    def fraction(self) -> float:
        """Share of the schedule that is done."""
        if self.config.total_steps is not None:
            return self.progress.step / self.config.total_steps
        return self.progress.seconds / self.config.total_seconds

    def resume(self) -> bool:
        """Continues from the state file where there is one; removes what a killed call was writing."""
        path = self.config.state
        if path.parent.is_dir():
            remove_leftovers(path.parent, of=path)
        if not path.exists():
            if self.config.require_state:
                raise InputError(
                    f"{path}: no training state there, and require_state forbids starting afresh"
                )
            return False
        state = load_state(path, self.device)
        if state["config"] != self.config.model:
            raise InputError(f"{path}: this state belongs to a model of another size")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.sampler.load_state_dict(state["sampler"])
        self.draft_sampler.load_state_dict(state["draft_sampler"])
        self.generator.set_state(state["generator"].cpu())
        self.progress = Progress(**state["progress"])
        self.pool, self.pool_left = state["pool"], state["pool_left"]
        return True

    def save(self) -> None:
        """Writes the state file."""
        save_state(
            {
                "config": self.config.model,
                "model": self.model.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "sampler": self.sampler.state_dict(),
                "draft_sampler": self.draft_sampler.state_dict(),
                "generator": self.generator.get_state(),
                "progress": vars(self.progress),
                "pool": self.pool,
                "pool_left": self.pool_left,
            },
            self.config.state,
        )

    def export(self) -> None:
        """Writes the checkpoint and the log of the run."""
        export(self.model, self.config.model, self.config.data / "tokenizer.json", self.config.out)
        record = {**vars(self.progress), "epochs": self.sampler.epochs(), "fraction": round(self.fraction, 4)}
        write_json(self.config.out / "train_log.json", record)

    def train(self, call_start: float) -> TrainResult:
        """Steps until the schedule or the call's time is over, then saves and exports."""
        config, progress = self.config, self.progress
        phase: Phase | None = None
        in_phase = 0
        pending: list[Tensor] = []
        saved = validated = mark = time.monotonic()
        marked_tokens = progress.tokens
        while self.fraction < 1 and time.monotonic() - call_start < config.call_seconds:
            started = time.monotonic()
            current = next(p for p in config.schedule if self.fraction < p.until)
            if current != phase:
                phase, in_phase, pending = current, 0, []
                self._set_trainable(phase)
                self.log(f"phase {phase} at {self.fraction:.3f}")
                mark, marked_tokens = started, progress.tokens
            pending.append(self._step(phase))
            progress.step += 1
            in_phase += 1
            tokens = self._windows(phase) * phase.context
            progress.tokens += tokens
            key = f"{phase.context}:{phase.mode}"
            progress.phase_tokens[key] = progress.phase_tokens.get(key, 0) + tokens
            if in_phase <= UNCOUNTED_STEPS:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.log(f"  step {progress.step} took {time.monotonic() - started:.2f} s")
                mark, marked_tokens = time.monotonic(), progress.tokens
            else:
                progress.seconds += time.monotonic() - started
            if progress.step % REPORT_EVERY == 0:
                self._report(phase, pending, progress.tokens - marked_tokens, time.monotonic() - mark)
                pending, mark, marked_tokens = [], time.monotonic(), progress.tokens
            if time.monotonic() - validated > VALIDATE_SECONDS:
                self._validate()
                validated = mark = time.monotonic()
                marked_tokens = progress.tokens
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        finished = self.fraction >= 1
        self._validate()
        self.save()
        self.export()
        outcome = "finished" if finished else "stopped"
        self.log(f"{outcome} at step {progress.step}, {progress.tokens / 1e6:.1f} M tokens")
        return TrainResult(finished, progress.step, progress.tokens, config.out)

    def evaluate(self, sizes: EvaluationConfig) -> dict[str, Any]:
        """Evaluates on the held-out texts and writes ``eval.json`` beside the checkpoint."""
        former = set_compile(False)
        evaluator = Evaluator(self.sequence, sizes, self.device, self.autocast)
        parameters = sum(p.numel() for p in self.model.parameters())
        head: dict[str, Any] = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "parameters": parameters,
        }
        head |= {"phase_tokens": self.progress.phase_tokens, "epochs": self.sampler.epochs()}

        def save(results: dict[str, Any]) -> None:
            write_json(self.config.out / "eval.json", {**head, **results})
            name, value = list(results.items())[-1]
            self.log(f"{name}: {json.dumps(value)}")

        try:
            return evaluate(evaluator, _texts(self.data.held_out), self._training_texts(), save)
        finally:
            set_compile(former)

    def _training_texts(self) -> Texts:
        """Parts of the training stream from the sources of the held-out texts."""
        texts = {}
        for span in self.data.spans:
            if any(name.startswith(span.name + "/") for name in self.data.held_out):
                texts[span.name] = _tensor(self.data.train[span.start : span.end])
        return texts

    def _windows(self, phase: Phase) -> int:
        return max(1, self.config.tokens_per_step // phase.context)

    def _set_trainable(self, phase: Phase) -> None:
        joint = phase.mode == "joint"
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(joint or (name.startswith("mtp.") and "indexer" not in name))

    def _learning_rate(self, phase: Phase) -> float:
        """Factor of all learning rates: warm-up, constant, linear to zero; draft phases decay anew."""
        fraction, schedule = self.fraction, self.config.schedule
        joint_end = max(p.until for p in schedule if p.mode == "joint")
        if phase.mode == "joint":
            warm = min(1.0, (self.progress.step + 1) / self.config.warmup_steps)
            start = self.config.decay_from
            return warm * (
                1.0 if fraction < start else max(0.01, (joint_end - fraction) / (joint_end - start))
            )
        return self.config.draft_learning_rate * max(0.02, (1 - fraction) / (1 - joint_end))

    def _batch(self, phase: Phase) -> Tensor:
        config = self.config
        ahead = config.num_drafts + 1
        weights = config.long_source_weights if phase.context >= 32768 else config.source_weights
        if phase.mode == "joint":
            return self.sampler.draw(self._windows(phase), phase.context, ahead, weights)
        if phase.mode == "draft":
            return self.draft_sampler.draw(
                self._windows(phase), phase.context, ahead, config.long_source_weights
            )
        return self._rollout_batch(phase, ahead)

    def _rollout_batch(self, phase: Phase, ahead: int) -> Tensor:
        """Sequences that end in the model's own tokens, decoded anew every ``rollout_reuse`` steps."""
        config = self.config
        total = phase.context + ahead
        if self.pool is None or self.pool_left == 0 or self.pool.shape[1] != total:
            prefix_length = min(config.rollout_prefix, phase.context // 2)
            weights = config.long_source_weights
            prefix = self.draft_sampler.draw(config.rollout_sequences, prefix_length, 0, weights)
            temperature = torch.arange(prefix.shape[0], device=self.device) % 3 * 0.35
            former = set_compile(False)
            with self.autocast():
                self.pool = rollouts(self.sequence, prefix, total, temperature)
            set_compile(former)
            self.pool_left = config.rollout_reuse
        self.pool_left -= 1
        picks = torch.randint(
            0, self.pool.shape[0], (self._windows(phase),), device=self.device, generator=self.generator
        )
        return self.pool[picks]

    def _step(self, phase: Phase) -> Tensor:
        """One optimiser step; returns its losses, still on the device."""
        config = self.config
        window = self._batch(phase)
        joint = phase.mode == "joint"
        sampled = sample_rows(phase.context, window.shape[0], config, joint, self.generator, self.device)
        with self.autocast():
            losses = batch_losses(self.sequence, window, phase, config, sampled)
        total_loss(losses, phase, config).backward()
        self.optimiser.step(self._learning_rate(phase))
        return torch.cat(
            [losses.text[None], losses.drafts, losses.balance[None], losses.index[None]]
        ).detach()

    def _report(self, phase: Phase, pending: list[Tensor], tokens: int, seconds: float) -> None:
        text, *drafts, balance, index = torch.stack(pending).mean(0).tolist()
        progress = self.progress
        line = (
            f"step {progress.step} {self.fraction:.3f} {progress.seconds:.0f} s {progress.tokens / 1e6:.1f} M"
            f" {tokens / max(seconds, 1e-9) / 1e3:.0f} k/s T {phase.context} {phase.mode} text {text:.3f}"
            f" drafts {' '.join(f'{d:.3f}' for d in drafts)} balance {balance:.2f} index {index:.3f}"
        )
        if self.device.type == "cuda":
            line += f" {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB"
        self.log(line)
        progress.history.append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "context": phase.context,
                "mode": phase.mode,
                "text": round(text, 4),
                "drafts": [round(d, 4) for d in drafts],
            }
        )
        if not all(map(math.isfinite, [text, *drafts])):
            raise InputError(f"the loss is not finite at step {progress.step}: lower the learning rate")

    @torch.no_grad()
    def _validate(self) -> None:
        """Losses and greedy acceptance on the validation texts, with the compiled functions off."""
        context = min(2048, max(64, self.config.tokens_per_step // 8))
        texts = {name: text for name, text in _texts(self.data.validation).items() if len(text) > context + 1}
        if not texts:
            return
        count = 96 if self.device.type == "cuda" else 4
        sizes = EvaluationConfig(
            tokens=65536,
            windows=6 if count > 4 else 1,
            loss_context=context,
            num_drafts=self.config.num_drafts,
        )
        former = set_compile(False)
        evaluator = Evaluator(self.sequence, sizes, self.device, self.autocast)
        loss = evaluator.text_loss(texts)
        accepted = evaluator.acceptance(texts, min(context, 1024), count)
        set_compile(former)
        entry = {"step": self.progress.step, "validation": loss["mean"]}
        if accepted["prefixes"]:
            entry |= {"greedy": accepted["greedy"], "sampled": accepted["sampled"]}
        self.progress.history.append(entry)
        self.log(f"  validation {json.dumps(entry)}  {loss['by_text']}")


def build_model(config: dict[str, Any]) -> Qwen4ExpForCausalLM:
    """A freshly initialised model in FP32.

    A tied head reads the embedding, which starts small: the first loss is then that of a uniform guess.
    """
    model = Qwen4ExpForCausalLM(Qwen4ExpConfig.from_dict(config))
    nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    return model


def train(config: TrainConfig, log: Callable[[str], None] = print) -> TrainResult:
    """Trains, or goes on training, and exports the checkpoint; evaluates it when the schedule is complete.

    Raises:
        InputError: unreadable data or state, a loss that is not finite, or fla-core missing on a GPU.
    """
    start = time.monotonic()

    def stamped(text: str) -> None:
        log(f"[{time.monotonic() - start:6.1f}] {text}")

    trainer = Trainer(config, stamped)
    resumed = trainer.resume()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    stamped(
        f"{parameters:,} parameters, {len(trainer.data.train):,} training tokens, {trainer.device}, "
        f"{'resumed at step ' + str(trainer.progress.step) if resumed else 'from scratch'}"
    )
    result = trainer.train(start)
    if config.evaluate and result.finished:
        trainer.evaluate(evaluation_sizes(config))
    return result


def evaluation_sizes(config: TrainConfig) -> EvaluationConfig:
    """The shipped evaluation, or a tiny one for a tiny model."""
    if config.model_size == "small":
        return EvaluationConfig(num_drafts=config.num_drafts)
    return EvaluationConfig(
        tokens=1024,
        windows=1,
        loss_context=64,
        contexts=(64, 128),
        edges=(0, 64, 128),
        max_windows=4,
        prefixes=((64, 4), (128, 4)),
        num_drafts=config.num_drafts,
    )


def _tensor(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def _texts(texts: dict[str, Any]) -> Texts:
    return {name: _tensor(tokens) for name, tokens in texts.items()}
