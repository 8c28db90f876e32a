"""Continue a text with a checkpoint, in any KV format, and say how fast that went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from page4.experiments.checkpoint_digest import checkpoint_digest
from page4.experiments.device import resolve_device
from page4.experiments.info import CHECKPOINT, OVERLAY
from page4.experiments.tokenizer import TextStream, load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, LayerFormats
from page4.kvcache.layer_formats import draft_format
from page4.kvcache.prefix_cache import PrefixConfig
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.model.kv_scales import load_overlay
from page4.spec_decode import (
    DecoderConfig,
    SamplingOptions,
    Served,
    Server,
    SpeculativeDecoder,
    mean_acceptance,
    observe_texts,
    tokens_per_step,
)


@dataclass(frozen=True)
class GenerateConfig:
    """How to continue a text.

    Attributes:
        model: Folder of the checkpoint; the shipped one by default.
        device: auto takes a GPU when there is one.
        backend: `reference` or `triton`; by default what the device has.
        kv_format, draft_kv_format: of the target's and the draft's cache; the draft's is the target's by
            default. The target's may differ by layer: "e4m3,3:fp16" is fp16 in layer 3 and e4m3 elsewhere.
        scales: Static scales: calibrated from the "prompt", the "shipped" checkpoint's overlay, or the folder
            of another.
        allow_unit_target_scales: With an overlay that has no target scales, take 1.0 for all of them.
        num_draft_tokens: K; 0 decodes without speculation.
        max_new_tokens: Tokens to emit at most.
        ignore_eos: Go on after the end-of-text token.
        prefill_chunk: Prompt tokens per step.
        prefix_cache: Folder that keeps the prompt's prefixes for the next run; what it knows is not computed
            again. With static scales they have to be an overlay's: a prompt's own change with it.
        host_gib: Host memory that prefixes pass through on their way from and to the folder, GiB.
        temperature, top_k, top_p, min_p, seed, sample_drafts: See `SamplingOptions`; temperature 0 is greedy.
    """

    model: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    kv_format: str = "fp16"
    draft_kv_format: str | None = None
    scales: Literal["prompt", "shipped"] | Path = "prompt"
    allow_unit_target_scales: bool = False
    num_draft_tokens: int = 3
    max_new_tokens: int = 128
    ignore_eos: bool = False
    prefill_chunk: int = 2048
    prefix_cache: Path | None = None
    host_gib: float = 2.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_drafts: bool = False

    def __post_init__(self) -> None:
        """Refuse what can be refused without the checkpoint."""
        self.sampling()
        self.decoder(prompt_length=1, scales=None)
        self._check_prefix_cache()
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")

    def sampling(self) -> SamplingOptions:
        """The options of the request."""
        return SamplingOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            sample_drafts=self.sample_drafts,
        )

    def decoder(
        self, prompt_length: int, scales: KVScales | None, prefix: PrefixConfig | None = None
    ) -> DecoderConfig:
        """A decoder for this one request."""
        return DecoderConfig(
            kv_format=self.kv_format,
            draft_kv_format=self.draft_kv_format,
            scales=scales,
            num_draft_tokens=self.num_draft_tokens,
            prefill_chunk=self.prefill_chunk,
            max_length=prompt_length + max(1, self.max_new_tokens),
            prefix=prefix,
        )

    def prefix(self, model: str) -> PrefixConfig | None:
        """What is kept of the prompt for later runs with the same model."""
        if self.prefix_cache is None:
            return None
        interval = self.prefill_chunk * max(1, PrefixConfig().interval // self.prefill_chunk)
        return PrefixConfig(interval, host_gib=self.host_gib, folder=self.prefix_cache, model=model)

    def _check_prefix_cache(self) -> None:
        prefix = self.prefix(model="a checkpoint")
        if prefix is None:
            return
        prefix.check_chunk(self.prefill_chunk)
        target = LayerFormats(self.kv_format)
        formats = [*target.distinct, draft_format(target, self.draft_kv_format)]
        static = next((used.name for used in formats if used.needs_scale), None)
        if static is not None and self.scales == "prompt":
            raise InputError(
                f"a prefix cache in {static} needs scales that are the same for all prompts: "
                "use --scales shipped or those of another overlay"
            )


def continue_text(config: GenerateConfig, prompt: str, write: Callable[[str], object]) -> dict[str, Any]:
    """Generate after `prompt`, and hand the text to `write` as it comes.

    Returns:
        The text, its tokens, what was accepted, and times.

    Raises:
        InputError: The checkpoint or the prompt cannot be used.
    """
    folder = config.model or CHECKPOINT
    tokenizer = load_tokenizer(folder)
    tokens: list[int] = tokenizer.encode(prompt).ids
    if not tokens:
        raise InputError("the prompt is empty")
    device = resolve_device(config.device)
    overlaid = None if config.scales == "prompt" else _overlaid(config, folder)
    LayerFormats(config.kv_format).of(Qwen4ExpConfig.from_file(folder / "config.json").qsa_layers)
    model = Qwen4ExpForCausalLM.from_pretrained(folder, device=device, backend=config.backend)
    limit = model.config.max_position_embeddings
    if len(tokens) + config.max_new_tokens > limit:
        raise InputError(
            f"the prompt has {len(tokens)} tokens and {config.max_new_tokens} more are asked for, "
            f"the model's positions end at {limit}"
        )
    scales = overlaid or _calibrated(config, model, tokens)
    prefix = config.prefix(checkpoint_digest(folder)) if config.prefix_cache is not None else None
    decoder = SpeculativeDecoder(model, config.decoder(len(tokens), scales, prefix))
    stream = TextStream(tokenizer)
    pieces: list[str] = []

    def say(text: str) -> None:
        if text:
            pieces.append(text)
            write(text)

    request = Served(
        tokens,
        config.max_new_tokens,
        frozenset() if config.ignore_eos else frozenset({model.config.eos_token_id}),
        config.sampling(),
        on_tokens=lambda request, new: say(stream.add(new)),
    )
    server = Server(decoder)
    try:
        server.submit(request)
        server.run()
    finally:
        if decoder.prefix is not None:
            decoder.prefix.close()
    say(stream.end())
    return _report(config, model, request, server, "".join(pieces))


def _overlaid(config: GenerateConfig, checkpoint: Path) -> KVScales:
    """Static scales from an overlay."""
    folder = OVERLAY if config.scales == "shipped" else Path(config.scales)
    formats = config.kv_format, config.draft_kv_format
    return load_overlay(folder, checkpoint, *formats, config.allow_unit_target_scales)


def _calibrated(config: GenerateConfig, model: Qwen4ExpForCausalLM, tokens: list[int]) -> KVScales | None:
    """Static scales from the prompt, for the formats that need them."""
    target = LayerFormats(config.kv_format)
    draft = draft_format(target, config.draft_kv_format)
    if not any(used.needs_scale for used in (*target.distinct, draft)):
        return None
    observation = observe_texts(model, [tokens], config.prefill_chunk)
    return observation.scales_for(config.kv_format, config.draft_kv_format)


def _report(
    config: GenerateConfig, model: Qwen4ExpForCausalLM, request: Served, server: Server, text: str
) -> dict[str, Any]:
    stats, drafts = server.stats, config.num_draft_tokens
    milliseconds = 1000 * np.asarray(stats.step_seconds)
    decoded = sum(stats.step_seconds)
    return {
        "text": text,
        "tokens": request.tokens,
        "prompt_tokens": len(request.prompt),
        "new_tokens": len(request.tokens),
        "kv_format": config.kv_format,
        "draft_kv_format": draft_format(LayerFormats(config.kv_format), config.draft_kv_format).name,
        "backend": model.backend,
        "device": str(model.device),
        "accepted": request.accepted,
        "acceptance": mean_acceptance(request.accepted, drafts) if drafts and request.accepted else None,
        "tokens_per_step": tokens_per_step(request.accepted) if request.accepted else None,
        "prefill_tokens": stats.prefill_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "step_p50_ms": float(np.quantile(milliseconds, 0.5)) if stats.step_seconds else None,
        "step_p90_ms": float(np.quantile(milliseconds, 0.9)) if stats.step_seconds else None,
        "decode_tokens_per_s": stats.decode_tokens / decoded if decoded else None,
        "prefix": server.decoder.prefix.metrics() if server.decoder.prefix is not None else None,
    }
