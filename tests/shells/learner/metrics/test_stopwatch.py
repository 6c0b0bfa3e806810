"""The shares of the learner's time, with a clock that the test sets."""

import pytest

from echo2d.learner.metrics.stopwatch import TRAIN, WAIT, Stopwatch


def test_shares_are_computed_over_the_time_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0, 9.0, 9.5, 10.0, 10.25, 20.0, 20.25])
    monkeypatch.setattr("echo2d.learner.metrics.stopwatch.time.monotonic", lambda: next(ticks))
    watch = Stopwatch()
    with watch(WAIT):
        pass
    with watch(TRAIN):
        pass
    with watch("publish"):
        pass
    assert watch.lap() == {WAIT: 9.0, TRAIN: 0.5, "publish": 0.25}
    with watch(TRAIN):
        pass
    assert watch.lap() == {TRAIN: 0.25}
    assert watch.shares() == {TRAIN: 0.75, "publish": 0.25}
    assert str(watch) == "overhead=25.00% of T_train: train=75.00% publish=25.00%"


def test_shares_are_absent_before_the_first_step() -> None:
    assert Stopwatch().shares() == {}
