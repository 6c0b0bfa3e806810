"""How much may be sent."""

import random

from echo2d.core.topology.token_bucket import BURST_S, HEADERS, TokenBucket


def test_a_pause_allows_no_more_than_a_burst() -> None:
    allowance = TokenBucket(1e6, now=0.0)
    assert allowance.wait_s(now=100.0) == 0
    allowance.spend(round(2 * BURST_S * 1e6 / HEADERS), now=100.0)
    assert abs(allowance.wait_s(now=100.0) - BURST_S) < 1e-6
    assert allowance.wait_s(now=100.0 + 2 * BURST_S) == 0


def test_over_any_time_no_more_is_sent_than_is_allowed() -> None:
    rng, rate, now, sent = random.Random(1), 1e6, 5.0, 0.0
    allowance = TokenBucket(rate, now=now)
    largest = 256 << 10
    while now < 65.0:
        now += rng.uniform(0.0, 0.01)
        while allowance.wait_s(now=now) == 0:
            size = rng.randrange(1, largest)
            allowance.spend(size, now=now)
            sent += HEADERS * size
        assert sent <= rate * (now - 5.0 + BURST_S) + HEADERS * largest
    assert sent > 0.99 * rate * 60.0
