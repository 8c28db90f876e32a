"""A calibration from configuration to result folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page4.experiments.calibrate.config import TEXTS, CalibrateConfig
from page4.experiments.calibrate.merge import merged
from page4.experiments.calibrate.report import write_report
from page4.experiments.calibrate.shingles import check_overlap
from page4.experiments.calibrate.state import Observed, load, save
from page4.experiments.calibrate.windows import Window, cut_windows, digest, own_windows
from page4.experiments.info import CHECKPOINT
from page4.experiments.progress import Reporter, Silent
from page4.experiments.prompt_windows import SHIPPED, Text, read_texts
from page4.experiments.result_folder import ResultFolder
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache.overlay import OverlayBase
from page4.model import Qwen4ExpForCausalLM
from page4.model.kv_scales import describe_base
from page4.spec_decode import KVObserver


def run(config: CalibrateConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Observe the windows that are not yet in the folder, and return the content of `report.json`.

    Args:
        config: The calibration.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`,
            `observed.safetensors`, `report.json`, `table.md`, `magnitudes.png` and `provenance.json`.
        progress: Told of every window, in tokens.

    Raises:
        InputError: The checkpoint, the texts, the configuration or the folder cannot be used; the corpus
            overlaps the evaluation texts; or K or V are not finite in FP16.
    """
    config = config.resolve()
    folder = config.model or CHECKPOINT
    base = describe_base(folder)
    inputs = {"checkpoint": hashlib.sha256(json.dumps(base.files, sort_keys=True).encode()).hexdigest()}
    if config.merge:
        observed, sources = merged(config.merge, inputs["checkpoint"])
        about = _about(config, base, {"merged": sources})
        with ResultFolder(out, config, inputs | {"merged": json.dumps(sources)}) as results:
            return _finish(results, config, observed, about)
    texts, corpus = _read_corpus(config, folder)
    windows = cut_windows(config, texts)
    own = own_windows(config, windows)
    if not own:
        raise InputError(f"shard {config.shard} of {config.shards} has none of {len(windows)} windows")
    about = _about(config, base, corpus | {"sha256": digest(windows)})
    with ResultFolder(out, config, inputs | {"corpus": digest(windows)}) as results:
        observed = _observe(config, folder, own, results.path, progress or Silent())
        return _finish(results, config, observed, about)


def _finish(
    results: ResultFolder, config: CalibrateConfig, observed: Observed, about: Mapping[str, Any]
) -> dict[str, Any]:
    report = write_report(results, config, observed, about)
    results.finish()
    return report


def _about(config: CalibrateConfig, base: OverlayBase, corpus: Mapping[str, Any]) -> dict[str, Any]:
    ran = {
        name: getattr(config, name)
        for name in ("device", "backend", "window", "prefill_chunk", "shard", "shards")
    }
    return {"base": dict(base.files), "corpus": dict(corpus), "config": {} if config.merge else ran}


def _read_corpus(config: CalibrateConfig, folder: Path) -> tuple[list[Text], dict[str, Any]]:
    """The corpus, tokenised, and what the report says of it.

    Raises:
        InputError: It cannot be read, or overlaps the evaluation texts.
    """
    tokenizer = load_tokenizer(folder)
    found = read_texts(config.corpus or TEXTS)
    evaluation = {name: text for name, _, text in read_texts(config.prompts or SHIPPED)}
    overlap = check_overlap({name: text for name, _, text in found}, evaluation, config.shingle_words)
    texts = [Text(name, kind, tokenizer.encode(text).ids) for name, kind, text in found]
    return texts, {
        "texts": {text.name: len(text.tokens) for text in texts},
        "overlap": dataclasses.asdict(overlap),
    }


def _observe(
    config: CalibrateConfig, folder: Path, windows: list[Window], out: Path, progress: Reporter
) -> Observed:
    """Run the windows that the folder's state does not have; it is written after each."""
    observed = load(out) or Observed(None, 0, 0, len(windows))
    if not 0 <= observed.windows <= observed.total == len(windows):
        raise InputError(
            f"the state in {out} has {observed.windows} of {observed.total} windows, not of {len(windows)}"
        )
    waiting = windows[observed.windows :]
    progress.start(sum(len(w.tokens) for w in windows), observed.tokens)
    if waiting:
        model = Qwen4ExpForCausalLM.from_pretrained(folder, device=config.device, backend=config.backend)
        observer = KVObserver(model, max(len(window.tokens) for window in waiting), config.prefill_chunk)
    for window in waiting:
        observed = observed.plus(observer.observe(window.tokens), len(window.tokens))
        save(out, observed)
        progress.advance(f"{window.text} from token {window.start}", len(window.tokens))
    return observed
