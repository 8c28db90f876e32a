"""The result of a check as a table for people and as a record for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from page4.experiments.sm70.check import Checked
from page4.experiments.sm70.machine_code import LOADS, STORES

COLUMNS = (
    "kernel", "target", "launches", "registers", "shared KiB", "products", "loads B", "stores B",
    "known", "broken",
)  # fmt: skip


def table(results: Sequence[Checked]) -> Table:
    """A row for every kernel and GPU, over its launches."""
    shown = Table(box=None)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in ("kernel", "products") else "right", no_wrap=True)
    for row in rows(results):
        shown.add_row(*row)
    return shown


def rows(results: Sequence[Checked]) -> Iterator[tuple[str, ...]]:
    """The table's rows as text."""

    def place(result: Checked) -> tuple[str, int]:
        return result.case.kernel, result.case.capability

    for (kernel, capability), group in groupby(sorted(results, key=place), key=place):
        members = list(group)
        binaries = [result.binary for result in members if result.binary]
        codes = [result.code for result in members if result.code]
        yield (
            kernel,
            f"sm_{capability}",
            str(len(members)),
            _range([binary.registers for binary in binaries]),
            _range([-(-binary.shared_bytes // 1024) for binary in binaries]),
            " ".join(sorted({result.products for result in members} - {""})),
            _range([width for code in codes for width in code.widths(*LOADS)]),
            _range([width for code in codes for width in code.widths(*STORES)]),
            str(sum(bool(result.known) for result in members)),
            str(sum(not result.passed for result in members)),
        )


def remarks(results: Sequence[Checked]) -> Iterator[str]:
    """A line for every launch that breaks a promise, and one for every reason that is known."""
    by_reason: dict[tuple[str, str, int, str], int] = {}
    for result in results:
        for problem, reason in result.known:
            place = (reason, result.case.kernel, result.case.capability, problem.kind)
            by_reason[place] = by_reason.get(place, 0) + 1
    for (reason, kernel, capability, kind), number in by_reason.items():
        yield f"known: {kernel} sm_{capability}, {kind} of {number} launches: {reason}"
    for result in results:
        for problem in result.broken:
            yield f"broken: {result.case.name}: {problem.kind}: {problem.text}"
        for kind in result.repaired:
            yield f"repaired: {result.case.name}: no {kind} any more; remove it from KNOWN (promises.py)"


def record(results: Sequence[Checked]) -> dict[str, Any]:
    """All of it in JSON types."""
    return {
        "launches": len(results),
        "passed": sum(result.passed for result in results),
        "known": sum(bool(result.known) for result in results),
        "results": [_record(result) for result in results],
    }


def _record(result: Checked) -> dict[str, Any]:
    case, binary, code = result.case, result.binary, result.code
    values: dict[str, Any] = {
        "kernel": case.kernel,
        "capability": case.capability,
        "shape": case.shape,
        "options": dict(case.launch.options),
        "passed": result.passed,
        "products": result.products,
        "broken": [vars(problem) for problem in result.broken],
        "known": [{**vars(problem), "reason": reason} for problem, reason in result.known],
        "repaired": list(result.repaired),
    }
    if binary is not None and code is not None:
        values |= {
            "registers": binary.registers,
            "stack_bytes": binary.stack_bytes,
            "shared_bytes": binary.shared_bytes,
            "loads": {str(width): number for width, number in code.widths(*LOADS).items()},
            "stores": {str(width): number for width, number in code.widths(*STORES).items()},
        }
    return values


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least}-{most}"
