from echo2d.runtime import metrics
from echo2d.runtime.metrics import LoopMetrics


def test_counters_and_the_numbers_of_the_status() -> None:
    loop = LoopMetrics()
    loop.events.labels("PeerSaid").inc(3)
    text = loop.render({"epoch": 2, "groups": {"buffered": 1.5}, "name": "x", "t_train_s": [1, 2], "none": None})
    assert b'echo2d_events_total{kind="PeerSaid"} 3.0' in text
    assert b'echo2d_status{path="epoch"} 2.0' in text
    assert b'echo2d_status{path="groups.buffered"} 1.5' in text
    assert b"t_train_s" not in text


def test_gauges_are_bounded() -> None:
    text = LoopMetrics().render({str(number): number for number in range(metrics.GAUGES_MAX + 10)})
    assert text.count(b"echo2d_status{") == metrics.GAUGES_MAX
