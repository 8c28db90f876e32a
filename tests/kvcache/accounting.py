"""After every test, every page of every cache that it made has exactly one state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from page4.kvcache.pages import BlockTables


@pytest.fixture(autouse=True)
def accounting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No page leaked, and none was freed twice."""
    made: list[BlockTables] = []
    build = BlockTables.__init__

    def noted(self: BlockTables, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(BlockTables, "__init__", noted)
    yield
    for tables in made:
        tables.check()
