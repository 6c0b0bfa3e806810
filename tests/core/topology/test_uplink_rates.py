"""A peer's uplink is found by what its receivers got of it, and neither noise, pacing, hunger nor a liar hides it."""

import random

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology import uplink_rates as module
from echo2d.core.topology.uplink_rates import (
    BEHIND_S,
    HELD_UP,
    JUMP_MAX,
    LATE_S,
    PACE,
    RAISE,
    RAISES_MAX,
    REST_VERSIONS,
    UPLINK_MIN,
    PeerRate,
    Rates,
)

A, B, C, D, E = (PeerId(name) for name in "abcde")
LONG_S = 2 * BEHIND_S


def version(
    rates: Rates,
    sender: PeerId,
    got: dict[PeerId, float],
    backlog: float = 1.0,
    seconds: float = LONG_S,
) -> None:
    """A version of which every receiver gets a whole copy from the sender, at these bytes/s."""
    rates.begin({(sender, receiver): 1.0 for receiver in got})
    for receiver, bytes_per_s in got.items():
        rates.received(sender, receiver, round(bytes_per_s * seconds), seconds, now=0.0)
        rates.backlogged(sender, receiver, backlog * seconds)
    rates.judge()
    rates.check()


def held_up(rates: Rates, uplink: float, noise: float = 1.0) -> None:
    """A version in which A has always more to send than its uplink, or pace, takes."""
    pace = rates.pace(A)
    version(rates, A, {B: noise * (uplink if pace is None else min(uplink, pace))})


def known(bytes_per_s: float) -> Rates:
    return Rates([PeerRate(A, bytes_per_s, held_up=True)])


# --- samples


def test_an_uplink_is_what_all_receivers_got_together() -> None:
    rates = Rates()
    assert (rates.uplink(A), rates.pace(A)) == (None, None)
    rates.begin({(A, B): 0.25, (A, C): 0.75})
    rates.received(A, B, 1000, 2.0, now=0.0)
    for _ in range(2):
        rates.received(A, C, 1500, 1.0, now=0.0)
    rates.backlogged(A, B, 2.0)
    rates.backlogged(A, C, 2.0)
    assert rates.judge() == (PeerRate(A, 2000.0, held_up=True),)
    assert (rates.uplink(A), rates.pace(A)) == (2000.0, PACE * 2000.0)
    assert rates.judge() == ()


@pytest.mark.parametrize("liars", [0, 1])
def test_seconds_in_which_everybody_was_held_up_do_not_lower_a_rate(liars: int) -> None:
    rates = Rates()
    receivers = (B, C, D)
    rates.begin({(A, receiver): 1.0 for receiver in receivers})
    for second, share in enumerate((0.3, 1.0, 1.0, 0.5, 1.0, 1.02)):
        for number, receiver in enumerate(receivers):
            times = 100.0 if number < liars else 1.0
            rates.received(
                A, receiver, round(times * share * 10_000), 1.0, now=second + 0.3 * number
            )
            rates.backlogged(A, receiver, 1.0)
    rates.judge()
    rates.check()
    assert rates.uplink(A) == pytest.approx(3 * 10_000, rel=0.03)


def test_what_is_not_in_the_plan_counts_for_nothing() -> None:
    rates = Rates()
    rates.begin({(A, B): 1.0})
    rates.received(C, B, 10**9, LONG_S, now=0.0)
    rates.backlogged(A, D, LONG_S)
    rates.check()
    assert rates.judge() == ()


def test_a_relay_with_nothing_to_pass_on_is_not_slow() -> None:
    """All links of a chain show the rate of the slowest one upstream."""
    rates = Rates(
        PeerRate(peer, rate, held_up=True) for peer, rate in ((A, 100.0), (B, 50.0), (C, 100.0))
    )
    for _ in range(2):
        rates.begin({(A, B): 1.0, (B, C): 1.0, (C, D): 1.0})
        for sender, receiver in ((A, B), (B, C), (C, D)):
            rates.received(sender, receiver, round(10 * LONG_S), LONG_S, now=0.0)
        rates.backlogged(A, B, LONG_S)
        rates.backlogged(B, C, 0.9 * HELD_UP * LONG_S)
        rates.judge()
    assert [rates.uplink(peer) for peer in (A, B, C)] == [100 / JUMP_MAX, 50, 100]


def test_a_first_sample_without_backlog_is_a_least_rate_and_counts_as_the_usual_one() -> None:
    rates = Rates([PeerRate(peer, 100.0, held_up=True) for peer in (C, D)])
    version(rates, A, {B: 40.0}, backlog=0.0)
    assert (rates.uplink(A), rates.pace(A)) == (40.0, None)
    assert rates.to_plan_with(C, [A, D]) == {A: 100.0, C: 100.0, D: 100.0}
    version(rates, A, {B: 130.0}, backlog=0.0)
    version(rates, A, {B: 120.0}, backlog=0.0)
    assert (rates.uplink(A), rates.pace(A)) == (120.0, None)
    version(rates, A, {B: 120.0})
    assert (rates.uplink(A), rates.pace(A)) == (120.0, PACE * 120.0)


