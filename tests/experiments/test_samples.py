"""Samples survive an interrupt, come back with their types, and are never measured twice."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from page4.experiments import samples as samples_module
from page4.experiments.samples import Row, SampleStore, read_samples
from page4.kernels.errors import InputError

COLUMNS: dict[str, type] = {"prompt": str, "length": int, "rate": float, "exact": bool}
KEY = ("prompt", "length")


def row(prompt: str = "a", length: int = 1, rate: float | None = 0.1, exact: bool = True) -> Row:
    return {"prompt": prompt, "length": length, "rate": rate, "exact": exact}


def store(folder: Path) -> SampleStore:
    return SampleStore(folder / "samples.csv", COLUMNS, KEY)


def test_a_new_store_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    store(tmp_path).add([row(length=1), row(length=2)])
    again = store(tmp_path)
    assert ("a", 2) in again
    assert ("a", 3) not in again
    again.add([row(length=3)])
    assert [r["length"] for r in store(tmp_path).rows] == [1, 2, 3]


def test_a_compressed_file_is_gone_on_with_and_replaced(tmp_path: Path) -> None:
    """What is published is compressed: a copy of it is resumed like the folder of the study itself."""
    store(tmp_path).add([row(length=1)])
    plain, packed = tmp_path / "samples.csv", tmp_path / "samples.csv.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    again = store(tmp_path)
    assert again.rows == read_samples(plain, COLUMNS) == [row(length=1)]
    again.add([row(length=2)])
    assert not packed.exists()
    assert read_samples(plain, COLUMNS) == [row(length=1), row(length=2)]


@pytest.mark.parametrize("name", ["samples.csv", "samples.csv.xz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"caf\xe9", "is not UTF-8"), (b'prompt\n"' + 200_000 * b"x", "is no readable CSV file")],
    ids=["Latin-1", "a quotation mark that nothing closes"],
)
def test_bytes_that_are_no_table_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    with pytest.raises(InputError, match=f"{name} {message}"):
        SampleStore(tmp_path / "samples.csv", {"prompt": str}, ("prompt",))


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.csv.xz").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"samples\.csv\.xz is damaged"):
        store(tmp_path)


def test_rows_that_do_not_count_any_more_are_removed(tmp_path: Path) -> None:
    samples = store(tmp_path)
    samples.add([row(length=1), row(length=2), row(length=3)])
    samples.remove(lambda r: r["length"] == 2)
    assert ("a", 2) not in samples
    assert [r["length"] for r in store(tmp_path).rows] == [1, 3]
    samples.add([row(length=2)])
    assert [r["length"] for r in store(tmp_path).rows] == [1, 3, 2]


@given(
    prompt=st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), min_size=1),
    length=st.integers(),
    rate=st.none() | st.floats(allow_nan=False),
    exact=st.booleans(),
)
def test_every_value_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, length: int, rate: float | None, exact: bool
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    store(folder).add([row(prompt, length, rate, exact)])
    assert read_samples(folder / "samples.csv", COLUMNS) == [row(prompt, length, rate, exact)]


def test_an_interrupt_while_writing_loses_only_the_rows_being_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = store(tmp_path)
    rows.add([row(length=1)])

    def interrupted(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(samples_module, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows.add([row(length=2)])
    assert ("a", 2) not in rows
    assert store(tmp_path).rows == [row(length=1)]


@pytest.mark.parametrize(
    "bad",
    [
        [row(length=1)],
        [row(length=2), row(length=2)],
        [row(length=2), {"prompt": "b"}],
        [row(length=2) | {"extra": 1}],
        [row(length=2, prompt="a\nb")],
    ],
    ids=["there already", "twice", "column missing", "column too many", "line break"],
)
def test_a_wrong_row_is_refused_and_nothing_of_its_batch_is_added(tmp_path: Path, bad: list[Row]) -> None:
    rows = store(tmp_path)
    rows.add([row(length=1)])
    with pytest.raises(ValueError):
        rows.add(bad)
    assert rows.rows == store(tmp_path).rows == [row(length=1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,length\na,1\n", "has the columns prompt, length; expected prompt, length, rate, exact"),
        ("", "has the columns"),
        ("prompt,length,rate,exact\na,1,0.5\n", "line 2: 3 cells, expected 4"),
        ("prompt,length,rate,exact\na,one,0.5,True\n", "line 2: invalid literal"),
        ("prompt,length,rate,exact\na,1,0.5,yes\n", "line 2: 'yes' is not True or False"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "samples.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        store(tmp_path)
