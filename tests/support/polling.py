"""Waits until another process or thread has done something."""

import time
from collections.abc import Callable

# The longest time that a test waits for something that must come. Only a program that hangs takes this
# long; a busy machine makes every wait longer, and must not make a test fail.
HANG_S = 120.0
# The same if a program must first start and load torch.
START_S = 180.0


def poll(
    condition: Callable[[], bool], *, timeout_s: float = START_S, interval_s: float = 0.05
) -> None:
    """Wait until the condition is true; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {timeout_s:g} s"
        time.sleep(interval_s)
