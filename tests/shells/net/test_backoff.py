"""The time that a program waits between two tries."""

import random

from echo2d.net.backoff import BACKOFF_S_MAX, BACKOFF_S_MIN, Backoff


def test_backoff_grows_to_its_limit_and_resets() -> None:
    backoff = Backoff(random.Random(3))
    delays = [backoff.next_s() for _ in range(40)]
    for n, delay in enumerate(delays):
        full = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(n, 16))
        assert full / 2 <= delay <= full
    backoff.reset()
    assert backoff.next_s() <= BACKOFF_S_MIN
