"""The capacity study from configuration to result folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from page4.experiments.capacity.config import CapacityConfig
from page4.experiments.capacity.count import COLUMNS, count
from page4.experiments.capacity.geometry import PUBLIC, load_geometry
from page4.experiments.capacity.origin import explained
from page4.experiments.capacity.report import figure, markdown, summarise
from page4.experiments.progress import Reporter
from page4.experiments.result_folder import ResultFolder


def run(config: CapacityConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Count everything and return the content of ``summary.json``; nothing is allocated or measured.

    Args:
        config: What is counted.
        out: Result folder. It gets ``capacity.csv`` (a row per degree, formats, context and concurrency),
            ``summary.json``, ``table.md``, ``capacity.png``, ``config.yaml`` and ``provenance.json``.
        progress: Not needed: this takes seconds.

    Raises:
        InputError: The geometry is unknown, its heads cannot be shared by so many ranks, or the folder cannot
            be used.
    """
    geometry = load_geometry(config.geometry)
    rows = count(config, geometry)
    origin = explained() if config.geometry == PUBLIC else None
    digest = hashlib.sha256(repr(geometry).encode()).hexdigest()
    with ResultFolder(out, config, inputs={"geometry": digest}) as results:
        results.write_csv("capacity.csv", rows, COLUMNS)
        summary = summarise(config, rows, origin)
        results.write_json("summary.json", summary)
        results.write_text("table.md", markdown(config, rows, origin))
        results.write_figure("capacity.png", figure(config, rows))
        results.finish()
    return summary
