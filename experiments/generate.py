"""Continue a text with a checkpoint, in any KV format, and say how fast that went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from page4.experiments.checkpoint_digest import checkpoint_digest
from page4.experiments.config import config_to_dict
from page4.experiments.device import resolve_device
from page4.experiments.generate_config import GenerateConfig
from page4.experiments.info import CHECKPOINT, overlay_folder
from page4.experiments.progress import Reporter, Silent
from page4.experiments.tokenizer import TextStream, load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache import KVScales
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.model.kv_scales import load_overlay
from page4.spec_decode import (
    Served,
    Server,
    SpeculativeDecoder,
    mean_acceptance,
    observe_texts,
    tokens_per_step,
)


def continue_text(
    config: GenerateConfig,
    prompt: str,
    write: Callable[[str], object],
    progress: Reporter | None = None,
) -> dict[str, Any]:
    """Generate after `prompt`, and hand the text to `write` as it comes.

    Args:
        config: How.
        prompt: The text to continue.
        write: Takes the new text in pieces.
        progress: Told of the prompt, in tokens, until the first piece is there.

    Returns:
        The text, its tokens, what was accepted, formats, where scales come from, and times.

    Raises:
        InputError: The checkpoint, the overlay or the prompt cannot be used.
    """
    progress = progress or Silent()
    config = config.resolve()
    folder = config.model or CHECKPOINT
    tokenizer = load_tokenizer(folder)
    tokens: list[int] = tokenizer.encode(prompt).ids
    if not tokens:
        raise InputError("the prompt is empty")
    device = resolve_device(config.device)
    config.target.of(Qwen4ExpConfig.from_file(folder / "config.json").qsa_layers)
    overlaid = None if config.scales == "prompt" else _overlaid(config, folder)
    progress.advance("loading the checkpoint", 0)
    model = Qwen4ExpForCausalLM.from_pretrained(folder, device=device, backend=config.backend)
    limit = model.config.max_position_embeddings
    if len(tokens) + config.max_new_tokens > limit:
        raise InputError(
            f"the prompt has {len(tokens)} tokens and {config.max_new_tokens} more are asked for, "
            f"the model's positions end at {limit}"
        )
    scales = overlaid
    if scales is None and config.static_formats:
        progress.advance("calibrating scales", 0)
        scales = _calibrated(config, model, tokens)
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
        _read_prompt(server, request, progress)
        server.run()
    finally:
        if decoder.prefix is not None:
            decoder.prefix.close()
    say(stream.end())
    return _report(config, model, request, server, "".join(pieces))


def _read_prompt(server: Server, request: Served, progress: Reporter) -> None:
    """Steps until the request has tokens; what a prefix cache knows of the prompt is read at once."""
    done = 0
    progress.advance("reading the prompt", 0)
    progress.start(len(request.prompt) - 1)
    while server.busy and not request.tokens:
        server.step()
        reused = server.decoder.prefix.stats.reused_tokens if server.decoder.prefix is not None else 0
        before, done = done, server.stats.prefill_tokens + reused
        progress.advance(steps=done - before)


def _overlaid(config: GenerateConfig, checkpoint: Path) -> KVScales:
    """Static scales from overlays."""
    assert config.scales is not None
    folder, formats = overlay_folder(config.scales), (config.kv_format, config.draft_kv_format)
    return load_overlay(folder, checkpoint, *formats, config.allow_unit_target_scales)


def _calibrated(config: GenerateConfig, model: Qwen4ExpForCausalLM, tokens: list[int]) -> KVScales | None:
    """Static scales from the prompt."""
    observation = observe_texts(model, [tokens], config.prefill_chunk)
    return observation.scales_for(config.target.text, config.draft_kv_format)


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
        "draft_kv_format": config.draft.name,
        "scales": config_to_dict(config)["scales"] if config.static_formats else None,
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
