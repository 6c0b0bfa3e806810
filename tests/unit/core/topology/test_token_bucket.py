"""How much may be sent."""

import random

import pytest

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


def test_without_a_rate_nothing_waits() -> None:
    allowance = TokenBucket(None, now=0.0)
    allowance.spend(10**12, now=0.0)
    assert allowance.wait_s(now=0.0) == 0


def test_a_rate_holds_from_when_it_is_set() -> None:
    allowance = TokenBucket(None, now=0.0)
    allowance.change(1e6, now=10.0)
    allowance.spend(round(1e6 / HEADERS), now=10.0)
    assert allowance.wait_s(now=10.0) == pytest.approx(1.0, abs=1e-5)


def test_what_was_overspent_is_paid_at_the_new_rate() -> None:
    allowance = TokenBucket(1e6, now=0.0)
    allowance.spend(round((1 + BURST_S) * 1e6 / HEADERS), now=0.0)
    allowance.change(4e6, now=0.5)
    assert allowance.wait_s(now=0.5) == pytest.approx(0.5 / 4, abs=1e-5)


def test_without_a_rate_any_more_nothing_is_left_to_pay() -> None:
    allowance = TokenBucket(1e6, now=0.0)
    allowance.spend(10**9, now=0.0)
    allowance.change(None, now=1.0)
    assert allowance.wait_s(now=1.0) == 0
