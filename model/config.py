"""Qwen4Exp text configuration, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from page4.kernels.errors import InputError

LayerType = Literal["linear_attention", "qsa_attention"]

# Exports spell the sparse layers in three ways; all mean QSA when the indexer fields are set.
_QSA_SPELLINGS = ("full_attention", "qwen_sparse_attention", "indexed_attention", "qsa_attention")

# Smallest value of an integer field; 1 for those not listed.
_LEAST = {"eos_token_id": 0, "seed": 0, "mtp_num_hidden_layers": 0, "hc_count": 2, "ngram_size": 2}


@dataclass(frozen=True)
class Qwen4ExpConfig:
    """Everything the text model needs; field names are those of the public ``config.json``.

    ``layer_types`` is normalised to ``linear_attention`` / ``qsa_attention``, ``rope_theta`` and
    ``partial_rotary_factor`` are lifted out of ``rope_parameters``, ``ple_layer_ids`` stay one-indexed as
    published. Source: the config of Qwen3.8-Flash-Next (``model_type`` ``qwen4_exp_text``).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    rope_theta: float
    partial_rotary_factor: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    ple_layer_ids: tuple[int, ...]
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    eos_token_id: int
    max_position_embeddings: int
    seed: int = 1234
    rms_norm_eps: float = 1e-6
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    mtp_num_hidden_layers: int = 1
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head; the rest of the head carries no position."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def block_topk(self) -> int:
        """Complete 4-token blocks a query may read."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def stream_size(self) -> int:
        """Width of the residual stack: ``hc_count`` streams of ``hidden_size``."""
        return self.hc_count * self.hidden_size

    @property
    def qsa_layers(self) -> tuple[int, ...]:
        """Indices of the QSA layers of the target."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "qsa_attention")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_type(f.name, str(f.type), getattr(self, f.name))
        checks: list[tuple[bool, str]] = [
            (
                len(self.layer_types) == self.num_hidden_layers,
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers",
            ),
            (
                self.num_attention_heads % self.num_key_value_heads == 0,
                "num_attention_heads must be a multiple of num_key_value_heads",
            ),
            (
                self.linear_num_value_heads % self.linear_num_key_heads == 0,
                "linear_num_value_heads must be a multiple of linear_num_key_heads",
            ),
            (
                self.indexer_budget % self.indexer_compress_ratio == 0,
                "indexer_budget must be a multiple of indexer_compress_ratio",
            ),
            (
                16 % self.indexer_compress_ratio == 0,
                f"indexer_compress_ratio {self.indexer_compress_ratio} does not divide the 16-token page",
            ),
            (
                self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.indexer_head_dim,
                f"rotary dimension {self.rotary_dim} must be even and at most indexer_head_dim "
                f"{self.indexer_head_dim}",
            ),
            (
                self.ple_embed_dim % ((self.ngram_size - 1) * self.heads_per_ngram) == 0,
                "ple_embed_dim must be a multiple of (ngram_size - 1) * heads_per_ngram",
            ),
            (
                all(
                    1 <= i <= self.num_hidden_layers and self.layer_types[i - 1] == "linear_attention"
                    for i in self.ple_layer_ids
                ),
                "ple_layer_ids are one-indexed and must name linear_attention layers",
            ),
            (self.mtp_num_hidden_layers in (0, 1), "mtp_num_hidden_layers must be 0 or 1"),
            (
                0 < self.num_experts_per_tok <= self.num_experts,
                "num_experts_per_tok must be between 1 and num_experts",
            ),
        ]
        for holds, message in checks:
            if not holds:
                raise InputError(f"config: {message}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Qwen4ExpConfig:
        """Build from the contents of a ``config.json``, of the text model or of the multimodal wrapper.

        Raises:
            InputError: a field is missing or inconsistent; the message names it.
        """
        text = _mapping("text_config", values.get("text_config")) or values
        kind = text.get("model_type", "qwen4_exp_text")
        if kind not in ("qwen4_exp_text", "qwen4_exp"):
            raise InputError(f"config: model_type is {kind!r}, expected 'qwen4_exp' or 'qwen4_exp_text'")
        if text.get("output_gate_type", "sigmoid") != "sigmoid":
            raise InputError(f"config: output_gate_type is {text['output_gate_type']!r}, expected 'sigmoid'")
        if text.get("indexer_kv_heads", 1) != 1:
            raise InputError(f"config: indexer_kv_heads is {text['indexer_kv_heads']}, expected 1")
        fields = [f for f in dataclasses.fields(cls) if f.name != "raw"]
        known = {f.name: text[f.name] for f in fields if text.get(f.name) is not None}
        rope = _mapping("rope_parameters", text.get("rope_parameters"))
        known |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        known["layer_types"] = _layer_types(text)
        known["ple_layer_ids"] = tuple(sorted(set(_list("ple_layer_ids", text.get("ple_layer_ids"), int))))
        if isinstance(known.get("eos_token_id"), list):
            # The first of several is the one that cuts n-gram contexts.
            known["eos_token_id"] = next(iter(known["eos_token_id"]), None)
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and known.get(f.name) is None]
        if missing:
            raise InputError(f"config: missing {', '.join(missing)}")
        return cls(**known, raw=dict(values))

    @classmethod
    def from_file(cls, path: Path) -> Qwen4ExpConfig:
        """Read ``config.json``.

        Raises:
            InputError: the file is missing, is not JSON, or does not describe a Qwen4Exp text model.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(values, dict):
            raise InputError(f"{path}: expected a JSON object")
        return cls.from_dict(values)


def _check_type(name: str, kind: str, value: object) -> None:
    """Refuses a number that is none, or is out of the range of its field."""
    if kind == "int":
        least = _LEAST.get(name, 1)
        if type(value) is not int or value < least:
            raise InputError(f"config: {name} is {value!r}, expected an integer of at least {least}")
    elif kind == "float":
        number = type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type,operator]
        if not number:
            raise InputError(f"config: {name} is {value!r}, expected a number above 0")
    elif kind == "bool" and type(value) is not bool:
        raise InputError(f"config: {name} is {value!r}, expected true or false")


def _mapping(name: str, value: object) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    if value is not None and not isinstance(value, dict):
        raise InputError(f"config: {name} is {value!r}, expected a JSON object")
    return value or {}


def _list(name: str, value: object, kind: type) -> tuple[Any, ...]:
    """A JSON array whose entries have one type; empty where there is none."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or any(type(entry) is not kind for entry in value):
        raise InputError(f"config: {name} is {value!r}, expected a list of {kind.__name__}")
    return tuple(value)


def _layer_types(text: dict[str, Any]) -> tuple[LayerType, ...]:
    """The kind of every layer, in our spelling; every fourth is QSA unless the config says otherwise."""
    layers = _list("layer_types", text.get("layer_types"), str)
    if not layers and "num_hidden_layers" in text:
        every = text.get("full_attention_interval", 4)
        _check_type("num_hidden_layers", "int", text["num_hidden_layers"])
        _check_type("full_attention_interval", "int", every)
        layers = tuple(
            "full_attention" if (i + 1) % every == 0 else "linear_attention"
            for i in range(text["num_hidden_layers"])
        )
    for kind in layers:
        if kind not in _QSA_SPELLINGS and kind != "linear_attention":
            raise InputError(
                f"config: layer type {kind!r} is unknown, expected 'linear_attention' or 'full_attention'"
            )
    return tuple("qsa_attention" if kind in _QSA_SPELLINGS else "linear_attention" for kind in layers)
