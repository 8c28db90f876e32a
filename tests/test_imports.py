"""Imports point one way: experiments -> spec_decode -> model -> kvcache -> kernels."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "kvcache", "model", "spec_decode", "experiments")  # each may import those before it
SOURCES = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def module_name(file: Path) -> str:
    """page4.kernels.errors for kernels/errors.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("page4", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of everything that the source imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            # `from page4 import model` names a layer only together with what is imported.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def upward_imports(source: str, module: str, is_package: bool) -> list[str]:
    """Imports of page4 modules from a layer above the module's own, or by an unmapped name."""
    rank = LAYERS.index(module.split(".")[1])
    wrong = []
    for name in imported_modules(source, module, is_package):
        parts = name.split(".")
        is_above = parts[0] == "page4" and len(parts) > 1 and LAYERS.index(parts[1]) > rank
        if is_above or parts[0] in (*LAYERS, "tests", "notebooks"):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("file", SOURCES, ids=module_name)
def test_a_module_imports_only_its_own_layer_and_those_below(file: Path) -> None:
    wrong = upward_imports(file.read_text(encoding="utf-8"), module_name(file), file.name == "__init__.py")
    assert not wrong


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_imports_page4_by_its_mapped_name(file: Path) -> None:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    source = "\n".join(line for line in code.splitlines() if not line.startswith("%"))  # magics are no Python
    assert not upward_imports(source, "page4.experiments.notebook", is_package=False)


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("page4.kernels.codecs", False, "import page4.kvcache"),
        ("page4.kernels.codecs", False, "from page4 import model"),
        ("page4.kvcache.cache", False, "def f():\n    from page4.spec_decode.rounds import measure_rounds"),
        ("page4.model", True, "from ..experiments import plots"),
        ("page4.model.qsa", False, "from ..spec_decode import engine"),
        ("page4.experiments.cli", False, "from kernels.errors import InputError"),
    ],
)
def test_an_upward_or_unmapped_import_is_found(module: str, is_package: bool, source: str) -> None:
    assert upward_imports(source, module, is_package)


def test_a_downward_or_relative_import_is_allowed() -> None:
    assert not upward_imports("from page4.kernels import codecs", "page4.model.qsa", is_package=False)
    assert not upward_imports("from .config import Qwen4ExpConfig", "page4.model.qsa", is_package=False)
    assert not upward_imports("from .qsa import QSA", "page4.model", is_package=True)
