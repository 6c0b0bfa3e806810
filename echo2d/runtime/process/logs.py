"""Logging of a daemon: one line per fact on stderr, as `kind key=value ...` or as a JSON object.

Other machines influence the text and the number of some lines. Therefore a message never breaks a
line, and at most LINES_PER_S_MAX lines of one kind are written per second. STORY is the log of the
work itself (docs/operating.md). It is not throttled, because each of its lines stands for work that
was granted or accepted.
"""

import json
import logging
from collections import Counter
from typing import Any

FORMAT = "%(asctime)s level=%(levelname)s area=%(name)s %(message)s"
# Lines of one kind per second. More would be a flood that fills the disk.
LINES_PER_S_MAX = 100
STORY = "echo2d.story"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class OneLine(logging.Formatter):
    """Text lines: an unprintable character of a message becomes a blank.

    Tracebacks are our own text and keep their line breaks.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        if not record.message.isprintable():
            record.message = "".join(char if char.isprintable() else " " for char in record.message)
        return super().formatMessage(record)


class JsonLine(logging.Formatter):
    """JSON lines: time, level, area and message, and the facts of a line under their own names."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

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


def start_logging(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Set up the logging of this process; it replaces an earlier setup."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLine() if as_json else OneLine(FORMAT))
    handler.addFilter(Throttle())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def present() -> tuple[int, bool]:
    """The arguments of `start_logging`, for a child process that must log the same way."""
    root = logging.getLogger()
    return root.level, any(isinstance(handler.formatter, JsonLine) for handler in root.handlers)
