"""Minimal Qwen4Exp in PyTorch: config, layers, MTP head, weight loading, and the shipped checkpoint."""

from .causal_lm import CausalLMOutput, Qwen4ExpForCausalLM
from .config import Qwen4ExpConfig
from .rows import RowBatch, Segment

__all__ = ["CausalLMOutput", "Qwen4ExpConfig", "Qwen4ExpForCausalLM", "RowBatch", "Segment"]
