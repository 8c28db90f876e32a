"""The acceptance study from configuration to result folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from page4.experiments.acceptance.cells import Cell, plan_cells
from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.measure import (
    CHECK_COLUMNS,
    GENERATION_COLUMNS,
    ROUND_COLUMNS,
    Measurer,
    rerun_rows,
)
from page4.experiments.acceptance.prompts import Prompts
from page4.experiments.acceptance.report import write_report
from page4.experiments.acceptance.scales import ScalesByFormat, overlay_scales, study_scales
from page4.experiments.info import CHECKPOINT
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.plots import format_tokens
from page4.experiments.progress import Reporter, Silent
from page4.experiments.prompt_windows import Encode
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row, SampleStore
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache import LayerFormats
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.model.loader import shards


def run(config: AcceptanceConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Measure what is not yet in the folder, summarise everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `samples.csv`,
            `generation.csv`, `checks.csv`, `scales.json`, `summary.json`, `summary.csv`, `table.md`, three
            figures and `provenance.json`.
        progress: Told of every cell, in tokens.

    Raises:
        InputError: The checkpoint, the texts, the configuration or the folder cannot be used.
    """
    config = config.resolve()
    assert config.backend is not None
    folder = config.model or CHECKPOINT
    check_fits(config, Qwen4ExpConfig.from_file(folder / "config.json"))
    prompts = Prompts.choose(config, load_encoder(folder))
    overlaid = None if config.scales == "prompts" else overlay_scales(config, folder)
    model = Qwen4ExpForCausalLM.from_pretrained(folder, device=config.device, backend=config.backend)
    with (
        study_kernels(config.backend, config.kernel_configs, config.device) as kernels,
        ResultFolder(out, config, {**study_digests(folder, prompts, overlaid), **kernels.digests}) as results,
    ):
        scales = study_scales(config, model, prompts.beginnings(), overlaid, results)
        measurer = Measurer(model, config, prompts, scales)
        stores = _Stores(results)
        _measure(plan_cells(config), measurer, stores, progress or Silent())
        rounds, generations, checks = stores.rounds.rows, stores.generations.rows, stores.checks.rows
        summary = write_report(results, config, rounds, generations, checks)
        results.finish(**kernels.provenance())
    return summary


def load_encoder(folder: Path) -> Encode:
    """Text -> token ids by the `tokenizer.json` of a checkpoint.

    Raises:
        InputError: No tokenizer there, or an unreadable one.
    """
    tokenizer = load_tokenizer(folder)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


class _Stores:
    def __init__(self, results: ResultFolder) -> None:
        self.rounds = results.samples(ROUND_COLUMNS, ("arm", "length", "prompt", "round"))
        self.generations = results.samples(GENERATION_COLUMNS, ("arm", "length", "prompt"), "generation.csv")
        self.checks = results.samples(CHECK_COLUMNS, ("check", "arm", "prompt"), "checks.csv")


def _measure(cells: Sequence[Cell], measurer: Measurer, stores: _Stores, progress: Reporter) -> None:
    """Run every cell that has no rows yet, and compare the first ones with another pass over them."""
    measures: dict[str, tuple[Callable[[Cell], list[Row]], SampleStore]] = {
        "rounds": (measurer.rounds, stores.rounds),
        "generation": (measurer.generation, stores.generations),
        "check": (measurer.check, stores.checks),
    }
    waiting = [cell for cell in cells if measurer.key(cell) not in measures[cell.kind][1]]
    total = sum(cell.tokens for cell in cells)
    progress.start(total, total - sum(cell.tokens for cell in waiting))
    # The last cell may be there and the comparison, which comes after it, not yet.
    compared = all(key in stores.checks for key in measurer.rerun_keys(cells))
    if not waiting and compared:
        return
    first = measurer.first_pass(cells)
    for cell in waiting:
        measure, store = measures[cell.kind]
        store.add(measure(cell))
        progress.advance(f"{cell.arm.name}, {format_tokens(cell.length)} tokens, {cell.kind}", cell.tokens)
    stores.checks.add(
        row
        for row in rerun_rows(first, stores.rounds.rows)
        if ("rerun", row["arm"], row["prompt"]) not in stores.checks
    )


def check_fits(config: AcceptanceConfig, model: Qwen4ExpConfig) -> None:
    """Refuse lengths beyond the model's positions, and formats for layers that it does not have."""
    for arm in config.all_arms:
        LayerFormats(arm.target_format).of(model.qsa_layers)
    limit = model.max_position_embeddings
    if config.max_length > limit:
        assert config.lengths is not None
        room = config.max_length - config.lengths[-1]
        raise InputError(
            f"a length of {config.lengths[-1]} tokens and {room} more for rounds and generation exceed the "
            f"model's {limit} positions; the longest length possible is {max(limit - room, 0)}"
        )


def study_digests(folder: Path, prompts: Prompts, overlaid: ScalesByFormat | None) -> dict[str, str]:
    """SHA-256 of the checkpoint's files, of the texts' tokens, and of an overlay's scales."""
    checkpoint = hashlib.sha256()
    for file in (folder / "config.json", folder / "tokenizer.json", *shards(folder)):
        checkpoint.update(hashlib.sha256(file.read_bytes()).digest())
    texts = hashlib.sha256()
    for name, tokens in sorted({a.text.name: a.text.tokens for a in prompts.anchors}.items()):
        texts.update(repr((name, tokens)).encode())
    digests = {"checkpoint": checkpoint.hexdigest(), "texts": texts.hexdigest()}
    if overlaid is not None:
        digests["scales"] = hashlib.sha256(repr(sorted(overlaid.items())).encode()).hexdigest()
    return digests
