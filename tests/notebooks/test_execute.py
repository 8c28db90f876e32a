"""The notebooks run from top to bottom without a display, and show the studies that are in the repository."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from page4.experiments.acceptance import AcceptanceConfig
from page4.experiments.attribution import AttributionConfig
from page4.experiments.config import load_config
from page4.experiments.quant_error import QuantErrorConfig
from tests.experiments.acceptance.tiny_study import write_checkpoint, write_texts

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXECUTE: dict[str, Any] = runpy.run_path(str(FOLDER / "execute.py"))
ABSOLUTE_PATH = re.compile(r"(?<![\w.\]/])/(?:home|root|tmp|work|usr|opt|var|mnt|data|Users)/|[A-Z]:\\")

every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)


def outputs(notebook: Path) -> list[NotebookNode]:
    cells = nbformat.read(notebook, as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def images(notebook: Path) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def texts_shown(notebook: Path) -> list[str]:
    """What is written; a figure is only named, because its bytes and size depend on fonts."""
    shown = []
    for output in outputs(notebook):
        data = output.get("data", {"text/plain": output.get("text", "")})
        shown.append("figure" if "image/png" in data else data.get("text/markdown", data["text/plain"]))
    return shown


@every_notebook
def test_a_notebook_shows_what_its_committed_study_holds(notebook: Path, tmp_path: Path) -> None:
    """After a change of studies or of what draws them, `make notebooks` executes them anew."""
    if EXECUTE["missing_studies"](notebook):
        assert not outputs(notebook)
        return
    written = EXECUTE["execute"](notebook, tmp_path)
    assert texts_shown(written) == texts_shown(notebook), "run `make notebooks` and commit what it writes"
    assert images(written) == images(notebook) >= 1


@every_notebook
def test_a_committed_notebook_ran_in_order_and_names_no_machine(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts in (list(range(1, len(code) + 1)), [None] * len(code))
    assert (counts[0] is None) == bool(EXECUTE["missing_studies"](notebook))
    assert not any(output.output_type == "error" for output in outputs(notebook))
    assert not any(output.get("name") == "stderr" for output in outputs(notebook))
    assert not any(map(ABSOLUTE_PATH.search, texts_shown(notebook)))
    assert content.metadata.language_info == {"name": "python"}
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1


@pytest.mark.parametrize(
    ("name", "settings", "figures"),
    [
        ("acceptance_vs_context", ["num_prompts=2", "rounds_per_prompt=2", "generation_tokens=9"], 3),
        ("formats_and_attribution", ["num_prompts=2", "rounds_per_prompt=2", "groups=scale,formats"], 1),
        ("quantisation_error", ["num_prompts=2", "formats=fp16,e4m3,int8", "calibration_window=64"], 5),
    ],
)
def test_a_notebook_measures_a_study_of_its_own(
    name: str, settings: list[str], figures: int, tmp_path: Path
) -> None:
    overrides = [
        f"model={write_checkpoint(tmp_path / 'model')}",
        f"prompts={write_texts(tmp_path / 'texts', first=300, second=400)}",
        "device=cpu",
        "lengths=48,96",
        "resamples=200",
        *settings,
    ]
    if name == "quantisation_error":
        overrides.append(f"corpus={write_texts(tmp_path / 'corpus', third=120)}")
    else:
        overrides.append("round_stride=5")
    settings_cell = EXECUTE["measure_instead"](tmp_path / "study", overrides)
    written = EXECUTE["execute"](FOLDER / f"{name}.ipynb", tmp_path / "out", settings_cell)
    assert images(written) == figures
    assert f"{tmp_path / 'study'} holds no finished study: a quick one is measured there" in "".join(
        texts_shown(written)
    )
    assert (tmp_path / "study" / "summary.csv").exists()


def test_a_cell_that_fails_is_an_error_and_leaves_the_notebook(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    before = (tmp_path / "wrong.ipynb").read_bytes()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        EXECUTE["execute"](tmp_path / "wrong.ipynb", tmp_path)
    assert (tmp_path / "wrong.ipynb").read_bytes() == before


def test_studies_that_are_not_there_are_found_in_the_parameters(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell(
        'a = Path("../experiments/results/acceptance")\nb = Path("../experiments/results/none")',
        metadata={"tags": ["parameters"]},
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "two.ipynb")
    assert EXECUTE["missing_studies"](tmp_path / "two.ipynb") == ["experiments/results/none"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("acceptance_vs_context", AcceptanceConfig),
        ("formats_and_attribution", AttributionConfig),
        ("quantisation_error", QuantErrorConfig),
    ],
)
def test_the_small_studies_are_valid_configurations(name: str, config: type[Any]) -> None:
    assert load_config(config, None, EXECUTE["SMALL_STUDIES"][name], quick=True).num_prompts == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wrong"], "no notebook wrong; there are acceptance_vs_context"),
        (["--small", "--out", str(FOLDER)], "--small would replace what the notebooks show"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        EXECUTE["main"](arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