def test_what_only_one_version_has_shown_is_not_believed() -> None:
    """It came out of buffers, the first time or later."""
    rates = Rates([PeerRate(C, 50.0, held_up=False)])
    for mbytes in (200.0, 100.0, 90.0, 300.0, 95.0):
        version(rates, A, {B: mbytes}, backlog=0.0)
        version(rates, C, {B: 40.0}, backlog=0.0)
    assert [rates.uplink(peer) for peer in (A, C)] == [100.0, 50.0]


def test_least_rates_count_for_more_as_far_as_it_is_of_use() -> None:
    """A chain needs no more of its relays than the root can send. Of E nothing is known."""
    rates = Rates(
        [
            PeerRate(A, 100.0, held_up=True),
            *(PeerRate(peer, 20.0, held_up=False) for peer in (B, C, D)),
        ]
    )
    assert rates.to_plan_with(A, [B, C, D, E]) == {A: 100.0, B: 40.0, C: 40.0, D: 40.0}
    slow_root = Rates(
        [PeerRate(A, 35.0, held_up=True), *(PeerRate(peer, 20.0, held_up=False) for peer in (B, C))]
    )
    assert slow_root.to_plan_with(A, [B, C]) == {A: 35.0, B: 35.0, C: 35.0}
    assert rates.to_plan_with(E, [A, B]) == {A: 100.0, B: 20.0}


def test_who_is_nearly_like_the_others_is_planned_like_them() -> None:
    """Of peers that are alike chance makes a plan of many links; the root's own rate counts as it is."""
    found = {A: 103.0, B: 95.0, C: 100.0, D: 104.0, E: 60.0}
    rates = Rates(PeerRate(peer, rate, held_up=True) for peer, rate in found.items())
    assert rates.to_plan_with(A, [B, C, D, E]) == {A: 103.0, B: 100.0, C: 100.0, D: 100.0, E: 60.0}


def test_a_receiver_whose_own_uplink_is_full_proves_nothing() -> None:
    """Its acknowledgements wait behind what it sends."""
    rates = Rates()
    rates.begin({(A, B): 1.0, (B, C): 1.0})
    for sender, receiver, bytes_per_s in ((A, B, 20), (B, C, 5)):
        rates.received(sender, receiver, round(bytes_per_s * LONG_S), LONG_S, now=0.0)
        rates.backlogged(sender, receiver, LONG_S)
    assert [kept.held_up for kept in rates.judge()] == [False, True]


def test_a_slow_downlink_says_nothing_of_the_sender() -> None:
    rates = known(300.0)
    for _ in range(2):
        rates.begin({(A, peer): 1.0 for peer in (B, C, D)})
        for peer, bytes_per_s, backlog_s in ((B, 60, 0.0), (C, 60, 0.0), (D, 5, LONG_S)):
            rates.received(A, peer, round(bytes_per_s * LONG_S), LONG_S, now=0.0)
            rates.backlogged(A, peer, backlog_s)
        rates.judge()
    assert rates.uplink(A) == 300


@pytest.mark.parametrize("lie", [1.0, 10_000.0])
def test_one_of_three_receivers_cannot_move_a_rate(lie: float) -> None:
    rates = Rates()
    for _ in range(10):
        pace = rates.pace(A) or 300.0
        version(rates, A, {B: min(100.0, pace / 3), C: min(100.0, pace / 3), D: lie})
    assert rates.uplink(A) == pytest.approx(300, rel=0.15)


@pytest.mark.parametrize("seconds", [1000.0, 0.1])
def test_an_only_receiver_cannot_either(seconds: float) -> None:
    """It says that the bytes of 10 s, in which the sender was always backlogged, took so long."""
    rates = known(100.0)
    for _ in range(10):
        rates.begin({(A, B): 1.0})
        rates.received(A, B, round(10.0 * min(100.0, rates.pace(A) or 100.0)), seconds, now=0.0)
        rates.backlogged(A, B, 10.0)
        rates.judge()
    assert rates.uplink(A) == pytest.approx(100, rel=0.15)


@pytest.mark.parametrize("seconds", [0.1, 10.0 - LATE_S])
def test_a_time_that_the_sender_contradicts_is_not_believed(seconds: float) -> None:
    rates = Rates()
    rates.begin({(A, B): 1.0})
    rates.received(A, B, 1000, seconds, now=0.0)
    rates.backlogged(A, B, 10.0)
    rates.judge()
    assert rates.uplink(A) == 1000 / (10.0 - LATE_S)


def test_short_samples_do_not_lower() -> None:
    rates = known(100.0)
    version(rates, A, {B: 50.0}, seconds=0.9 * BEHIND_S)
    assert rates.uplink(A) == 100
    version(Rates(), A, {B: 0.0})


