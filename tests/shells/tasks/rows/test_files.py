"""Rows of every kind of file, with the irregular ones that people have."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from echo2d.errors import OperatorFault
from echo2d.tasks.rows.files import ROWS_KEPT, RowFiles, found_files

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(2500)]


def write_json(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_csv(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\r\n".join(lines) + "\r\n", newline="")
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=1100)
    return path


def write_arrow(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """As `datasets.Dataset.save_to_disk` writes one split."""
    folder = path.with_suffix("")
    folder.mkdir()
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    return folder


@pytest.mark.parametrize(
    ("write", "ending"),
    [(write_json, "jsonl"), (write_csv, "csv"), (write_parquet, "parquet"), (write_arrow, "arrow")],
)
def test_rows_are_read_from_every_kind_of_file(
    write: Callable[[Path, Any], Path], ending: str, tmp_path: Path
) -> None:
    rows = RowFiles(found_files([str(write(tmp_path / f"rows.{ending}", ROWS))]))
    assert len(rows) == len(ROWS)
    for number in (0, 1, ROWS_KEPT - 1, ROWS_KEPT, 1099, 1100, 2499, 5):
        assert rows.row(number) == ROWS[number]


def test_files_are_read_in_order_and_those_of_a_pattern_are_sorted(tmp_path: Path) -> None:
    for name, part in (("b", ROWS[3:5]), ("a", ROWS[:3])):
        write_json(tmp_path / f"{name}.jsonl", part)
    rows = RowFiles(
        found_files([f"{tmp_path}/*.jsonl", str(write_csv(tmp_path / "c.csv", ROWS[5:6]))])
    )
    assert [rows.row(number) for number in range(len(rows))] == ROWS[:6]


def test_the_digest_of_rows_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows.jsonl", ROWS[:3])
    before = RowFiles(found_files([str(path)])).digest
    assert RowFiles(found_files([str(path)])).digest == before
    write_json(path, ROWS[:2])
    assert RowFiles(found_files([str(path)])).digest != before


def test_quotes_line_breaks_and_blank_lines_are_read_correctly(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n"x\ny","say ""hi"""\n\nz,\n"last",1')
    rows = RowFiles(found_files([str(path)]))
    assert [rows.row(number) for number in range(len(rows))] == [
        {"a": "x\ny", "b": 'say "hi"'},
        {"a": "z", "b": ""},
        {"a": "last", "b": "1"},
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"a": 1}\n\n   \n{"a": 2}')
    rows = RowFiles(found_files([str(lines)]))
    assert [rows.row(number)["a"] for number in range(len(rows))] == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rows.jsonl", "", "has no rows"),
        ("rows.csv", "a,b\n", "has no rows"),
        ("rows.txt", "x", "expected a file that ends in"),
        ("rows.parquet", "not parquet", "cannot be read"),
        ("rows.csv", "q;a\n1;2\n", "';' separates its values; expected commas"),
        ("rows.csv", "q\ta\n1\t2\n", "'.t' separates its values"),
        ("rows.jsonl", "\x1f\udc8b..", "is compressed by gzip; unpack it"),
        ("rows.jsonl", "PAR1...", r"is a Parquet file; let its name end in \.parquet"),
        ("rows.csv", "\udcff\udcfeq\0", "is UTF-16; save it as UTF-8"),
        ("rows.csv", "\udcdf,a\n1,2\n", "row 0 is not UTF-8: .*; save the file as UTF-8"),
    ],
)
def test_a_file_without_rows_is_the_operators_fault(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(OperatorFault, match=says) as fault:
        RowFiles(found_files([str(tmp_path / name)]))
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("text", ["{broken", "[1]", "\udcff"])
def test_a_damaged_row_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + text.encode(errors="surrogateescape") + b"\n")
    rows = RowFiles(found_files([str(path)]))
    with pytest.raises(OperatorFault, match="row 1"):
        rows.row(1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="No such file"):
        RowFiles(found_files([str(tmp_path / "no.jsonl")]))
    with pytest.raises(OperatorFault, match="found none"):
        RowFiles(found_files([f"{tmp_path}/*.jsonl"]))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OperatorFault, match=r"without state.json"):
        RowFiles(found_files([str(tmp_path / "folder")]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('q,a\nHow long is 5" of pipe,12.7\nx,1\nand 6" of it?,15.24\n', "quote"),
        ("q,a\nWhat is 1,000+1?,1001\n", "row 1 has 3 values"),
        ("q,a\nonly\n", "row 1 has 1 values"),
    ],
    ids=["a quote inside a text", "a comma inside a text", "too few"],
)
def test_an_ambiguous_csv_file_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(OperatorFault, match=says) as fault:
        RowFiles([path])
    assert "\n" not in str(fault.value)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("q,a\n1,2\n".encode("utf-8-sig"))
    assert RowFiles([path]).row(0) == {"q": "1", "a": "2"}


def test_a_value_may_be_as_long_as_its_file(tmp_path: Path) -> None:
    long = "x" * 300_000
    path = write_csv(tmp_path / "rows.csv", [{"question": long, "answer": "1"}])
    assert RowFiles([path]).row(0) == {"question": long, "answer": "1"}
    lines = write_json(tmp_path / "rows.jsonl", [{"question": long * 100, "answer": {"a": ["1"]}}])
    assert RowFiles([lines]).row(0)["answer"] == {"a": ["1"]}


@pytest.mark.parametrize(
    "name", ["rows [v2]*.jsonl", "~rows.jsonl", "rün #1 100%.JSONL", " .jsonl", "a\nb.jsonl"]
)
def test_a_file_may_have_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "data[1]"
    folder.mkdir()
    write_json(folder / name, ROWS[:2])
    rows = RowFiles(found_files([str(folder / name)]))
    assert rows.place(1) == f"row 1 of {name}"


def test_a_row_that_is_no_csv_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"question,answer\nwhat,1\nwh\rat,2\n")
    with pytest.raises(OperatorFault, match=r"rows\.csv: "):
        RowFiles([path])
