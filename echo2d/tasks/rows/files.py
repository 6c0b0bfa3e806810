"""Reads rows from files: JSON lines, CSV, Parquet, and data sets that `datasets` saved to disk.

A file is opened once and never read whole: JSON lines and CSV are memory-mapped, with an index of the
rows' beginnings, 8 bytes a row; Parquet and Arrow are read in batches of rows, and the last batch is kept. A
digest of all bytes shows whether the rows are those of an earlier start.
"""

import bisect
import csv
import json
import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import has_magic
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from echo2d.errors import OperatorFault, path_fault
from echo2d.extras import install_command

DataRow = Mapping[str, Any]

ROWS_KEPT = 1024  # this many rows of a Parquet or Arrow file are decoded at once
# First bytes of files that are not text in UTF-8, and what to do. Their names may have any suffix.
_NO_TEXT = {
    b"\x1f\x8b": "is compressed by gzip; unpack it with gunzip",
    b"PAR1": "is a Parquet file; let its name end in .parquet",
    b"PK\x03\x04": "is a ZIP archive or a workbook of Excel; unpack it, or save it as CSV in UTF-8",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
}


class RowFile(Protocol):
    """The rows of one file."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> DataRow:
        """Row `number` of the file. OperatorFault: it cannot be read."""


class RowFiles:
    """The rows of several files, one after the other.

    digest: blake3-256 of the files' bytes. OperatorFault: a file is missing or unreadable, or no file has rows.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        try:
            self._files = [_open(path) for path in paths]
            self.digest = blake3(b"".join(_digest(path) for path in paths)).digest()
        except OSError as error:
            raise path_fault(f"rows: cannot read {error.filename}", error) from error
        self._ends = list(accumulate(map(len, self._files)))
        if not len(self):
            raise OperatorFault(f"rows: {paths[0]} has no rows")

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, number: int) -> DataRow:
        file, own = self._at(number)
        return self._files[file].row(own)

    def place(self, number: int) -> str:
        """For people: where a row is from. Rows count from 0 in each file."""
        file, own = self._at(number)
        return f"row {own} of {self._paths[file].name}"

    def _at(self, number: int) -> tuple[int, int]:
        file = bisect.bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)


class _MappedFile:
    """A memory-mapped file, with the offsets at which its rows begin."""

    def __init__(self, path: Path, begins: Callable[[bytes | mmap.mmap], Iterator[int]]) -> None:
        self.path = path
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            empty = path.stat().st_size == 0
            self.data: bytes | mmap.mmap = (
                b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            )
        for begin, says in _NO_TEXT.items():
            if self.data[: len(begin)] == begin:
                raise OperatorFault(f"rows: {path} {says}")
        self._begins = array("Q", begins(self.data))

    def __len__(self) -> int:
        return max(0, len(self._begins) - 1)

    def text(self, number: int) -> str:
        """The text of row `number`. OperatorFault: it is not UTF-8."""
        try:
            # A file may begin with a byte order mark.
            return self.data[self._begins[number] : self._begins[number + 1]].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise OperatorFault(
                f"rows: {self.path}: row {number} is not UTF-8: {error}; save the file as UTF-8"
            ) from error


class JsonRows:
    """A JSON object in each line."""

    def __init__(self, path: Path) -> None:
        self._file = _MappedFile(path, _line_begins)

    def __len__(self) -> int:
        return len(self._file)

    def row(self, number: int) -> DataRow:
        try:
            row = json.loads(self._file.text(number))
        except (ValueError, RecursionError) as error:
            raise OperatorFault(
                f"rows: {self._file.path}: row {number} is not JSON: {error}"
            ) from error
        if not isinstance(row, dict):
            raise OperatorFault(f"rows: {self._file.path}: row {number} is not a JSON object")
        return row


class CsvRows:
    """Comma-separated values; the first row has the names of the columns."""

    def __init__(self, path: Path) -> None:
        self._file = _MappedFile(path, _record_begins)
        # A value may be as long as the file.
        csv.field_size_limit(max(csv.field_size_limit(), len(self._file.data)))
        self._columns = self._values(0) if len(self._file) else []
        if len(self._columns) == 1 and (other := {";", "\t"}.intersection(self._columns[0])):
            raise OperatorFault(
                f"rows: {path}: {min(other)!r} separates its values; expected commas; save it with commas"
            )
        self._require_well_formed(path)

    def __len__(self) -> int:
        return max(0, len(self._file) - 1)

    def row(self, number: int) -> DataRow:
        return dict(zip(self._columns, self._values(number + 1), strict=False))

    def _require_well_formed(self, path: Path) -> None:
        """OperatorFault: a row does not have as many values as there are columns, perhaps after a stray quote."""
        count = 0
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            try:
                for values in filter(None, csv.reader(file)):
                    if len(values) != len(self._columns):
                        raise OperatorFault(
                            f"rows: {path}: row {count} has {len(values)} values; its columns are "
                            f"{', '.join(self._columns)}; quote texts that have commas or quotes"
                        )
                    count += 1
            except csv.Error as error:
                raise OperatorFault(f"rows: {path}: row {count} is not CSV: {error}") from error
        if count != len(self._file):
            raise OperatorFault(
                f"rows: {path}: {len(self._file)} lines hold {count} rows; a quote inside a text "
                'must be doubled: ""'
            )

    def _values(self, number: int) -> list[str]:
        try:
            # Blank lines after a row belong to its text.
            values = next(csv.reader(StringIO(self._file.text(number), newline=""), strict=True))
        except csv.Error as error:
            raise OperatorFault(
                f"rows: {self._file.path}: row {number} is not CSV: {error}"
            ) from error
        return values


