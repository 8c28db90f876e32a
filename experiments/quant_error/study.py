"""The study of quantisation errors from configuration to result folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from page4.experiments.calibrate.windows import digest
from page4.experiments.info import CHECKPOINT
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.plots import format_tokens
from page4.experiments.progress import Reporter, Silent
from page4.experiments.quant_error.config import QuantErrorConfig
from page4.experiments.quant_error.measure import KEY, LAYER_COLUMNS, LOGIT_COLUMNS, Measurer
from page4.experiments.quant_error.prompts import Prompts, calibration_windows
from page4.experiments.quant_error.report import write_report
from page4.experiments.quant_error.scales import arm_scales
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row, SampleStore
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.errors import InputError
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.model.kv_scales import describe_base


def run(config: QuantErrorConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Measure what is not yet in the folder, summarise everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `samples.csv`,
            `logits.csv`, `observed.safetensors`, `scales.json`, `summary.json`, `summary.csv`, `table.md`,
            five figures and `provenance.json`.
        progress: Told of every prompt, in tokens that pass through the model.

    Raises:
        InputError: The checkpoint, the texts, the configuration or the folder cannot be used.
    """
    config = config.resolve()
    assert config.backend is not None and config.dtype is not None
    folder = config.model or CHECKPOINT
    _check_length(config, Qwen4ExpConfig.from_file(folder / "config.json"))
    tokenizer = load_tokenizer(folder)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    prompts = Prompts(config, encode)
    windows = calibration_windows(config, prompts.anchors, encode)
    files = json.dumps(describe_base(folder).files, sort_keys=True)
    inputs = {
        "checkpoint": hashlib.sha256(files.encode()).hexdigest(),
        "texts": prompts.digest(),
        "corpus": digest(windows),
    }
    model = Qwen4ExpForCausalLM.from_pretrained(
        folder, getattr(torch, config.dtype), config.device, config.backend
    )
    with (
        study_kernels(config.backend, config.kernel_configs, config.device) as kernels,
        ResultFolder(out, config, inputs | dict(kernels.digests)) as results,
    ):
        scales = arm_scales(config, model, windows, results)
        layers = results.samples(LAYER_COLUMNS, KEY)
        logits = results.samples(LOGIT_COLUMNS, KEY, "logits.csv")
        measurer = Measurer(model, config, prompts, scales)
        _measure(config, prompts, measurer, layers, logits, progress or Silent())
        summary = write_report(results, config, layers.rows, logits.rows)
        results.finish(**kernels.provenance())
    return summary


def _measure(
    config: QuantErrorConfig,
    prompts: Prompts,
    measurer: Measurer,
    layers: SampleStore,
    logits: SampleStore,
    progress: Reporter,
) -> None:
    """Run every prompt at every length that is not in both files yet."""
    assert config.lengths is not None
    cells = [(length, index) for length in config.lengths for index in range(len(prompts.anchors))]
    done = [_cells(store) for store in (layers, logits)]
    for store in (layers, logits):  # an interrupt between the two files leaves a prompt in one of them
        store.remove(lambda row: _cell(row) not in done[0] & done[1])
    waiting = [(n, i) for n, i in cells if (n, prompts.anchors[i].id) not in done[0] & done[1]]
    passes = 1 + len(config.arms)
    progress.start(
        passes * sum(length for length, _ in cells),
        passes * (sum(length for length, _ in cells) - sum(length for length, _ in waiting)),
    )
    for length, index in waiting:
        layer_rows, logit_rows = measurer.measure(index, length)
        layers.add(layer_rows)
        logits.add(logit_rows)
        progress.advance(
            f"{prompts.anchors[index].id}, {format_tokens(length)} tokens, {len(config.arms)} arms",
            passes * length,
        )


def _cells(store: SampleStore) -> set[tuple[int, str]]:
    return {_cell(row) for row in store.rows}


def _cell(row: Row) -> tuple[int, str]:
    return row["length"], row["prompt"]


def _check_length(config: QuantErrorConfig, model: Qwen4ExpConfig) -> None:
    assert config.lengths is not None
    if config.lengths[-1] > model.max_position_embeddings:
        raise InputError(
            f"a length of {config.lengths[-1]} tokens exceeds the model's {model.max_position_embeddings} "
            "positions"
        )
