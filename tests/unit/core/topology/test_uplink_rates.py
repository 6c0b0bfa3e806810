"""A peer's uplink is the rate at which its receivers got data while it had something to send."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology import uplink_rates as module
from echo2d.core.topology.plan import RELAY, Plan, Stripe, Tree
from echo2d.core.topology.planner import plan_star
from echo2d.core.topology.uplink_rates import (
    ALIKE,
    BUSY_S,
    HELD_UP,
    JUMP_MAX,
    SAMPLE_S_MIN,
    UPLINK_MIN,
    PeerRate,
    Rates,
)
from tests.support.plans import JOB, ONE, facts

S, A, B, C, D = (PeerId(name) for name in "sabcd")
STAR = plan_star(ONE, JOB, facts("s"), [facts(name) for name in "abcd"])
SECONDS = 10.0


# The root sends to A, and A to all others.
TREE = Tree(S, {A: S, B: A, C: A, D: A})
RELAYING = replace(STAR, shape=RELAY, stripes=(Stripe(1.0, TREE),))


def version(
    rates: Rates,
    sender: PeerId,
    got: dict[PeerId, float],
    busy_s: float = SECONDS,
    seconds: float = SECONDS,
    plan: Plan = RELAYING,
) -> tuple[PeerRate, ...]:
    """A version in which each receiver gets so many bytes/s from the sender."""
    rates.begin(plan)
    for receiver, bytes_per_s in got.items():
        rates.received(sender, receiver, round(bytes_per_s * seconds), seconds)
    rates.busy(sender, busy_s)
    rates.check()
    changed = rates.judge()
    rates.check()
    return changed


def known(*found: tuple[PeerId, float], held_up: bool = True) -> Rates:
    return Rates(PeerRate(peer, bytes_per_s, held_up) for peer, bytes_per_s in found)


# --- what one version shows


def test_the_uplink_of_a_peer_that_never_sent_is_unknown() -> None:
    rates = Rates()
    assert rates.uplink(A) is None
    assert rates.to_plan_with([A]) == {}


def test_an_uplink_is_what_all_receivers_got_in_its_busy_time() -> None:
    rates = Rates()
    assert version(rates, A, dict.fromkeys((B, C, D), 100.0), busy_s=8.0) == (
        PeerRate(A, 3 * 100.0 * SECONDS / 8.0, held_up=True),
    )
    assert rates.uplink(A) == 375


def test_reports_about_one_link_add_up() -> None:
    rates = Rates()
    rates.begin(RELAYING)
    for payload_bytes, seconds in ((1000, 1.0), (3000, 3.0)):
        rates.received(A, B, payload_bytes, seconds)
        rates.busy(A, seconds)
    assert rates.judge() == (PeerRate(A, 1000.0, held_up=True),)


def test_the_root_sends_each_relay_what_it_can_pass_on_and_all_of_it_counts() -> None:
    rates = Rates()
    version(rates, S, {A: 300.0, B: 100.0, C: 20.0, D: 10.0}, plan=STAR)
    assert rates.uplink(S) == 430


@pytest.mark.parametrize("busy_s", [0.0, 0.9 * HELD_UP * SECONDS])
def test_a_seldom_busy_peer_has_only_a_lower_bound(busy_s: float) -> None:
    rates = Rates()
    assert version(rates, A, {B: 100.0}, busy_s=busy_s) == (PeerRate(A, 100.0, held_up=False),)


def test_a_short_busy_time_measures_buffers_and_no_rate() -> None:
    (found,) = version(Rates(), A, {B: 100.0}, busy_s=0.9 * BUSY_S, seconds=0.9 * BUSY_S)
    assert not found.held_up


def test_a_transfer_out_of_buffers_measures_nothing() -> None:
    assert version(Rates(), A, {B: 100.0}, seconds=SAMPLE_S_MIN) == ()


def test_links_that_are_not_in_the_plan_do_not_count() -> None:
    assert version(Rates(), B, {C: 10.0**9}) == ()


def test_reports_before_a_plan_and_after_its_end_do_not_count() -> None:
    rates = Rates()
    rates.received(A, B, 1000, SECONDS)
    rates.busy(A, SECONDS)
    assert rates.judge() == ()
    version(rates, A, {B: 100.0})
    rates.received(A, B, 10**9, SECONDS)
    assert rates.judge() == ()


# --- lies


@pytest.mark.parametrize("lie", [0.1, 10.0**6])
def test_one_of_three_receivers_cannot_move_the_rate_of_a_relay(lie: float) -> None:
    rates = Rates()
    version(rates, A, {B: 100.0, C: 100.0, D: lie})
    assert rates.uplink(A) == 300


def test_no_receiver_counts_with_more_bytes_than_the_form() -> None:
    rates = Rates()
    version(rates, A, {B: 10.0 * JOB.wire_bytes})
    assert rates.uplink(A) == JOB.wire_bytes / SECONDS


def test_a_sender_that_claims_little_busy_time_gets_no_higher_rate_than_its_receivers_saw() -> None:
    rates = Rates()
    version(rates, A, {B: 100.0}, busy_s=0.001)
    assert rates.uplink(A) == 100


def test_a_receiver_that_reports_next_to_nothing_leaves_a_rate_to_plan_with() -> None:
    rates = Rates()
    rates.begin(RELAYING)
    rates.received(A, B, 1, 1e308)
    rates.judge()
    rates.check()
    assert rates.uplink(A) == UPLINK_MIN


# --- one version after another


def test_a_rate_is_averaged_with_the_one_before() -> None:
    rates = known((A, 100.0))
    version(rates, A, {B: 400.0})
    assert rates.uplink(A) == pytest.approx(200.0)


@pytest.mark.parametrize(("sample", "times"), [(1e6, JUMP_MAX), (2.0, 1 / JUMP_MAX)])
def test_one_version_changes_a_rate_by_a_limited_factor(sample: float, times: float) -> None:
    rates = known((A, 1000.0))
    version(rates, A, {B: sample})
    assert rates.uplink(A) == pytest.approx(1000.0 * times**0.5)


def test_a_link_whose_rate_doubles_is_found() -> None:
    rates = known((A, 100.0))
    for _ in range(8):
        version(rates, A, {B: 200.0})
    assert rates.uplink(A) == pytest.approx(200.0, rel=0.01)


def test_a_first_rate_replaces_a_lower_bound() -> None:
    rates = known((A, 300.0), held_up=False)
    version(rates, A, {B: 100.0})
    assert rates.uplink(A) == 100


@pytest.mark.parametrize(("before", "then"), [(50.0, 80.0), (200.0, 200.0)])
def test_a_lower_bound_never_lowers_a_rate(before: float, then: float) -> None:
    rates = known((A, before))
    version(rates, A, {B: 80.0}, busy_s=0.0)
    assert rates.uplink(A) == then


def test_only_changed_rates_are_reported() -> None:
    rates = known((A, 100.0))
    assert version(rates, A, {B: 80.0}, busy_s=0.0) == ()


# --- what is planned with


def test_a_peer_that_is_nearly_like_the_others_counts_as_equal_in_plans() -> None:
    """Of peers that are alike chance would make a plan of many links."""
    rates = known((A, 100.0), (B, 100.0 / ALIKE), (C, 100.0 * ALIKE), (D, 60.0), (S, 130.0))
    assert rates.to_plan_with([S, A, B, C, D]) == {A: 100, B: 100, C: 100, D: 60, S: 130}


def test_a_lower_bound_counts_as_the_usual_rate() -> None:
    rates = Rates(
        [
            *(PeerRate(peer, 100.0, held_up=True) for peer in (B, C)),
            PeerRate(A, 20.0, held_up=False),
            PeerRate(D, 500.0, held_up=False),
        ]
    )
    assert rates.to_plan_with([A, D]) == {A: 100, D: 500}


def test_the_number_of_peers_is_limited_and_the_oldest_sample_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PEERS_MAX", 2)
    rates = known((S, 10.0), (B, 10.0), (C, 10.0))
    rates.check()
    version(rates, A, {B: 10.0})
    assert [rates.uplink(peer) for peer in (S, B, C, A)] == [None, None, 10, 10]
