"""The samples of a study: a CSV file of typed rows that survives an interrupt and is added to later."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from page4.experiments.atomic import write_text
from page4.kernels.errors import InputError

Row = dict[str, Any]


class SampleStore:
    """Rows with a unique key, kept in a CSV file that is complete after every `add`.

    `add` rewrites the whole file under a temporary name and renames it, so an interrupt leaves the rows of
    the last finished `add`; at a few thousand short rows that costs milliseconds. Floats are written with
    `repr` and read back exactly; None is an empty cell.

    Args:
        path: The CSV file; it is read when it exists.
        columns: Column names and their types (bool, int, float or str), in the order of the file.
        key: The columns that together name a row, for example ("prompt", "arm", "length").

    Raises:
        InputError: The file has other columns, or a cell that is not of its column's type.
    """

    def __init__(self, path: Path, columns: Mapping[str, type], key: Sequence[str]) -> None:
        missing = [name for name in key if name not in columns]
        if missing:
            raise ValueError(f"key columns {missing} are not among the columns")
        self.path = path
        self.columns = dict(columns)
        self.key = tuple(key)
        self._rows: dict[tuple[Any, ...], Row] = {}
        if path.exists():
            for row in read_samples(path, columns):
                self._rows[self._key_of(row)] = row

    @property
    def rows(self) -> list[Row]:
        """Every row, in the order of addition."""
        return list(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        """Whether the row with this key (a tuple in the order of `self.key`) is done."""
        return key in self._rows

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows and write the file.

        Raises:
            ValueError: A row lacks a column, has one too many or a line break, or its key is there already.
                Nothing is added then.
        """
        added: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            if set(row) != set(self.columns):
                raise ValueError(f"a row needs the columns {list(self.columns)}, got {list(row)}")
            key = self._key_of(row)
            if key in self._rows or key in added:
                raise ValueError(f"the row {dict(zip(self.key, key, strict=True))} is there already")
            added[key] = {name: row[name] for name in self.columns}
        write_text(self.path, to_csv([*self._rows.values(), *added.values()], list(self.columns)))
        self._rows.update(added)

    def remove(self, unwanted: Callable[[Row], bool]) -> None:
        """Remove rows that do not count any more, and write the file if there were any."""
        kept = {key: row for key, row in self._rows.items() if not unwanted(row)}
        if len(kept) < len(self._rows):
            write_text(self.path, to_csv(kept.values(), list(self.columns)))
            self._rows = kept

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)


def read_samples(path: Path, columns: Mapping[str, type]) -> list[Row]:
    """Read a CSV file with exactly these columns; the values get the columns' types.

    Raises:
        InputError: Other columns, or a cell that is not of its column's type.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if header != list(columns):
            raise InputError(f"{path} has the columns {', '.join(header)}; expected {', '.join(columns)}")
        rows = []
        for cells in reader:
            if len(cells) != len(header):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, expected {len(header)}"
                )
            try:
                rows.append(
                    {name: _read_cell(cell, columns[name]) for name, cell in zip(header, cells, strict=True)}
                )
            except ValueError as error:
                raise InputError(f"{path}, line {reader.line_num}: {error}") from error
    return rows


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as CSV text with a header; floats keep every digit, None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row[name] is None else _write_cell(row[name]) for name in columns])
    return text.getvalue()


def _write_cell(value: Any) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    if "\r" in text or "\n" in text:
        raise ValueError(f"a cell must be on one line, got {text!r}")
    return text


def _read_cell(cell: str, kind: type) -> Any:
    if kind is str:
        return cell
    if cell == "":
        return None
    if kind is bool:
        if cell not in ("True", "False"):
            raise ValueError(f"{cell!r} is not True or False")
        return cell == "True"
    return kind(cell)
