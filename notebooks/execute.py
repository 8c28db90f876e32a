"""Executes every notebook without a display, with small settings: `python notebooks/execute.py [OUT]`.

The cell tagged "parameters" is followed by one with the settings below, in place of a user's edits. The
executed copies, with their outputs, go to OUT (results/notebooks by default).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parent

# A study that takes seconds on a CPU.
SMALL_STUDY = [
    "lengths=128,256",
    "num_prompts=2",
    "batch_size=2",
    "rounds_per_prompt=2",
    "calibration_tokens=128",
    "generation_tokens=8",
    "resamples=200",
]


def execute(notebook: Path, out: Path, overrides: list[str]) -> Path:
    """Run a notebook top to bottom and write it, with its outputs, to `out`; returns the written file.

    Raises:
        CellExecutionError: A cell raised; the message holds its traceback.
    """
    content = nbformat.read(notebook, as_version=4)
    tagged = [i for i, cell in enumerate(content.cells) if "parameters" in cell.metadata.get("tags", [])]
    with tempfile.TemporaryDirectory() as folder:
        settings = f"folder = Path({folder!r}) / 'results'\noverrides = {overrides!r}"
        for index in reversed(tagged):
            content.cells.insert(index + 1, nbformat.v4.new_code_cell(settings))
        client = NotebookClient(
            content,
            timeout=1200,
            resources={"metadata": {"path": str(NOTEBOOKS)}},
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
        )
        client.execute()
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, out / notebook.name)
    return out / notebook.name


def main() -> int:
    """Execute all; the status is 1 when a cell of any of them failed."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "results/notebooks")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the kernels inherit it; see docs/log.md
    status = 0
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        started = time.monotonic()
        try:
            written = execute(notebook, out, SMALL_STUDY)
        except CellExecutionError as error:
            print(f"{notebook.name}: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"{notebook.name}: executed in {time.monotonic() - started:.0f} s, see {written}")
    return status


if __name__ == "__main__":
    sys.exit(main())
