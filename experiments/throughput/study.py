"""The throughput study from configuration to result folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from page4.experiments.acceptance.config import Arm
from page4.experiments.checkpoint_digest import checkpoint_digest
from page4.experiments.info import CHECKPOINT
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.plots import format_tokens
from page4.experiments.progress import Reporter, Silent
from page4.experiments.prompt_windows import SHIPPED, Anchor, choose_anchors, cut_prompt, load_texts, nonce
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import SampleStore
from page4.experiments.throughput.config import ThroughputConfig
from page4.experiments.throughput.measure import COLUMNS, KEY, ArmDecoder
from page4.experiments.throughput.public_layers import public_config, random_model
from page4.experiments.throughput.report import write_report
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, LayerFormats
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.spec_decode import observe_texts

_WARM_STEPS = 4


def run(config: ThroughputConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Measure what is not yet in the folder, summarise everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `samples.csv` (a
            row per arm, length and prompt), `summary.json`, `summary.csv`, `table.md`, `throughput.png` and
            `provenance.json`.
        progress: Told of every prompt, in tokens.

    Raises:
        InputError: The checkpoint, the texts, the configuration or the folder cannot be used.
    """
    config = config.resolve()
    folder = config.model or CHECKPOINT
    shape = public_config(config.public_layers) if config.public_layers else _config_of(folder)
    _check_fits(config, shape)
    prompts = _Prompts(config, folder)
    if config.public_layers:
        model = random_model(shape, config.device, config.backend, config.seed)
    else:
        model = Qwen4ExpForCausalLM.from_pretrained(folder, device=config.device, backend=config.backend)
    assert config.backend is not None
    with (
        study_kernels(config.backend, config.kernel_configs, config.device) as kernels,
        ResultFolder(out, config, {**prompts.digests(folder), **kernels.digests}) as results,
    ):
        rows = results.samples(COLUMNS, KEY)
        kept = _measure(config, model, prompts, rows, progress or Silent())
        summary = write_report(results, config, rows.rows)
        results.finish(**kernels.provenance(), **({"prefix": kept} if kept else {}))
    return summary


class _Prompts:
    """The prompts by anchor, arm and length."""

    def __init__(self, config: ThroughputConfig, folder: Path) -> None:
        assert config.lengths is not None and config.num_prompts is not None
        tokenizer = load_tokenizer(folder)
        self._encode = lambda text: list(tokenizer.encode(text).ids)
        self._config = config
        texts = load_texts(config.prompts or SHIPPED, self._encode, config.texts)
        self.anchors = choose_anchors(texts, config.num_prompts, config.lengths[-1], 0, config.seed)
        longest = max(len(self._nonce(anchor, arm)) for anchor in self.anchors for arm in config.all_arms)
        if longest >= config.lengths[0]:
            raise InputError(
                f"a length of {config.lengths[0]} tokens has no room beside a nonce of {longest}"
            )

    def tokens(self, anchor: Anchor, arm: Arm, length: int) -> list[int]:
        return cut_prompt(anchor, length, self._nonce(anchor, arm))

    def warming(self, arm: Arm, length: int) -> list[int]:
        """A prompt that none of the measured ones begins with."""
        nonce_tokens = self._encode(nonce(self._config.seed, f"warming {arm.name}", arm.nonce_id))
        return cut_prompt(self.anchors[0], length, nonce_tokens)

    def digests(self, folder: Path) -> dict[str, str]:
        """SHA-256 of the prompts' texts and, unless weights are random, of the checkpoint's files."""
        texts = sorted({(anchor.text.name, tuple(anchor.text.tokens)) for anchor in self.anchors})
        digests = {"texts": hashlib.sha256(repr(texts).encode()).hexdigest()}
        if not self._config.public_layers:
            digests["checkpoint"] = checkpoint_digest(folder)
        return digests

    def _nonce(self, anchor: Anchor, arm: Arm) -> list[int]:
        return self._encode(nonce(self._config.seed, anchor.id, arm.nonce_id))


def _measure(
    config: ThroughputConfig,
    model: Qwen4ExpForCausalLM,
    prompts: _Prompts,
    rows: SampleStore,
    progress: Reporter,
) -> dict[str, Any]:
    """Every prompt of every length; the arms take turns, and another one begins at every prompt.

    Returns what each arm's first decoder kept of its prompts, of those that keep any: `PrefixCache.metrics`.
    """
    arms = config.all_arms
    places = [(length, i) for length in config.lengths or () for i in range(len(prompts.anchors))]
    done = [place for place in places if _is_done(place, prompts, arms, rows)]
    progress.start(len(arms) * sum(n for n, _ in places), len(arms) * sum(n for n, _ in done))
    if len(done) == len(places):
        return {}
    assert config.builds is not None
    scales = _scales(config, model, prompts)
    builds = [[ArmDecoder(model, config, *arm) for arm in scales] for _ in range(config.builds)]
    warm: set[int] = set()
    for length, i in places:
        if (length, i) in done:
            continue
        anchor, decoders = prompts.anchors[i], builds[i % len(builds)]
        if length not in warm:
            warm.add(length)
            for decoder in decoders:
                decoder.measure(prompts.warming(decoder.arm, length), config.seed, _WARM_STEPS)
        turn = i % len(arms)
        for decoder in decoders[turn:] + decoders[:turn]:
            name = {"arm": decoder.arm.name, "length": length, "text": anchor.text.name, "prompt": anchor.id}
            if (decoder.arm.name, length, anchor.id) in rows:
                continue
            prompt = prompts.tokens(anchor, decoder.arm, length)
            rows.add([name | decoder.measure(prompt, config.seed + i)])
            progress.advance(f"{decoder.arm.name}, {format_tokens(length)} tokens", length)
    caches = {decoder.arm.name: decoder.decoder.prefix for decoder in builds[0]}
    return {arm: cache.metrics() for arm, cache in caches.items() if cache is not None}


def _is_done(place: tuple[int, int], prompts: _Prompts, arms: tuple[Arm, ...], rows: SampleStore) -> bool:
    length, i = place
    return all((arm.name, length, prompts.anchors[i].id) in rows for arm in arms)


def _scales(
    config: ThroughputConfig, model: Qwen4ExpForCausalLM, prompts: _Prompts
) -> list[tuple[Arm, KVScales | None]]:
    """The arms with scales from the prompts' beginnings."""
    assert config.lengths is not None
    shortest, base = config.lengths[0], config.all_arms[0]
    beginnings = [
        prompts.tokens(anchor, base, shortest)[: config.calibration_tokens] for anchor in prompts.anchors
    ]
    observation = observe_texts(model, beginnings, config.prefill_chunk)
    return [(arm, observation.scales_for(arm.target_format, arm.draft_format)) for arm in config.all_arms]


def _config_of(folder: Path) -> Qwen4ExpConfig:
    return Qwen4ExpConfig.from_file(folder / "config.json")


def _check_fits(config: ThroughputConfig, model: Qwen4ExpConfig) -> None:
    """Refuse lengths beyond the model's positions, and formats for layers that it does not have."""
    for arm in config.all_arms:
        LayerFormats(arm.target_format).of(model.qsa_layers)
    if config.max_length > model.max_position_embeddings:
        raise InputError(
            f"{config.lengths[-1] if config.lengths else 0} tokens and up to {config.emits} more exceed the "
            f"model's {model.max_position_embeddings} positions: lower lengths or steps"
        )
