"""Every notebook runs from top to bottom without a display, and stays without outputs in the repository."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from page4.experiments.acceptance import AcceptanceConfig
from page4.experiments.config import load_config
from tests.experiments.acceptance.tiny_study import write_checkpoint, write_texts

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXECUTE: dict[str, Any] = runpy.run_path(str(FOLDER / "execute.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_runs_and_shows_its_figures(notebook: Path, tmp_path: Path) -> None:
    overrides = [
        f"model={write_checkpoint(tmp_path / 'model')}",
        f"prompts={write_texts(tmp_path / 'texts', first=300, second=400)}",
        "device=cpu",
        "lengths=48,96",
        "num_prompts=2",
        "rounds_per_prompt=2",
        "round_stride=5",
        "generation_tokens=9",
        "resamples=200",
    ]
    written = EXECUTE["execute"](notebook, tmp_path / "out", overrides)
    cells = nbformat.read(written, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_is_kept_without_outputs(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert any("parameters" in cell.metadata.get("tags", []) for cell in code)


def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        EXECUTE["execute"](tmp_path / "wrong.ipynb", tmp_path / "out", [])
    assert not (tmp_path / "out").exists()


def test_the_small_study_is_a_valid_configuration() -> None:
    assert load_config(AcceptanceConfig, None, EXECUTE["SMALL_STUDY"], quick=True).num_prompts == 2