def test_a_liar_does_not_matter_where_an_honest_report_comes_late() -> None:
    s, a, b, c = E, A, B, C
    rates = Rates()
    rates.begin({(s, r): 0.5 for r in (a, b, c)})
    for second in range(8):
        rates.received(s, a, 1_000_000, 1.0, now=second + 0.5)
        if second % 2 == 0:
            rates.received(
                s, b, 2_000_000, 2.0, now=second + 0.5
            )  # two reports in one window: jitter
        rates.received(s, c, 1_000_000_000, 1.0, now=second + 0.5)
    rates.judge()
    assert rates.uplink(s) == pytest.approx(3_000_000, rel=0.2)


# --- pacing


def test_a_link_whose_rate_doubles_is_found() -> None:
    rates = Rates()
    for _ in range(10):
        held_up(rates, 100.0)
    assert rates.uplink(A) == pytest.approx(100, rel=0.06)
    for _ in range(REST_VERSIONS + RAISES_MAX + 2):
        held_up(rates, 200.0)
    assert rates.uplink(A) == pytest.approx(200, rel=0.06)


def test_the_pace_is_raised_step_by_step_and_then_left_off() -> None:
    rates = known(100.0)
    for rest in (1, REST_VERSIONS):
        before = rates.uplink(A) or 0.0
        paces = []
        for _ in range(rest + RAISES_MAX + 1):
            paces.append(rates.pace(A))
            held_up(rates, 2 * before)
        steps = [RAISE ** (1 + number) * before for number in range(RAISES_MAX)]
        assert paces == pytest.approx([PACE * before] * rest + steps + [None])
        assert rates.uplink(A) == 2 * before


def test_one_sample_without_pace_that_is_near_is_enough_after_raising() -> None:
    rates = known(100.0)
    for _ in range(1 + RAISES_MAX):
        held_up(rates, 200.0)
    assert rates.pace(A) is None
    held_up(rates, 110.0)
    assert (rates.uplink(A), rates.pace(A)) == (110.0, PACE * 110.0)


@pytest.mark.parametrize(("second", "then"), [(100.0, 100.0), (40.0, 50.0), (60.0, 60.0)])
def test_two_samples_in_a_row_lower_a_rate_and_the_second_is_without_pace(
    second: float, then: float
) -> None:
    rates = known(100.0)
    held_up(rates, 50.0)
    assert (rates.uplink(A), rates.pace(A)) == (100.0, None)
    held_up(rates, second)
    assert (rates.uplink(A), rates.pace(A)) == (then, PACE * then)


@pytest.mark.parametrize("least", [0.97, 0.9, 0.8, 0.6])
def test_fifty_versions_of_noise_do_not_let_it_drift_down(least: float) -> None:
    """Goodput between `least` and all of what the pace or the uplink allows."""
    for rng_seed in range(20):
        rng = random.Random(rng_seed)
        rates = known(100.0)
        seen = []
        for _ in range(50):
            held_up(rates, 100.0, noise=rng.uniform(least, 1.0))
            seen.append(rates.uplink(A) or 0.0)
        assert PACE * least * 100 <= min(seen) <= max(seen) <= RAISE * 100, rng_seed


def test_a_goodput_that_always_stays_behind_the_pace_does_not_shrink_it() -> None:
    rates = known(100.0)
    for _ in range(50):
        held_up(rates, 100.0, noise=0.85)
    assert (rates.uplink(A) or 0.0) > 80 * 0.85


def test_who_passes_nothing_on_is_tried_again_some_day() -> None:
    rates = Rates(
        [
            PeerRate(A, 100.0, held_up=True),
            PeerRate(B, 10.0, held_up=True),
            PeerRate(C, 100.0, held_up=True),
        ]
    )
    version(rates, A, {B: 90.0})
    assert rates.uplink(B) == pytest.approx(10 * RAISE)
    version(rates, B, {A: 9.0})
    assert rates.uplink(B) == pytest.approx(10 * RAISE)
    for _ in range(100):
        version(rates, A, {B: 100.0})
    assert rates.uplink(B) == pytest.approx(100, rel=0.06)


# --- limits


def test_a_receiver_that_reports_next_to_nothing_leaves_a_rate_to_plan_with() -> None:
    rates = Rates()
    rates.begin({(A, B): 1.0})
    rates.received(A, B, 1, 1e308, now=0.0)
    rates.judge()
    rates.check()
    assert rates.uplink(A) == UPLINK_MIN


def test_the_number_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PEERS_MAX", 2)
    rates = Rates(PeerRate(peer, 10.0, held_up=True) for peer in (A, B, C))
    rates.check()
    version(rates, B, {A: 10.0})
    version(rates, D, {A: 10.0})
    assert [rates.uplink(peer) for peer in (A, B, C, D)] == [None, pytest.approx(10), None, 10]
