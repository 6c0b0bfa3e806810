"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable

# How long a program may take to start or to answer. Only a program that hangs takes so long: a busy machine
# makes every wait longer, and must not fail a test.
START_S = 60.0


def poll(
    condition: Callable[[], bool], *, timeout_s: float = START_S, interval_s: float = 0.05
) -> None:
    """Wait until the condition is true; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {timeout_s:g} s"
        time.sleep(interval_s)
