"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable

# The longest that a test waits for something that must come. Only what hangs takes so long: on a
# busy machine every wait is longer than on a quiet one, and that must not fail a test.
HANG_S = 120.0
# The same for a program that has to start, and to load torch, before it does what is waited for.
START_S = 180.0


def poll(
    condition: Callable[[], bool], *, timeout_s: float = START_S, interval_s: float = 0.05
) -> None:
    """Wait until the condition is true; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {timeout_s:g} s"
        time.sleep(interval_s)
