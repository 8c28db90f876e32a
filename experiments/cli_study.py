"""What every study's command does around the study: progress, the closing lines, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from page4.experiments.progress import Reporter, progress_on

ConfigT = TypeVar("ConfigT")


def result_folder(out: Path | None, name: str, quick: bool) -> Path:
    """`--out`, or a folder named after the study; a quick run is another study and has its own."""
    return out or Path("results") / (f"{name}-quick" if quick else name)


def run_study(
    name: str,
    run: Callable[[ConfigT, Path, Reporter], dict[str, Any]],
    config: ConfigT,
    out: Path,
    as_json: bool,
) -> dict[str, Any]:
    """Run a study with its progress on standard error, print its table and where its figures are.

    Returns the study's summary.
    """
    with progress_on(sys.stderr, name) as progress:
        summary = run(config, out, progress)
    table = out / "table.md"
    if table.exists():
        print_markdown(table.read_text(encoding="utf-8"))
    for figure in sorted(out.glob("*.png")):
        print(f"figure: {figure}")
    if as_json:
        print(json.dumps(summary))
    return summary


def print_markdown(text: str) -> None:
    """Print Markdown, laid out where standard output is a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text)
