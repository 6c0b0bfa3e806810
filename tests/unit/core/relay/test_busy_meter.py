"""The time for which a peer had something to send."""

import pytest

from echo2d.core.relay.busy_meter import BusyMeter


def test_only_the_time_between_busy_and_idle_counts() -> None:
    meter = BusyMeter()
    for at, busy in ((5.0, False), (6.0, True), (8.0, False), (9.0, False), (9.5, True)):
        meter.note(at, busy=busy)
    meter.note(9.6, busy=False)
    assert meter.take(20.0) == pytest.approx(2.1)


def test_a_second_report_of_being_busy_changes_nothing() -> None:
    meter = BusyMeter()
    for at in (1.0, 1.5, 3.0):
        meter.note(at, busy=True)
    meter.note(4.0, busy=False)
    assert meter.take(4.0) == pytest.approx(3.0)


def test_the_time_of_a_peer_that_is_still_busy_counts_until_now() -> None:
    meter = BusyMeter()
    meter.note(1.0, busy=True)
    assert meter.take(3.0) == pytest.approx(2.0)
    assert meter.take(3.5) == pytest.approx(0.5), "each second is told once"


def test_a_peer_that_never_sent_was_never_busy() -> None:
    assert BusyMeter().take(100.0) == 0.0
