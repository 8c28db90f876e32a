"""Kernels as nvdisasm printed them; fixtures/make.py wrote them."""

from __future__ import annotations

import gzip
from pathlib import Path

from page4.experiments.sm70.assembly import Program, parse

FIXTURES = Path(__file__).parent / "fixtures"


def listing(name: str) -> Program:
    """The program in a file of the fixtures' folder."""
    return parse(gzip.decompress((FIXTURES / f"{name}.sass.gz").read_bytes()).decode())
