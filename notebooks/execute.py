"""Executes the notebooks without a display and keeps what they show: `python notebooks/execute.py`.

Without options they show the studies in experiments/results, and outputs are written into the notebooks
themselves. A notebook whose study is not there is left as it is. `--small` measures small studies in place of
those that a CPU can measure in seconds, and writes elsewhere, as does `--out DIR`.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from page4.experiments.atomic import write_text
from page4.experiments.png import with_palette

NOTEBOOKS = Path(__file__).resolve().parent
SMALL_OUT = Path("results/notebooks")

_SMALL = ["lengths=128,256", "num_prompts=2", "resamples=200"]
_SMALL_ROUNDS = [*_SMALL, "batch_size=2", "rounds_per_prompt=2", "calibration_tokens=128"]
SMALL_STUDIES = {
    "acceptance_vs_context": [*_SMALL_ROUNDS, "generation_tokens=8"],
    "formats_and_attribution": [*_SMALL_ROUNDS, "groups=place,formats"],
    "quantisation_error": [*_SMALL, "formats=fp16,e4m3,int8", "scored_tokens=64", "calibration_windows=1"],
}
"""Settings of studies that take seconds on a CPU, by notebook."""

# Figures are kept small, because notebooks are tracked with them.
_FIGURES = {"dpi": 80, "bbox_inches": "tight"}
_KERNEL_OPTIONS = [
    "--IPKernelApp.log_level=ERROR",
    f"--InlineBackend.print_figure_kwargs={_FIGURES!r}",
]


def execute(notebook: Path, out: Path, settings: str = "") -> Path:
    """Run a notebook from top to bottom and write it, with its outputs, to `out`; returns the written file.

    Args:
        notebook: The notebook; it may be in `out`.
        out: Folder, made when it is missing.
        settings: A cell that follows the one tagged "parameters", in place of a user's edits.

    Raises:
        CellExecutionError: A cell raised; the message holds its traceback. Nothing is written then.
    """
    content = nbformat.read(notebook, as_version=4)
    if settings:
        tagged = [i for i, cell in enumerate(content.cells) if "parameters" in cell.metadata.get("tags", [])]
        for index in reversed(tagged):
            content.cells.insert(index + 1, nbformat.v4.new_code_cell(settings))
    metadata = dict(content.metadata)
    client = NotebookClient(
        content,
        timeout=1200,
        record_timing=False,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        extra_arguments=_KERNEL_OPTIONS,
    )
    client.execute()
    for output in (output for cell in content.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            png = with_palette(base64.b64decode(output.data["image/png"]))
            output.data["image/png"] = base64.b64encode(png).decode()
    content.metadata = nbformat.from_dict(metadata)  # the kernel would add the version of Python
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / notebook.name, nbformat.writes(content) + "\n")
    return out / notebook.name


def missing_studies(notebook: Path) -> list[str]:
    """Folders that the notebook's parameters name and that are not there, relative to the repository."""
    cells = nbformat.read(notebook, as_version=4).cells
    parameters = "\n".join(c.source for c in cells if "parameters" in c.metadata.get("tags", []))
    named = re.findall(r'Path\("\.\./([^"]+)"\)', parameters)
    return [folder for folder in named if not (NOTEBOOKS.parent / folder).exists()]


def measure_instead(folder: Path, overrides: Sequence[str]) -> str:
    """The settings of a notebook that measures a study of its own into a folder."""
    return f"folder = Path({str(folder)!r})\noverrides = {list(overrides)!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the chosen notebooks; the status is 1 when a cell of any of them failed."""
    parser = argparse.ArgumentParser(description="Execute the notebooks and keep what they show.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks to execute (default: all)")
    parser.add_argument("--out", type=Path, help="write the executed notebooks to this folder")
    parser.add_argument("--small", action="store_true", help=f"measure small studies (--out {SMALL_OUT})")
    options = parser.parse_args(arguments)
    notebooks = {notebook.stem: notebook for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))}
    unknown = [name for name in options.names if name.removesuffix(".ipynb") not in notebooks]
    if unknown:
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(notebooks)}")
    out = options.out or (SMALL_OUT if options.small else NOTEBOOKS)
    if options.small and out.resolve() == NOTEBOOKS:
        parser.error("--small would replace what the notebooks show; give --out another folder")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the kernels inherit it; see docs/log.md
    chosen = [name.removesuffix(".ipynb") for name in options.names] or list(notebooks)
    return max(_execute(notebooks[name], out, options.small) for name in chosen)


def _execute(notebook: Path, out: Path, small: bool) -> int:
    measured = small and notebook.stem in SMALL_STUDIES
    if not measured and (missing := missing_studies(notebook)):
        print(f"{notebook.name}: left as it is, {', '.join(missing)} is not there")
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = measure_instead(Path(folder) / "study", SMALL_STUDIES[notebook.stem]) if measured else ""
        try:
            written = execute(notebook, out, settings)
        except CellExecutionError as error:
            print(f"{notebook.name}: {error}", file=sys.stderr)
            return 1
    print(f"{notebook.name}: executed in {time.monotonic() - started:.0f} s, see {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
