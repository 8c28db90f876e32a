"""The study of MTP acceptance against context length, between KV formats."""

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.study import run

__all__ = ["AcceptanceConfig", "Arm", "run"]
