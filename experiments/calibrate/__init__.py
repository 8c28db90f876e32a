"""Calibration of static KV scales, and overlays made from it."""

from page4.experiments.calibrate.config import CalibrateConfig
from page4.experiments.calibrate.study import run

__all__ = ["CalibrateConfig", "run"]
