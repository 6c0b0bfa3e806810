"""The rate that an uplink carries is found and followed, on a simulated uplink in virtual time."""

import random
from dataclasses import dataclass, field

import pytest

from echo2d.core.topology.uplink_pace import (
    BURST_S,
    HEADERS,
    LONG,
    LOOK_S,
    LOSS_MAX,
    RATE_MIN,
    Sent,
    TokenBucket,
    UplinkPace,
)

STEP_S = 0.01
TRIP_S = 0.04
# Connections that probe send this much more than the uplink carries, unless the pace holds them.
PROBING = 1.25
MB = 1e6


@dataclass
class Uplink:
    """A line with a short queue that drops what does not fit; what is dropped is sent again at once.

    rate: bytes/s. queue_s: what the queue holds. noise: of what is sent, this share is lost on the way.
    wanted: bytes/s that there are to send.
    """

    rate: float
    queue_s: float = 0.02
    noise: float = 0.0
    wanted: float = 1e12
    pace: UplinkPace = field(default_factory=UplinkPace)
    now: float = 0.0
    sent: float = 0.0
    again: float = 0.0
    acknowledged: float = 0.0
    queued: float = 0.0
    lost: float = 0.0

    def run(self, seconds: float) -> "Uplink":
        """Sends for so long and looks every LOOK_S. Returns what it did in this time."""
        began = self.so_far
        for step in range(1, round(seconds / STEP_S) + 1):
            self._step()
            if step % round(LOOK_S / STEP_S) == 0:
                trip_s = TRIP_S + self.queued / self.rate
                self.pace.look(self.now, self.so_far, long_trips=trip_s > LONG * TRIP_S)
        done = self.so_far
        return Uplink(
            self.rate,
            sent=done.sent - began.sent,
            again=done.again - began.again,
            acknowledged=done.acknowledged - began.acknowledged,
            now=seconds,
        )

    def _step(self) -> None:
        self.now += STEP_S
        able = min(PROBING * self.rate, self.wanted, self.pace.bytes_per_s or 1e12) * STEP_S
        again = min(self.lost, able)
        self.lost += self.noise * able - again
        self.sent, self.again = self.sent + able, self.again + again
        self.queued += (1 - self.noise) * able
        served = min(self.queued, self.rate * STEP_S)
        self.queued -= served
        dropped = max(0.0, self.queued - self.queue_s * self.rate)
        self.queued -= dropped
        self.lost += dropped
        self.acknowledged += served

    @property
    def so_far(self) -> Sent:
        return Sent(round(self.sent), round(self.again), round(self.acknowledged))

    @property
    def goodput(self) -> float:
        """The share of the rate at which bytes arrived."""
        return self.acknowledged / self.now / self.rate

    @property
    def wasted(self) -> float:
        """The share of what was sent that was sent again."""
        return self.again / self.sent


@pytest.mark.parametrize("rate", [0.5 * MB, 10 * MB, 200 * MB])
@pytest.mark.parametrize("queue_s", [0.015, 0.04])
def test_the_rate_of_an_uplink_is_found_within_seconds_and_little_is_sent_again(
    rate: float, queue_s: float
) -> None:
    uplink = Uplink(rate, queue_s)
    assert uplink.pace.bytes_per_s is None
    first = uplink.run(3.0)
    assert uplink.pace.bytes_per_s == pytest.approx(rate, rel=0.1)
    assert first.wasted < 0.03
    then = uplink.run(60.0)
    assert then.wasted < 0.01
    assert then.goodput > 0.98


def test_a_fifth_of_the_bytes_would_be_sent_again_without_a_pace() -> None:
    """What the pace is for."""
    uplink = Uplink(10 * MB)
    for _ in range(1000):
        uplink._step()
    assert uplink.wasted > 0.15


def test_an_uplink_that_is_not_full_is_not_limited() -> None:
    uplink = Uplink(10 * MB, wanted=9 * MB)
    assert uplink.run(20.0).wasted == 0
    assert uplink.pace.bytes_per_s is None


@pytest.mark.parametrize("noise", [2 * LOSS_MAX, 0.1])
def test_loss_without_long_round_trips_slows_nothing(noise: float) -> None:
    """It comes from the line, not from a queue."""
    uplink = Uplink(10 * MB, noise=noise, wanted=9 * MB)
    assert uplink.run(20.0).wasted > LOSS_MAX
    assert uplink.pace.bytes_per_s is None


def test_long_round_trips_without_loss_slow_nothing() -> None:
    """The queue holds all of it."""
    uplink = Uplink(10 * MB, queue_s=1000.0)
    assert uplink.run(20.0).goodput > 0.99
    assert uplink.pace.bytes_per_s is None


