"""Figures with a palette: smaller files that look the same."""

from __future__ import annotations

import io

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure

from page4.experiments.bench.figure import plot_roofline
from page4.experiments.plots import Series, plot_acceptance
from page4.experiments.png import with_palette
from page4.experiments.statistics import Estimate


def _png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    return drawn.getvalue()


def _pixels(png: bytes) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(png), format="png")[..., :3]


def _check(figure: Figure) -> None:
    """Not a channel of a pixel is off by a 16th, so that lines keep the colours of the legend."""
    before = _png(figure)
    after = with_palette(before)
    assert len(after) < len(before) / 2
    assert np.abs(_pixels(after) - _pixels(before)).max() < 1 / 16


def test_lines_keep_their_colours() -> None:
    estimates = [Estimate(0.5, 0.4, 0.6, 8)] * 2
    lines = [Series(f"arm {i}", (512, 1024), estimates) for i in range(7)]
    _check(plot_acceptance(lines, "title", "note"))


def test_a_single_small_marker_keeps_its_colour() -> None:
    row = {"kernel": "a", "implementation": "triton", "floor_bytes": 10**6, "median_us": 3.0, "p10_us": 2.0}
    row |= {"p90_us": 4.0, "copy_bandwidth": 4e12, "launch_us": 1.0}
    formats = ["e4m3"] * 20 + ["fp16", "e5m2", "e3m4", "int8"]
    _check(
        plot_roofline([row | {"kv_format": f, "floor_bytes": 10**6 + i} for i, f in enumerate(formats)], "t")
    )
