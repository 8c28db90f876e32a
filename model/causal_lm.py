"""The language model: trunk, LM head and MTP head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from page4.kernels.backend import Backend
from page4.kernels.errors import InputError
from page4.kvcache.cache import CacheConfig, HybridCache

from .backend import checked_backend
from .cache_geometry import cache_geometry
from .config import Qwen4ExpConfig
from .decoder import Trunk
from .gated_delta_net import GatedDeltaNet
from .hyper_connection import HyperConnection
from .loader import load_weights
from .loading.names import text_name
from .loading.quantisation import quantisation
from .loading.subset import subset
from .moe import MoE
from .mtp import MTPHead
from .ple import PerLayerEmbedding
from .qsa import QSAttention
from .rows import RowBatch, Segment
from .step import Step


@dataclass(frozen=True)
class CausalLMOutput:
    """Attributes: ``logits [B, T, V]``; ``streams [B, T, S*H]``, the residual before the final mixer."""

    logits: Tensor
    streams: Tensor


_WITH_KERNELS = (QSAttention, GatedDeltaNet, PerLayerEmbedding, MoE, HyperConnection, MTPHead)


class Qwen4ExpForCausalLM(nn.Module):
    """Qwen4Exp text model with its MTP head, under the public checkpoint's tensor names."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.config = config
        self.backend: Backend = "reference"
        self.model = Trunk(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.mtp = MTPHead(config) if config.mtp_num_hidden_layers else None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        backend: str | None = None,
        layers: Sequence[int] | None = None,
    ) -> Self:
        """Load ``config.json`` and safetensors shards, of the text or the multimodal class.

        Weights of 4 and 8 bits are dequantised as they are read, see :func:`page4.model.loader.load_weights`.

        Args:
            folder: a Hugging Face model folder.
            dtype: activations and weights; default FP16 on CUDA (a V100 has no BF16) and FP32 elsewhere.
            device: where the model lives.
            backend: implementation of the hot paths, see :meth:`use_backend`; default ``triton`` on CUDA if
                its kernels can run the model, else ``reference``.
            layers: the layers to load, ascending, for studies of some of them; all by default. Shards that
                hold only others need not be there.
        Raises:
            InputError: a file is missing, truncated, or does not fit the config, or the backend cannot run
                the model here.
        """
        folder = Path(folder)
        device = torch.device(device)
        if dtype is None:
            dtype = torch.float16 if device.type == "cuda" else torch.float32
        config = Qwen4ExpConfig.from_file(folder / "config.json")
        name_of: Callable[[str], str | None] = text_name
        if layers is not None:
            config, name_of = subset(config, layers)
        quantised = quantisation(config.raw)
        checked_backend(backend, config, dtype, device.type)  # before gigabytes are read
        with torch.device("meta"):
            model = cls(config)
        load_weights(model, folder, dtype, device, config.split_ngram_parts, quantised, name_of)
        model.use_backend(backend)
        return model.eval().requires_grad_(False)

    def use_backend(self, name: str | None) -> None:
        """Runs the hot paths on ``reference`` (PyTorch) or ``triton`` kernels; see ``page4.kernels.backend``.

        None chooses as :meth:`from_pretrained` does.

        Raises:
            InputError: no such backend, or it cannot run here, or not this model.
        """
        backend = checked_backend(name, self.config, self.dtype, self.device.type)
        self.backend = backend
        for module in self.modules():
            if isinstance(module, _WITH_KERNELS):
                module.backend = backend

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.model.embed_tokens.weight.dtype

    def new_cache(self, cache: CacheConfig) -> HybridCache:
        """An empty cache with the geometry of this model."""
        geometry = cache_geometry(self.config)
        return HybridCache(geometry, cache, activation_dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward_rows(self, batch: RowBatch, cache: HybridCache) -> Tensor:
        """Residual streams ``[N, S*H]`` of a step's rows; their K/V and states enter the cache."""
        return self.model(batch, cache)

    @torch.inference_mode()
    def draft_rows(self, batch: RowBatch, streams: Tensor, cache: HybridCache) -> Tensor:
        """MTP streams ``[N, S*H]``.

        Args:
            batch: row p carries token x_{p+1} at position p.
            streams: ``[N, S*H]`` in the batch's row order: the target's at step 0, then the head's own.
        """
        if self.mtp is None or cache.draft is None:
            raise InputError("this checkpoint has no MTP head: set num_draft_tokens to 0")
        step = Step(batch, self.config, cache.tables)
        embedding = self.model.embed_tokens(batch.token_ids).to(streams.dtype)
        return self.mtp(embedding, streams, step, cache.draft)

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """Target logits ``[N, V]`` of residual streams ``[N, S*H]``."""
        return self.head(self.model.hyper_connection_mixer(streams))

    @torch.inference_mode()
    def draft_logits(self, streams: Tensor) -> Tensor:
        """Draft logits ``[N, V]`` of MTP streams ``[N, S*H]``."""
        assert self.mtp is not None
        return self.head(self.mtp.hyper_connection_mixer(streams))

    def head(self, hidden: Tensor) -> Tensor:
        """The LM head, ``[N, H] -> [N, V]``; the embedding's transpose when the two are tied."""
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """Full forward pass of independent sequences ``[B, T]``, K/V in the activations' own dtype."""
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise InputError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, tokens]")
        batch_size, length = input_ids.shape
        cache = self.new_cache(
            CacheConfig.unquantised(
                self.dtype, max_requests=batch_size, max_tokens=batch_size * (length + 16)
            )
        )
        segments = []
        for ids in input_ids:
            request = cache.open()
            cache.reserve(request, length)
            segments.append(Segment(request, 0, ids, self.preceding(ids, 0), decode=False))
        streams = self.forward_rows(RowBatch.pack(segments, self.device), cache)
        logits = self.logits(streams)
        shape = (batch_size, length, -1)
        return CausalLMOutput(logits.view(shape), streams.view(shape))

    def preceding(self, token_ids: Tensor | list[int], position: int) -> tuple[int, ...]:
        """The n-gram context of ``position``: the tokens before it, EOS where the text had not begun."""
        width = self.config.ngram_size - 1
        before = [int(t) for t in token_ids[max(0, position - width) : position]]
        return (self.config.eos_token_id,) * (width - len(before)) + tuple(before)