def test_a_full_uplink_with_much_loss_is_used_as_well_as_without_a_pace() -> None:
    uplink = Uplink(10 * MB, noise=0.05)
    uplink.run(3.0)
    assert uplink.run(20.0).goodput > 0.9


@pytest.mark.parametrize("slower", [0.8, 0.2])
def test_an_uplink_that_becomes_slower_is_followed(slower: float) -> None:
    uplink = Uplink(10 * MB)
    uplink.run(5.0)
    uplink.rate *= slower
    uplink.run(2.0)
    assert uplink.pace.bytes_per_s == pytest.approx(uplink.rate, rel=0.1)
    then = uplink.run(20.0)
    assert then.wasted < 0.01
    assert then.goodput > 0.98


@pytest.mark.parametrize("faster", [1.5, 10.0])
def test_an_uplink_that_becomes_faster_is_followed(faster: float) -> None:
    uplink = Uplink(10 * MB)
    uplink.run(5.0)
    uplink.rate *= faster
    uplink.run(6.0)
    then = uplink.run(20.0)
    assert then.goodput > 0.98
    assert then.wasted < 0.01


def test_a_rate_that_is_not_used_does_not_grow() -> None:
    uplink = Uplink(10 * MB)
    uplink.run(5.0)
    uplink.wanted = 1 * MB
    uplink.run(60.0)
    assert uplink.pace.bytes_per_s == pytest.approx(10 * MB, rel=0.1)


def test_a_connection_that_disappears_with_its_counters_changes_no_rate() -> None:
    """The sums of what all connections did become smaller."""
    uplink = Uplink(10 * MB)
    for _ in range(10):
        uplink.run(3.0)
        uplink.sent, uplink.again, uplink.acknowledged = (
            0.3 * did for did in (uplink.sent, uplink.again, uplink.acknowledged)
        )
        uplink.run(2 * LOOK_S)
        assert uplink.pace.bytes_per_s == pytest.approx(10 * MB, rel=0.1)
    then = uplink.run(10.0)
    assert then.goodput > 0.98
    assert then.wasted < 0.01


def test_an_interruption_leaves_a_usable_rate() -> None:
    """Nothing is acknowledged for seconds, but messages are sent again."""
    pace = UplinkPace()
    for look in range(30):
        pace.look(look * LOOK_S, Sent(1000 * look, 500 * look, 0), long_trips=True)
        assert pace.bytes_per_s is None or pace.bytes_per_s > 0.9 * RATE_MIN


def test_after_an_interruption_the_rate_is_found_again() -> None:
    uplink = Uplink(10 * MB)
    uplink.run(5.0)
    uplink.rate = 1000.0
    uplink.run(5.0)
    uplink.rate = 10 * MB
    uplink.run(10.0)
    assert uplink.run(10.0).goodput > 0.98


# --- the token bucket


def test_a_pause_allows_no_more_than_a_burst() -> None:
    allowance = TokenBucket(1e6, now=0.0)
    assert allowance.wait_s(now=100.0) == 0
    allowance.spend(round(2 * BURST_S * 1e6 / HEADERS), now=100.0)
    assert abs(allowance.wait_s(now=100.0) - BURST_S) < 1e-6
    assert allowance.wait_s(now=100.0 + 2 * BURST_S) == 0


def test_no_more_is_sent_than_allowed_over_any_time() -> None:
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


def test_no_frame_waits_without_a_rate() -> None:
    allowance = TokenBucket(None, now=0.0)
    allowance.spend(10**12, now=0.0)
    assert allowance.wait_s(now=0.0) == 0


def test_a_rate_is_effective_from_the_time_when_it_is_set() -> None:
    allowance = TokenBucket(None, now=0.0)
    allowance.change(1e6, now=10.0)
    allowance.spend(round(1e6 / HEADERS), now=10.0)
    assert allowance.wait_s(now=10.0) == pytest.approx(1.0, abs=1e-5)


def test_overspent_bytes_are_paid_at_the_new_rate() -> None:
    allowance = TokenBucket(1e6, now=0.0)
    allowance.spend(round((1 + BURST_S) * 1e6 / HEADERS), now=0.0)
    allowance.change(4e6, now=0.5)
    assert allowance.wait_s(now=0.5) == pytest.approx(0.5 / 4, abs=1e-5)


def test_overspent_bytes_are_forgiven_once_there_is_no_rate() -> None:
    allowance = TokenBucket(1e6, now=0.0)
    allowance.spend(10**9, now=0.0)
    allowance.change(None, now=1.0)
    assert allowance.wait_s(now=1.0) == 0
