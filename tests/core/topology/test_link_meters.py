"""The two ends of a link measure what flows and what waits."""

import pytest

from echo2d.core.topology.link_meters import IDLE_S, BacklogMeter, LinkMeter


def test_a_link_is_measured_while_it_flows() -> None:
    meter = LinkMeter()
    for at in (10.0, 10.1, 10.3, 10.3 + IDLE_S, 20.0, 20.1):
        meter.count(100, at)
    payload_bytes, seconds = meter.take()
    assert (payload_bytes, round(seconds, 9)) == (300, 0.4)
    assert meter.take() == (0, 0.0)


def test_a_backlog_is_what_waits_from_one_look_to_the_next() -> None:
    meter = BacklogMeter()
    for at, waits in (
        (5.0, False),
        (6.0, True),
        (8.0, True),
        (9.0, False),
        (9.5, False),
        (9.6, True),
    ):
        meter.look(at, waits=waits)
    assert meter.take() == pytest.approx(3.1)
    assert meter.take() == 0.0
