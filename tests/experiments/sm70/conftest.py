from __future__ import annotations

from collections.abc import Iterator

import pytest

from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.toolchain import side_install
from page4.kernels.errors import InputError


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """Compiles for sm_70; tests are skipped where its side install is missing."""
    try:
        toolchain = side_install()
    except InputError as reason:
        pytest.skip(str(reason))
    compiler = Compiler(toolchain)
    yield compiler
    compiler.close()
