"""Executes the machine code of compute capability 7.0 on the CPU, over numpy arrays."""

from __future__ import annotations

from .errors import EmulationError, Race
from .global_memory import Buffer
from .launch import Argument, Run, run, unknown_instructions

__all__ = ["Argument", "Buffer", "EmulationError", "Race", "Run", "run", "unknown_instructions"]
