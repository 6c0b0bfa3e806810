"""The credit of one stripe: how many frames the root may bind ahead of its relay."""

import pytest

from echo2d.core.relay.credit import (
    CREDIT_FRAMES,
    CREDIT_FRAMES_MAX,
    RATE_REPORTS,
    TRICKLE_GAPS,
    TRICKLE_S,
    WAITING,
    Credit,
)


def used_up(credit: Credit) -> Credit:
    """The credit, which has just held a frame back."""
    assert not credit.allows(credit.passed + credit.frames, 0.0)
    return credit


def grown(frames: int) -> Credit:
    """A credit of so many frames: its relay ran dry again and again."""
    credit = Credit()
    while credit.frames < frames:
        used_up(credit).passed_on(credit.passed + 1, 0, 0.0)
    return credit


def report(credit: Credit, *waiting: int) -> None:
    """One report for each number: one more frame was passed on, and so many wait."""
    for count in waiting:
        credit.passed_on(credit.passed + 1, count, 0.0)


def test_three_frames_are_bound_ahead_of_an_unknown_relay() -> None:
    assert [end for end in range(10) if Credit().allows(end, 0.0)] == [0, 1, 2]


def test_a_frame_passed_on_makes_room_for_one() -> None:
    credit = Credit()
    credit.passed_on(1, 1, 0.0)
    assert [end for end in range(10) if credit.allows(end, 0.0)] == [0, 1, 2, 3]


def test_a_relay_that_ran_dry_gets_one_more_frame_of_credit() -> None:
    credit = used_up(Credit())
    report(credit, 0)
    assert credit.frames == CREDIT_FRAMES + 1


def test_a_relay_that_ran_dry_for_lack_of_frames_gets_no_more_credit() -> None:
    """No frame was held back: the root had none, or its uplink was the limit."""
    credit = Credit()
    report(credit, *[0] * 20)
    assert credit.frames == CREDIT_FRAMES


def test_a_credit_grows_once_for_each_time_that_it_held_a_frame_back() -> None:
    credit = used_up(Credit())
    report(credit, 0, 0, 0)
    assert credit.frames == CREDIT_FRAMES + 1


def test_a_relay_with_waiting_frames_gets_no_more_credit() -> None:
    credit = used_up(Credit())
    report(credit, 1)
    assert credit.frames == CREDIT_FRAMES


def test_a_standing_queue_shrinks_the_credit_once_in_as_many_reports() -> None:
    credit = grown(6)
    report(credit, *[WAITING + 1] * 5)
    assert credit.frames == 6
    report(credit, WAITING + 1)
    assert credit.frames == 5
    report(credit, *[WAITING + 1] * 5)
    assert credit.frames == 4


def test_a_queue_that_was_short_for_a_moment_does_not_shrink_the_credit() -> None:
    credit = grown(6)
    report(credit, *[9] * 5, WAITING)
    assert credit.frames == 6


def test_a_credit_never_shrinks_below_the_first_three() -> None:
    credit = grown(5)
    report(credit, *[9] * 50)
    assert credit.frames == CREDIT_FRAMES


def test_a_credit_never_grows_beyond_the_most() -> None:
    credit = grown(CREDIT_FRAMES_MAX)
    used_up(credit)
    report(credit, 0)
    assert credit.frames == CREDIT_FRAMES_MAX


@pytest.mark.parametrize("sequence", [3, 5], ids=["older", "the same"])
def test_a_stale_report_changes_nothing(sequence: int) -> None:
    credit = Credit()
    credit.passed_on(1, 1, 1.0)
    credit.passed_on(5, 1, 2.0)
    used_up(credit).passed_on(sequence, 0, 9.0)
    assert (credit.passed, credit.frames, credit.rate) == (5, CREDIT_FRAMES, 4.0)


def test_the_rate_is_unknown_before_two_reports_at_different_times() -> None:
    credit = Credit()
    assert credit.rate == 0.0
    credit.passed_on(1, 0, 1.0)
    assert credit.rate == 0.0
    credit.passed_on(2, 0, 1.0)
    assert credit.rate == 0.0


def test_the_rate_counts_from_when_the_first_frame_was_bound() -> None:
    credit = Credit()
    credit.bound(1, 1.0)
    credit.bound(2, 1.2)
    credit.passed_on(2, 0, 1.5)
    assert credit.rate == pytest.approx(4.0)


def test_the_rate_is_that_of_the_last_reports() -> None:
    credit = Credit()
    for number in range(1, 10):
        credit.passed_on(100 * number, 1, float(number))
    assert credit.rate == pytest.approx(100.0)
    for number in range(1, RATE_REPORTS):
        credit.passed_on(900 + 10 * number, 1, 9.0 + number)
    assert credit.rate == pytest.approx(10.0)


def test_the_backlog_lasts_as_long_as_the_relay_needs_for_it() -> None:
    credit = Credit()
    credit.passed_on(10, 1, 1.0)
    credit.passed_on(30, 1, 2.0)
    assert credit.backlog_s(35) == pytest.approx(5 / 20)


def test_the_unknown_relay_with_fewer_frames_is_first() -> None:
    assert Credit().backlog_s(0) < Credit().backlog_s(1) < Credit().backlog_s(2)


def test_a_frame_is_bound_beyond_the_credit_now_and_then_if_nothing_moves() -> None:
    credit = Credit()
    credit.bound(3, 1.0)
    assert not credit.allows(3, 1.0 + 0.9 * TRICKLE_S)
    assert credit.allows(3, 1.0 + TRICKLE_S)
    credit.bound(4, 1.0 + TRICKLE_S)
    assert not credit.allows(4, 1.0 + 1.9 * TRICKLE_S)


def test_a_slow_relay_that_makes_progress_gets_no_frame_beyond_its_credit() -> None:
    credit = Credit()
    credit.bound(1, 0.0)
    credit.passed_on(1, 1, 2.0)
    assert not credit.allows(4, 2.0 + 0.9 * TRICKLE_GAPS * 2.0)
    assert credit.allows(4, 2.0 + TRICKLE_GAPS * 2.0)
