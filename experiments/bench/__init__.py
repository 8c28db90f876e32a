"""The kernel bench: correctness first, then times on cold caches against measured copy bandwidth."""

from page4.experiments.bench.config import KERNELS, BenchConfig
from page4.experiments.bench.study import run

__all__ = ["KERNELS", "BenchConfig", "run"]
