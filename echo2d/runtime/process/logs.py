"""Logs of a daemon: one line a fact on stderr, `kind key=value ...`, or with `as_json` one JSON object a line.

Others decide what some lines say and how often: a line stays one line, and those of one kind are LINES_PER_S_MAX.
STORY is the log of the work itself (docs/operating.md): it has no holes, for each of its lines stands for work that was
granted or accepted.
"""

import json
import logging
from collections import Counter
from typing import Any

FORMAT = "%(asctime)s level=%(levelname)s area=%(name)s %(message)s"
LINES_PER_S_MAX = 100  # of the same kind; more is somebody's flood, and a disk that fills
STORY = "echo2d.story"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class OneLine(logging.Formatter):
    """What is not printable in a message becomes a blank; tracebacks of our own keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = "".join(char if char.isprintable() else " " for char in record.message)
        return super().formatMessage(record)


class JsonLine(logging.Formatter):
    """One object: time, level, area, message as in the text, and the facts of a line that has some by their names."""

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
    """Passes LINES_PER_S_MAX records of one kind a second; the next second begins by saying how many it held back."""

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
    """One fact: `kind key=value ... text`; a list gives its key once for each value, None is left out."""
    if log.isEnabledFor(level):
        known = {key: value for key, value in facts.items() if value is not None}
        pairs = [f"{key}={each}" for key, value in known.items() for each in _each(value)]
        words = [kind, *pairs, text] if text else [kind, *pairs]
        log.log(level, "%s", " ".join(words), extra={"facts": {"kind": kind, **known}})


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def start_logging(level: int = logging.INFO, *, as_json: bool = False) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLine() if as_json else OneLine(FORMAT))
    handler.addFilter(Throttle())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def present() -> tuple[int, bool]:
    """What `start_logging` was told, for a child process that is to log alike."""
    root = logging.getLogger()
    return root.level, any(isinstance(handler.formatter, JsonLine) for handler in root.handlers)
