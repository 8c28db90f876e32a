"""The bench of restored prefixes from configuration to result folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from page4.experiments.bench.restore_config import RestoreBenchConfig
from page4.experiments.bench.restore_measure import COLUMNS, KEY, RestoreCase
from page4.experiments.bench.restore_report import write_report
from page4.experiments.checkpoint_digest import checkpoint_digest
from page4.experiments.info import CHECKPOINT
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.experiments.throughput.public_layers import public_config, random_model
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, get_format
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.spec_decode import calibrate_scales

CALIBRATED_TOKENS = 256


def run(config: RestoreBenchConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Measure what is not yet in the folder, and return the content of `summary.json`.

    Args:
        config: The bench.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `restore.csv` (a
            row per format), `summary.json`, `table.md`, `restore.png` and `provenance.json`.
        progress: Told of every format.

    Raises:
        InputError: The checkpoint, the configuration or the folder cannot be used.
    """
    config = config.resolve()
    assert config.backend is not None
    progress = progress or Silent()
    folder = config.model or CHECKPOINT
    layers = config.public_layers
    shape = public_config(layers) if layers else Qwen4ExpConfig.from_file(folder / "config.json")
    if config.max_length > shape.max_position_embeddings:
        raise InputError(
            f"requests of up to {config.max_length} tokens exceed the model's "
            f"{shape.max_position_embeddings} positions: lower length, turns or steps"
        )
    with (
        study_kernels(config.backend, config.kernel_configs, config.device) as kernels,
        ResultFolder(out, config, {**_digests(config, folder), **kernels.digests}) as results,
    ):
        rows = results.samples(COLUMNS, KEY, "restore.csv")
        waiting = [name for name in config.formats if (name,) not in rows]
        progress.start(len(config.formats), len(config.formats) - len(waiting))
        if waiting:
            model = _model(config, shape, folder)
            for name, scales in _scales(model, config, waiting).items():
                rows.add([RestoreCase(model, config, name, scales).run()])
                progress.advance(name)
        summary = write_report(results, config, rows.rows)
        results.finish(**kernels.provenance())
    return summary


def _model(config: RestoreBenchConfig, shape: Qwen4ExpConfig, folder: Path) -> Qwen4ExpForCausalLM:
    if config.public_layers:
        return random_model(shape, config.device, config.backend, config.seed)
    return Qwen4ExpForCausalLM.from_pretrained(folder, device=config.device, backend=config.backend)


def _scales(
    model: Qwen4ExpForCausalLM, config: RestoreBenchConfig, formats: Sequence[str]
) -> dict[str, KVScales | None]:
    """Static scales from random tokens: what is timed does not depend on them."""
    generator = torch.Generator().manual_seed(config.seed)
    count = min(CALIBRATED_TOKENS, config.length)
    tokens = torch.randint(1, model.config.vocab_size, (count,), generator=generator).tolist()
    return {
        name: calibrate_scales(model, [tokens], name) if get_format(name).needs_scale else None
        for name in formats
    }


def _digests(config: RestoreBenchConfig, folder: Path) -> dict[str, str]:
    return {} if config.public_layers else {"checkpoint": checkpoint_digest(folder)}
