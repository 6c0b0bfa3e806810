"""The logging of every program: one line per fact, as `kind key=value ...` or as a JSON object, on stderr
or in a file of bounded size.

Times are local and have their UTC offset, so that logs of machines in several time zones can be merged. Other machines
influence the text and the number of some lines. Therefore a message never has a line break, and at most
LINES_PER_S_MAX lines of one kind are written per second. STORY is the log of the work itself
(docs/guide/operating.md). It is not throttled, because each of its lines reports work that was granted or accepted.
"""

import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from echo2d.errors import path_fault

FORMAT = "%(asctime)s level=%(levelname)s area=%(name)s %(message)s"
# At most this many lines of one kind are logged per second. Without a limit a flood of lines could fill the disk.
LINES_PER_S_MAX = 100
# A log file of this size is renamed to FILE.1. It has room for weeks of a worker, or for one day of a coordinator that
# leases hundreds of samples per second.
LOG_FILE_BYTES_MAX = 256 << 20
STORY = "echo2d.story"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class _IsoTime(logging.Formatter):
    """ISO 8601 with the UTC offset, such as 2026-11-22T10:31:05.123+01:00."""

    def formatTime(  # noqa: N802 - logging's name
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        assert datefmt is None, "there is one format"
        return datetime.fromtimestamp(record.created).astimezone().isoformat("T", "milliseconds")


class OneLine(_IsoTime):
    """Text lines: an unprintable character of a message becomes a blank.

    Tracebacks are our own text and keep their line breaks.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        if not record.message.isprintable():
            record.message = "".join(char if char.isprintable() else " " for char in record.message)
        return super().formatMessage(record)


class JsonLine(_IsoTime):
    """JSON lines: time, level, area and message, and each fact of a line under its own name."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "area": record.name,
        }
        if record.exc_info:
            facts = {**facts, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, "message": record.getMessage(), **facts})


class Throttle(logging.Filter):
    """Pass at most LINES_PER_S_MAX records of one kind per second.

    The first line of a later second says how many lines were held back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._passed: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == STORY:
            return True
        kind = getattr(record, "facts", {}).get("kind", str(record.msg))
        if int(record.created) != self._second:
            held_back = sum(max(0, count - LINES_PER_S_MAX) for count in self._passed.values())
            self._second = int(record.created)
            self._passed.clear()
            if held_back:
                record.msg, record.args = f"(held_back={held_back}) {record.getMessage()}", None
        self._passed[kind] += 1
        return self._passed[kind] <= LINES_PER_S_MAX


def say(log: logging.Logger, level: int, kind: str, text: str = "", /, **facts: Any) -> None:
    """Log one fact as `kind key=value ... text`.

    A list repeats its key for each value; a fact that is None is left out.
    """
    if log.isEnabledFor(level):
        known = {key: value for key, value in facts.items() if value is not None}
        pairs = [f"{key}={each}" for key, value in known.items() for each in _each(value)]
        words = [kind, *pairs, text] if text else [kind, *pairs]
        log.log(level, "%s", " ".join(words), extra={"facts": {"kind": kind, **known}})


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class LogFile(WatchedFileHandler):
    """The log in a file. A full file is renamed to FILE.1, and a new file is begun.

    Processes that log into one file, such as a coordinator and its seed, need not know of each other:
    each notices that the file was renamed. OperatorFault: the file cannot be opened.
    """

    def __init__(self, path: Path, bytes_max: int = LOG_FILE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        try:
            super().__init__(path, encoding="utf-8")
        except OSError as error:
            raise path_fault(f"--log-file: cannot write {path}", error) from error

    def _open(self) -> TextIOWrapper:
        # Only the owner may read the file, because names of boxes and people may be in it.
        return open(self.baseFilename, "a", encoding="utf-8", opener=partial(os.open, mode=0o600))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.reopenIfNeeded()
            if self.stream is not None and self._is_full(self.stream):
                self._rotate(self.stream)
        except OSError:
            self.handleError(record)
        super().emit(record)

    def _is_full(self, file: TextIOWrapper) -> bool:
        return os.fstat(file.fileno()).st_size >= self._bytes_max

    def _rotate(self, file: TextIOWrapper) -> None:
        # Closing the file releases the lock. Another process may have renamed the file meanwhile.
        fcntl.flock(file, fcntl.LOCK_EX)
        path = Path(self.baseFilename)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            path.replace(f"{path}.1")
        self.reopenIfNeeded()


class _LineHandler(logging.Handler):
    """Passes each line to a function, which shows it."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(self.format(record))


class _Mark(logging.Filter):
    """Puts the same facts at the beginning of every line."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self._facts = facts
        self._words = " ".join(f"{key}={value}" for key, value in facts.items())

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{self._words} {record.getMessage()}", None
        record.facts = {**self._facts, **getattr(record, "facts", {})}
        return True


def start_logging(
    level: int = logging.INFO,
    *,
    as_json: bool = False,
    file: Path | None = None,
    tell: Callable[[str], object] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Set up the logging of this process; it replaces an earlier setup.

    file: log to it instead of stderr. tell: gets the lines instead of stderr. facts: are put into every
    line. OperatorFault: the file cannot be opened.
    """
    handler: logging.Handler = logging.StreamHandler() if tell is None else _LineHandler(tell)
    if file is not None:
        handler = LogFile(file)
    handler.setFormatter(JsonLine() if as_json else OneLine(FORMAT))
    handler.addFilter(Throttle())
    if facts:
        handler.addFilter(_Mark(facts))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def present() -> tuple[int, bool, Path | None]:
    """The present level, whether lines are JSON, and the log file. A child process is given these to log in the same
    way.
    """
    root = logging.getLogger()
    files = [Path(each.baseFilename) for each in root.handlers if isinstance(each, LogFile)]
    as_json = any(isinstance(handler.formatter, JsonLine) for handler in root.handlers)
    return root.level, as_json, files[0] if files else None
