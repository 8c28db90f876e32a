"""The samples of a study: a CSV file of typed rows that survives an interrupt and is added to later."""

from __future__ import annotations

import csv
import io
import lzma
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
    `repr` and read back exactly; None is an empty cell. A published study's file is compressed; whoever goes
    on with a copy of it needs no unpacking.

    Args:
        path: The CSV file; it is read when it exists, or when it does with `.xz` after its name.
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
        if path.exists() or compressed(path).exists():
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
        write_csv(self.path, [*self._rows.values(), *added.values()], list(self.columns))
        self._rows.update(added)

    def remove(self, unwanted: Callable[[Row], bool]) -> None:
        """Remove rows that do not count any more, and write the file if there were any."""
        kept = {key: row for key, row in self._rows.items() if not unwanted(row)}
        if len(kept) < len(self._rows):
            write_csv(self.path, kept.values(), list(self.columns))
            self._rows = kept

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)


def read_samples(path: Path, columns: Mapping[str, type]) -> list[Row]:
    """Read a CSV file with exactly these columns; the values get the columns' types.

    Where there is no such file, but one with `.xz` after its name, that is read.

    Raises:
        InputError: Other columns, a cell that is not of its column's type, or a file that is no CSV in UTF-8
            or damaged in its compression.
    """
    packed = compressed(path)
    if not path.exists() and packed.exists():
        path = packed
    try:
        return _parse(path, _read_text(path), columns)
    except csv.Error as error:  # a stray quotation mark, for example, makes one endless cell
        raise InputError(f"{path} is no readable CSV file: {error}") from error


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
    except lzma.LZMAError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from error


def _parse(path: Path, text: str, columns: Mapping[str, type]) -> list[Row]:
    with io.StringIO(text, newline="") as file:
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


def compressed(path: Path) -> Path:
    """Where a published study has the file."""
    return path.with_name(path.name + ".xz")


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write a table atomically; a compressed one that it takes the place of is removed."""
    write_text(path, to_csv(rows, columns))
    compressed(path).unlink(missing_ok=True)


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
