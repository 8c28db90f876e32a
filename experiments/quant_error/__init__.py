"""The study of what a KV format changes: K and V, attention outputs, selections, logits."""

from page4.experiments.quant_error.config import Arm, QuantErrorConfig
from page4.experiments.quant_error.study import run

__all__ = ["Arm", "QuantErrorConfig", "run"]
