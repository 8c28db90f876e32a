"""Tuning of kernels: every possible configuration is compiled, checked and timed, the best one recorded."""

from page4.experiments.autotune.config import AutotuneConfig
from page4.experiments.autotune.study import run

__all__ = ["AutotuneConfig", "run"]
