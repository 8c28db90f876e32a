"""Settings of a training run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.kernels.errors import InputError

# A checkpoint of at most 20 M parameters: 40 MB in fp16.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "dtype": "float16",
    "hidden_act": "silu",
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 27,
    "ple_layer_ids": [2],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 10_007,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 1,
    "seed": 1234,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}

# The same shape at toy size, for the CPU.
TINY: dict[str, Any] = {
    **MODEL,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "head_dim": 32,
    "indexer_n_heads": 2,
    "indexer_head_dim": 32,
    "indexer_budget": 32,
    "rope_parameters": {**MODEL["rope_parameters"], "mrope_section": [3, 3, 2]},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 101,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Phase:
    """A stretch of the schedule.

    Attributes:
        until: fraction of the run at which it ends.
        context: tokens of a training window.
        mode: ``joint`` trains everything on text; ``draft`` trains the MTP head alone, on the trunk's
            distributions over text; ``rollout`` likewise over the model's own continuations of text.
        sparse: QSA block selection as at inference; else causal attention (the indexer learns either way).
        draft_target: what the MTP head predicts in joint mode, the ``text`` or the ``trunk``'s distribution.
    """

    until: float
    context: int
    mode: Literal["joint", "draft", "rollout"] = "joint"
    sparse: bool = True
    draft_target: Literal["text", "trunk"] = "trunk"


# Context grows, then the head catches up with a trunk that no longer moves.
SCHEDULE: tuple[Phase, ...] = (
    Phase(0.08, 2048, draft_target="text"),
    Phase(0.44, 2048),
    Phase(0.60, 8192, sparse=False),
    Phase(0.73, 32768, sparse=False),
    Phase(0.80, 32768),
    Phase(0.88, 8192, "draft"),
    Phase(0.96, 512, "rollout"),
    Phase(1.00, 32768, "draft"),
)


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    The schedule advances by training time (``total_seconds``) or, where ``total_steps`` is set, by steps. A
    run may be cut into calls of ``call_seconds``: the next call goes on from the state file.

    Attributes:
        data: folder of packed tokens with its ``tokenizer.json``.
        out: folder of the exported checkpoint.
        state: full training state, kept between calls.
        require_state: refuse to start from scratch.
        tokens_per_step: tokens of a batch.
        chain_rows: rows of a batch from which drafts 2 and 3 are trained.
        learning_rate: of Muon, for matrices; Adam's rates are ``adam_*``.
        mtp_weight: of the MTP losses in joint training.
        off_policy_weight: in draft modes, weight of rows whose text the trunk would not have chosen itself.
        hard_weight: in draft modes, weight of the cross-entropy against the trunk's most likely token.
        source_weights: how often a genre is drawn, relative to its size.
        long_source_weights: the same for windows of 32k tokens.
    """

    QUICK: ClassVar[dict[str, Any]] = {
        "model_size": "tiny",
        "total_steps": 8,
        "tokens_per_step": 512,
        "chain_rows": 64,
    }

    data: Path = Path(".cache/packed")
    out: Path = Path("runs/train")
    state: Path = Path("runs/train/state.pt")
    require_state: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = True
    model_size: Literal["small", "tiny"] = "small"
    seed: int = 0
    total_seconds: float = 720.0
    total_steps: int | None = None
    call_seconds: float = 1e9
    tokens_per_step: int = 65536
    chain_rows: int = 8192
    num_drafts: int = 3
    warmup_steps: int = 60
    decay_from: float = 0.4
    learning_rate: float = 0.02
    weight_decay: float = 0.1
    adam_embedding: float = 0.003
    adam_ngram: float = 0.01
    adam_small: float = 0.003
    mtp_weight: float = 0.7
    balance_weight: float = 0.01
    index_weight: float = 0.3
    draft_learning_rate: float = 0.3
    off_policy_weight: float = 0.3
    hard_weight: float = 0.3
    rollout_sequences: int = 2048
    rollout_prefix: int = 320
    rollout_reuse: int = 24
    source_weights: dict[str, float] = field(
        default_factory=lambda: {"prose": 1.5, "reference": 0.8, "docs": 1.1, "code": 0.8}
    )
    long_source_weights: dict[str, float] = field(
        default_factory=lambda: {"prose": 2.5, "reference": 0.5, "docs": 1.2, "code": 0.5}
    )
    evaluate: bool = False

    def __post_init__(self) -> None:
        for name in ("total_seconds", "call_seconds", "learning_rate", "tokens_per_step", "chain_rows"):
            if not getattr(self, name) > 0:
                raise InputError(f"training: {name} is {getattr(self, name)}, expected a positive number")
        if self.total_steps is not None and self.total_steps <= 0:
            raise InputError(f"training: total_steps is {self.total_steps}, expected a positive number")
        if not 1 <= self.num_drafts <= 8:
            raise InputError(f"training: num_drafts is {self.num_drafts}, expected 1 to 8")

    @property
    def model(self) -> dict[str, Any]:
        """``config.json`` of the checkpoint."""
        return MODEL if self.model_size == "small" else TINY

    @property
    def schedule(self) -> tuple[Phase, ...]:
        """Phases; a tiny model runs all of them at 1/64 of the context."""
        if self.model_size == "small":
            return SCHEDULE
        return tuple(dataclasses.replace(phase, context=max(64, phase.context // 64)) for phase in SCHEDULE)
