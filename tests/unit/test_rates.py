"""Rates are smoothed over transfer time, and one odd sample does not carry them away."""

import pytest

from echo2d.core import rates
from echo2d.core.ids import PeerId
from echo2d.core.rates import HALF_LIFE_S, JUMP_MAX, UPLINK_MIN, Rate, Rates

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_the_first_sample_is_the_rate() -> None:
    rate = Rate()
    assert rate.bytes_per_s is None
    rate.add(500, 0.5)
    assert rate.bytes_per_s == 1000


def test_a_half_life_of_transfer_time_weighs_half() -> None:
    rate = Rate()
    rate.add(1000, 1.0)
    rate.add(int(2000 * HALF_LIFE_S), HALF_LIFE_S)
    assert rate.bytes_per_s == pytest.approx(1500)


def test_many_short_samples_weigh_as_much_as_a_long_one() -> None:
    one, many = Rate(), Rate()
    for rate in (one, many):
        rate.add(1000, 1.0)
    one.add(8000, 4.0)
    for _ in range(4):
        many.add(2000, 1.0)
    assert one.bytes_per_s == pytest.approx(many.bytes_per_s)


def test_bursts_are_clipped_and_instants_ignored() -> None:
    rate = Rate()
    rate.add(1000, 1.0)
    rate.add(10**9, 0.001)
    assert rate.bytes_per_s == 1000
    rate.add(10**12, HALF_LIFE_S)
    assert rate.bytes_per_s == pytest.approx((1000 + JUMP_MAX * 1000) / 2)


def test_an_uplink_is_what_all_receivers_get() -> None:
    links = Rates()
    links.add(A, B, 1000, 1.0)
    links.add(A, C, 500, 1.0)
    links.add(B, C, 9, 0.001)
    assert links.uplink(A) == 1500
    assert links.uplink(B) is None
    links.keep({(A, B), (B, C)})
    assert links.uplink(A) == 1000
    links.check()


def test_the_number_of_links_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "LINKS_MAX", 2)
    links = Rates()
    links.add(A, B, 1, 1.0)
    links.add(A, C, 1, 1.0)
    links.add(A, B, 1, 1.0)
    links.add(B, C, 1, 1.0)
    links.check()
    assert links.uplink(A) == 1  # the link to C was heard of longest ago


def test_a_receiver_that_reports_nothing_leaves_a_rate_to_plan_with() -> None:
    links = Rates()
    links.add(A, B, 0, 1.0)
    links.add(B, C, 1, 1e308)
    assert links.uplink(A) == links.uplink(B) == UPLINK_MIN
