"""Logs of a daemon: one line a fact on stderr, key=value.

Others decide what some lines say and how often: a line stays one line, and those of one kind are LINES_PER_S_MAX.
"""

import logging
from collections import Counter

FORMAT = "%(asctime)s level=%(levelname)s area=%(name)s %(message)s"
LINES_PER_S_MAX = 100  # with the same format; more is somebody's flood, and a disk that fills


class OneLine(logging.Formatter):
    """What is not printable in a message becomes a blank; tracebacks of our own keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = "".join(char if char.isprintable() else " " for char in record.message)
        return super().formatMessage(record)


class Throttle(logging.Filter):
    """Passes LINES_PER_S_MAX records of one format a second; the next second begins by saying how many it held back."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._passed: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        if int(record.created) != self._second:
            held_back = sum(max(0, count - LINES_PER_S_MAX) for count in self._passed.values())
            self._second = int(record.created)
            self._passed.clear()
            if held_back:
                record.msg, record.args = f"(held_back={held_back}) {record.getMessage()}", None
        self._passed[kind] += 1
        return self._passed[kind] <= LINES_PER_S_MAX


def start_logging(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT))
    handler.addFilter(Throttle())
    logging.basicConfig(level=level, handlers=[handler], force=True)
