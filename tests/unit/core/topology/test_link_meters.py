"""The receiver of a link measures its rate."""

from echo2d.core.topology.link_meters import IDLE_S, LinkMeter


def test_a_link_is_measured_while_data_flow() -> None:
    meter = LinkMeter()
    for at in (10.0, 10.1, 10.3, 10.3 + IDLE_S, 20.0, 20.1):
        meter.count(100, at)
    payload_bytes, seconds = meter.take()
    assert (payload_bytes, round(seconds, 9)) == (300, 0.4)
    assert meter.take() == (0, 0.0)
