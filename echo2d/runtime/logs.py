"""Logs of a daemon: one line a fact on stderr, key=value."""

import logging

FORMAT = "%(asctime)s level=%(levelname)s area=%(name)s %(message)s"


def start_logging(level: int = logging.INFO) -> None:
    logging.basicConfig(level=level, format=FORMAT, force=True)
