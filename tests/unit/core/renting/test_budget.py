import math
from itertools import pairwise

import pytest

from echo2d.core.renting.budget import (
    Budget,
    Label,
    Moment,
    Rental,
    RentOffer,
    Terms,
    life_s,
    rent_time,
)

OFFER = RentOffer("cloud", "box", 0.5, 360.0, 8)
TERMS = Terms(
    "cloud", command_s=60.0, settle_s=60.0, list_every_s=60.0, billed_by_s=60.0, grace_s=600.0
)
BUDGET = Budget(usd_per_h=2.0, usd_total=10.0)
RENTAL = Rental(
    Label("x-cloud-box-1"), "cloud", "box", 0.6, 60.0, sent_at=1000.0, life_s=3600.0, grace_s=600.0
)


@pytest.mark.parametrize(
    ("at", "usd"), [(1000, 0.0), (1001, 0.01), (1060, 0.01), (1061, 0.02), (4600, 0.6)]
)
def test_a_started_unit_is_paid_in_full(at: float, usd: float) -> None:
    assert RENTAL.cost_usd(at) == pytest.approx(usd)


def test_the_whole_cost_is_set_aside_until_a_box_has_ended_by_itself() -> None:
    assert RENTAL.committed_usd(1000.0) == RENTAL.committed_usd(4000.0) == pytest.approx(0.7)
    assert RENTAL.committed_usd(8200.0) == pytest.approx(1.2)  # it has outlived that


def test_two_boxes_under_one_label_cost_twice() -> None:
    twice = Rental(Label("x"), "cloud", "box", 0.6, 60.0, 0.0, 3600.0, 0.0, copies=2)
    assert twice.rate == 1.2
    assert twice.cost_usd(60.0) == pytest.approx(0.02)


def life(
    committed_usd: float = 0.0, usd_per_h: float = 0.0, longest_s: float = 1e9
) -> float | None:
    return life_s(
        0,
        OFFER,
        TERMS,
        BUDGET,
        committed_usd=committed_usd,
        usd_per_h=usd_per_h,
        longest_s=longest_s,
    )


def test_the_budget_equals_the_worked_example() -> None:
    """Four boxes of which each lives 5 h, less what its start and end may take."""
    assert [life(2.5 * n, 0.5 * n) for n in range(4)] == [pytest.approx(5 * 3600 - 600)] * 4
    assert life(10.0, 2.0) is None
    assert life(0.0, 1.6) is None  # no room in the hour
    assert life(9.9, 0.0) is None  # 3 minutes
    assert life(longest_s=7200.0) == 7200.0


def test_boxes_that_start_together_do_not_end_together() -> None:
    lives = [
        life_s(n, OFFER, TERMS, BUDGET, committed_usd=0, usd_per_h=0, longest_s=7200.0)
        for n in range(100)
    ]
    known = sorted(each for each in lives if each is not None)
    gaps = [later - sooner for sooner, later in pairwise(known)]
    assert len(known) == 100
    assert known[0] >= 0.75 * 7200
    assert max(gaps) < 3 * 0.25 * 7200 / 100


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        (
            Moment("a", 10.0, 1e9),
            Moment("a", 25.0, 0.0),
            15.0,
        ),  # the clock was set back: nobody asks it
        (Moment("a", 10.0, 1e9), Moment("a", 25.0, 1e9 + 74), 15.0),  # corrected a little
        (
            Moment("a", 10.0, 1e9),
            Moment("a", 25.0, 1e9 + 500),
            500.0,
        ),  # a virtual machine stood still
        (
            Moment("a", 10.0, 1e9),
            Moment("a", 25.0, 2e9),
            9000.0,
        ),  # or it was set: as far as all boxes' time
        (Moment("a", 1e6, 1e9), Moment("b", 30.0, 1e9 + 500), 560.0),
        (
            Moment("a", 1e6, 1e9),
            Moment("b", 900.0, 1e9 + 500),
            900.0,
        ),  # it runs for longer than the clock says
        (Moment("a", 1e6, 1e9), Moment("b", 30.0, 1e9 - 61), 9000.0),  # set back: nobody knows
        (Moment("a", 1e6, 1e9), Moment("b", 30.0, 2e9), 9000.0),
        (Moment("a", 10.0, 1e9), Moment("a", 9910.0, 1e9 + 9900), 9900.0),  # sure
    ],
)
def test_rent_time_advances_by_the_time_that_has_passed(
    before: Moment, after: Moment, seconds: float
) -> None:
    assert rent_time(100.0, before, after, horizon=9100.0) == 100.0 + seconds


def test_a_clock_may_leap_if_there_are_no_boxes() -> None:
    assert (
        rent_time(100.0, Moment("a", 10.0, 1e9), Moment("a", 25.0, 2e9), horizon=-math.inf) == 115.0
    )
