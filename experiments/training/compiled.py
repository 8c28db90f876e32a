"""Row-wise functions, compiled once for all layers and context lengths.

Everything between two sequence mixers works on flat rows ``[B*T, ...]``; with a constant number of tokens per
step one graph serves every layer and every context length, so a run compiles a dozen small functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_enabled = False
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def set_compile(enabled: bool) -> bool:
    """Switches compilation on or off for the functions below; returns the former setting."""
    global _enabled
    former, _enabled = _enabled, enabled
    return former


def rowwise(function: F) -> F:
    """Compiles ``function`` on first use while compilation is on."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not _enabled:
            return function(*args)
        if function not in _compiled:
            _compiled[function] = torch.compile(function, dynamic=False)
        return _compiled[function](*args)

    return call  # type: ignore[return-value]
