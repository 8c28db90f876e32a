"""The step bench from configuration to result folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page4.experiments.bench.step_config import StepBenchConfig
from page4.experiments.bench.step_measure import COLUMNS, KEY, measure_cell
from page4.experiments.bench.step_report import write_report
from page4.experiments.info import CHECKPOINT
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.progress import Reporter, Silent
from page4.experiments.prompt_windows import SHIPPED, load_texts
from page4.experiments.result_folder import ResultFolder
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, get_format
from page4.model import Qwen4ExpForCausalLM
from page4.model.loader import shards
from page4.spec_decode import calibrate_scales

CALIBRATED_TOKENS = 512
CALIBRATED_TEXTS = 4


def run(config: StepBenchConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Measure what is not yet in the folder, and return the content of `summary.json`.

    Args:
        config: The bench.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `step.csv` (a row
            per length, batch and format), `summary.json`, `table.md`, `step.png` and `provenance.json`.
        progress: Told of every cell.

    Raises:
        InputError: The checkpoint, the texts, the configuration or the folder cannot be used.
    """
    config = config.resolve()
    assert config.backend is not None and config.lengths is not None and config.batches is not None
    progress = progress or Silent()
    folder = config.model or CHECKPOINT
    tokenizer = load_tokenizer(folder)
    found = load_texts(config.texts or SHIPPED, lambda text: list(tokenizer.encode(text).ids))
    texts = [text.tokens for text in found]
    if max(config.lengths) > max(map(len, texts)):
        raise InputError(
            f"the longest text has {max(map(len, texts))} tokens, {max(config.lengths)} are asked for"
        )
    model = Qwen4ExpForCausalLM.from_pretrained(folder, device=config.device, backend=config.backend)
    limit = model.config.max_position_embeddings
    if max(config.lengths) + config.tokens_emitted > limit:
        raise InputError(
            f"{max(config.lengths)} tokens and up to {config.tokens_emitted} more exceed the model's "
            f"{limit} positions: lower lengths, turns or steps"
        )
    cells = [(length, batch) for length in config.lengths for batch in config.batches]
    with (
        study_kernels(config.backend, config.kernel_configs, config.device) as kernels,
        ResultFolder(out, config, inputs={**_digests(folder, texts), **kernels.digests}) as results,
    ):
        rows = results.samples(COLUMNS, KEY, "step.csv")
        waiting = [cell for cell in cells if (*cell, config.formats[0]) not in rows]
        progress.start(len(cells), len(cells) - len(waiting))
        scales = _scales(model, config, texts)
        for length, batch in waiting:
            rows.add(measure_cell(model, config, windows(texts, length, batch, config.seed), scales))
            progress.advance(f"{batch} x {length} tokens")
        summary = write_report(results, rows.rows)
        results.finish(**kernels.provenance())
    return summary


def windows(texts: Sequence[Sequence[int]], length: int, count: int, seed: int) -> list[list[int]]:
    """`count` windows of `length` tokens, taken from the texts in turn, each at a place of its own."""
    long = [text for text in texts if len(text) >= length]
    found = []
    for i in range(count):
        text = long[(i + seed) % len(long)]
        places = len(text) - length + 1
        start = (seed + i // len(long) * max(1, places // -(-count // len(long)))) % places
        found.append(list(text[start : start + length]))
    return found


def _scales(
    model: Qwen4ExpForCausalLM, config: StepBenchConfig, texts: Sequence[Sequence[int]]
) -> dict[str, KVScales | None]:
    beginnings = [text[:CALIBRATED_TOKENS] for text in texts[:CALIBRATED_TEXTS]]
    return {
        name: calibrate_scales(model, beginnings, name) if get_format(name).needs_scale else None
        for name in config.formats
    }


def _digests(folder: Path, texts: Sequence[Sequence[int]]) -> dict[str, str]:
    checkpoint = hashlib.sha256()
    for file in (folder / "config.json", folder / "tokenizer.json", *shards(folder)):
        checkpoint.update(hashlib.sha256(file.read_bytes()).digest())
    return {
        "checkpoint": checkpoint.hexdigest(),
        "texts": hashlib.sha256(repr(texts).encode()).hexdigest(),
    }