class ArrowRows:
    """A Parquet or Arrow file: batches of rows. The batch that was used last is kept."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet
        except ImportError as error:
            raise OperatorFault(f"rows: {path} needs pyarrow: {install_command('rows')}") from error
        try:
            if path.suffix.lower() == ".parquet":
                table = pa.parquet.ParquetFile(path, memory_map=True)
                sizes = [
                    table.metadata.row_group(at).num_rows for at in range(table.num_row_groups)
                ]
                self._read: Callable[[int], Any] = table.read_row_group
            else:
                batches = pa.ipc.open_stream(pa.memory_map(str(path))).read_all().to_batches()
                sizes = [batch.num_rows for batch in batches]
                self._read = batches.__getitem__
        except pa.ArrowException as error:
            raise OperatorFault(f"rows: {path} cannot be read: {error}") from error
        self._ends = list(accumulate(sizes))
        self._kept: tuple[int, list[DataRow]] = (-1, [])
        self._next = 0  # the row after the one that was read last
        self._batch: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> DataRow:
        batch = bisect.bisect_right(self._ends, number)
        first = self._ends[batch - 1] if batch else 0
        if self._batch[0] != batch:
            self._batch = batch, self._read(batch)
        block = first + (number - first) // ROWS_KEPT * ROWS_KEPT
        follows, self._next = number == self._next, number + 1
        if self._kept[0] != block and not follows:
            # Rows are read in a random order, so the other rows of the block would not be used.
            (found,) = self._batch[1].slice(number - first, 1).to_pylist()
            return dict(found)
        if self._kept[0] != block:
            self._kept = block, self._batch[1].slice(block - first, ROWS_KEPT).to_pylist()
        return self._kept[1][number - block]


# The suffix of a file's name decides its kind.
_KINDS: Mapping[str, Callable[[Path], RowFile]] = {
    ".jsonl": JsonRows,
    ".ndjson": JsonRows,
    ".csv": CsvRows,
    ".parquet": ArrowRows,
    ".arrow": ArrowRows,
}


def found_files(paths: Sequence[str] | str) -> list[Path]:
    """The files of these paths. OperatorFault: there are none."""
    patterns = [paths] if isinstance(paths, str) else paths
    found = [path for pattern in patterns for path in _found(pattern)]
    if not found:
        raise OperatorFault(f"rows: expected at least one file; found none at {paths}")
    return found


def _found(pattern: str) -> list[Path]:
    """The files of a path, which may be a pattern or a directory that `datasets` saved."""
    path = Path(pattern)
    if not path.exists():
        try:
            path = path.expanduser()
        except RuntimeError as error:
            raise OperatorFault(f"rows: {pattern}: {error}") from error
    if has_magic(pattern) and not path.exists():
        return sorted(path.parent.glob(path.name))
    if not path.is_dir():
        return [path]
    state = path / "state.json"
    try:
        names = [each["filename"] for each in json.loads(state.read_bytes())["_data_files"]]
    except FileNotFoundError:
        raise OperatorFault(
            f"rows: {path} is a directory without state.json; expected a file, a pattern such as "
            f"{path}/*.jsonl, or one split of what `datasets` saved to disk"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorFault(f"rows: {state} cannot be read: {error}") from error
    return [path / name for name in names]


def _open(path: Path) -> RowFile:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise OperatorFault(
            f"rows: {path}: expected a file that ends in {', '.join(_KINDS)}; found {path.suffix!r}"
        )
    return kind(path)


def _digest(path: Path) -> bytes:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()


def _line_begins(data: bytes | mmap.mmap) -> Iterator[int]:
    """Where each line that is not blank begins, and where the last one ends."""
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        if end > at and data[at:end].strip():
            yield at
        at = end + 1
    if data[at:].strip():
        yield at
    yield len(data)


def _record_begins(data: bytes | mmap.mmap) -> Iterator[int]:
    """Where each record begins: a line break between quotes is part of a value."""
    at = begin = quotes = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end + 1
        quotes += data[at:end].count(b'"')
        at = end
        if quotes % 2 == 0:
            if data[begin:at].strip():
                yield begin
            begin = at
    if begin < len(data):
        yield begin
    yield len(data)
