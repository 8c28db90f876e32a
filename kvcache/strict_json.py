"""JSON from files that may be damaged: one error, and no key twice."""

from __future__ import annotations

import json
from typing import Any

from page4.kernels.errors import InputError


def parse_json(data: bytes, what: str) -> Any:
    """The value of a UTF-8 JSON text; ``what`` names it in messages.

    Raises:
        InputError: it is no UTF-8 or no JSON, nests too deeply, holds NaN or an infinity, or a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        raise InputError(f"{what} is not valid JSON: {reason}") from error
