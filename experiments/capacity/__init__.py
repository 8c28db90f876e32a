"""Capacity: bytes of caches by format, and what fits on a GPU."""

from page4.experiments.capacity.config import CapacityConfig
from page4.experiments.capacity.study import run

__all__ = ["CapacityConfig", "run"]
