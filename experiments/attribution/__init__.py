"""The study of where the loss of an 8-bit KV format comes from, and of formats that cost nothing."""

from page4.experiments.attribution.config import AttributionConfig
from page4.experiments.attribution.study import run

__all__ = ["AttributionConfig", "run"]
