"""How fast prefill and decoding are by KV format and prompt length, one prompt at a time."""

from page4.experiments.throughput.config import ThroughputConfig
from page4.experiments.throughput.study import run

__all__ = ["ThroughputConfig", "run"]
