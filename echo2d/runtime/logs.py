"""Logs of a daemon: one line a fact on stderr, key=value. What others wrote cannot end a line or move a cursor."""

import logging

FORMAT = "%(asctime)s level=%(levelname)s area=%(name)s %(message)s"


class OneLine(logging.Formatter):
    """Escapes what is not printable in messages; the traceback of a bug stays readable."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")


def start_logging(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
