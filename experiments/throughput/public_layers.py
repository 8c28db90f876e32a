"""The first layers of the public model at full size, with random weights: for times, not for text."""

from __future__ import annotations

import dataclasses

import torch

from page4.experiments.capacity.geometry import PUBLIC, load_config
from page4.kernels.errors import InputError
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from page4.model.loader import weight_dtype
from page4.model.loading.subset import subset

NGRAM_ROWS = 200_000
"""Rows of an n-gram table, not 20 million: all of them are 102 GB, and a lookup costs about the same."""


def public_config(layers: int) -> Qwen4ExpConfig:
    """The public checkpoint's config with its first `layers` layers and smaller n-gram tables.

    Raises:
        InputError: It has not so many layers.
    """
    config = load_config(PUBLIC)
    if not 1 <= layers <= config.num_hidden_layers:
        raise InputError(f"public_layers is {layers}, the public model has 1 to {config.num_hidden_layers}")
    fewer, _ = subset(config, range(layers))
    return dataclasses.replace(fewer, ngram_vocab_size_base=NGRAM_ROWS)


def random_model(
    config: Qwen4ExpConfig, device: torch.device | str, backend: str | None, seed: int = 0
) -> Qwen4ExpForCausalLM:
    """A model with the initial weights of training, FP16 on a GPU and FP32 on a CPU, made where they stay.

    Raises:
        InputError: The backend cannot run the model here.
    """
    device = torch.device(device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            model = Qwen4ExpForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    tensors = model.state_dict()
    model.load_state_dict(
        {name: tensor.to(weight_dtype(name, tensor, dtype)) for name, tensor in tensors.items()}, assign=True
    )
    model.use_backend(backend)
    return model
