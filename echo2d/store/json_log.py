"""Write records, such as the gateway's calls, as JSON lines into rotating files of bounded size.

    NAME.jsonl (newest) -> NAME.1.jsonl -> ... -> NAME.<FILES - 1>.jsonl -> deleted

Files are private (mode 0600) and not synced: a crash may lose the last lines. Blocking functions.
Not here: the contents of the records.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from echo2d.errors import path_fault
from echo2d.store.disk import opened, store_faults

log = logging.getLogger("echo2d.store")

_SUM = b',"sum":'  # a checksum of all that comes before it in the line
FILES = 4  # a rotation deletes the oldest quarter


class Numbers(Protocol):
    """An array of the standard library or numpy, which takes a fifth of a list's memory until it is
    written.
    """

    def tolist(self) -> list[Any]: ...


class JsonLog:
    """The log `name` in `directory`, of at most `bytes_max` bytes. A record longer than a file is left
    out.
    """

    def __init__(self, directory: Path, name: str, bytes_max: int) -> None:
        self._paths = log_files(directory, name)
        self._file_bytes_max = bytes_max // FILES

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records. StoreFault: the disk refused; some of them may have been written."""
        path = self._paths[0]
        with store_faults("writing", path):
            size = path.stat().st_size if path.exists() else 0
            for record in records:
                line = _with_sum(json.dumps(record, separators=(",", ":"), default=_plain)) + b"\n"
                if len(line) > self._file_bytes_max:
                    continue
                if size + len(line) > self._file_bytes_max:
                    self._rotate()
                    size = 0
                size += _append(path, line)

    def _rotate(self) -> None:
        for older, newer in zip(self._paths[:0:-1], self._paths[-2::-1], strict=True):
            if newer.exists():
                newer.replace(older)


def log_files(directory: Path, name: str) -> list[Path]:
    """The files of a log, the newest first; some of them may not exist yet."""
    older = (f"{name}.{number}.jsonl" for number in range(1, FILES))
    return [directory / file for file in (f"{name}.jsonl", *older)]


def read_json_log(directory: Path, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a log, the oldest first. OperatorFault: a file cannot be read.

    Lines that a crash cut short or the disk damaged are left out.
    """
    damaged = 0
    for path in reversed(log_files(directory, name)):
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise path_fault(f"cannot read {path}", error) from error
        for line in lines:
            body, _, check = line.rpartition(_SUM)
            found = None
            if check == b'"%08x"}' % zlib.crc32(body):
                with suppress(ValueError):
                    found = json.loads(line)
            if found is None:
                damaged += 1
            else:
                yield found
    if damaged:
        log.warning("%d lines of the log %s are damaged, and left out", damaged, directory / name)


def _with_sum(record: str) -> bytes:
    """The record, a JSON object, with a checksum of the line as its last field."""
    body = record[:-1].encode()
    return body + _SUM + b'"%08x"}' % zlib.crc32(body)


def _plain(numbers: Numbers) -> list[Any]:
    return numbers.tolist()


def _append(path: Path, line: bytes) -> int:
    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        view = memoryview(line)
        while len(view):
            view = view[os.write(fd, view) :]
    return len(line)
