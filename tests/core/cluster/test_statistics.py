"""Quantiles, kappa under "auto", and bounded counters."""

import pytest

from echo2d.core.capacity.estimators import quantile
from echo2d.core.cluster.statistics import FAULTS_MAX, VERSIONS_MEASURED_MAX, Figures, publish_every_auto


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0], 0.5, 1.0), (list(map(float, range(1, 21))), 0.95, 19.0)],
)
def test_quantile(values: list[float], share: float, found: float | None) -> None:
    assert quantile(values, share) == found


@pytest.mark.parametrize(
    ("t_train_s", "t_bcast_s", "kappa"),
    [
        (1.0, 0.5, 1),
        (1.0, 1.0, 2),  # strictly longer than the broadcast
        (1.0, 2.5, 3),
        (1.0, 99.0, 4),  # capped at S + 1
    ],
)
def test_publish_every_auto(t_train_s: float, t_bcast_s: float, kappa: int) -> None:
    assert publish_every_auto(t_train_s, t_bcast_s, 3) == kappa


def test_auto_follows_the_recent_measurements_and_says_when_the_cap_binds() -> None:
    figures = Figures()
    assert figures.publish_every(3) == 1, "nothing is measured yet"
    for t_train_s in [10.0] * 20 + [1.0] * 16:
        figures.measures.t_train.add(t_train_s)
    assert figures.publish_every(3) == 1
    for _ in range(16):
        figures.broadcast(500.0, (), cold=False, most_s=1.5)
    assert figures.publish_every(3) == 2, "one late worker of many is no slow broadcast"
    assert not figures.dissemination_bound(3)
    assert figures.dissemination_bound(0)


def test_faults_and_versions_are_bounded() -> None:
    figures = Figures()
    for number in range(2 * VERSIONS_MEASURED_MAX):
        figures.fault("lease", f"worker {number}\nis gone")
        figures.seed_sent(number, 1.0)
    figures.check()
    assert len(figures.faults) == FAULTS_MAX
    assert next(reversed(figures.faults)) == ("lease", f"worker {2 * VERSIONS_MEASURED_MAX - 1} is gone")
    assert figures.fault_counts == {"lease": 2 * VERSIONS_MEASURED_MAX}


def test_the_same_fault_again_is_one_line_and_the_newest() -> None:
    figures = Figures(now=10.0)
    figures.fault("lease", "a")
    figures.fault("lease", "b")
    figures.now = 12.0
    figures.fault("lease", "a")
    assert [(text, fault.at, fault.times) for (_, text), fault in figures.faults.items()] == [
        ("b", 10.0, 1),
        ("a", 12.0, 2),
    ]


def test_the_bubble() -> None:
    figures = Figures()
    assert (figures.bubble_ratio, figures.bubble(1)) == (None, None)
    for _ in range(2):
        figures.session_opened()
        figures.now += 1000.0  # the learner starts; that is no waiting
        for step in range(3):
            figures.trained(step, (), 3.0)
            figures.now += 4.0
    assert figures.bubble_ratio == 0.25
    assert (figures.learner_train_s, figures.learner_wait_s) == (12.0, 4.0)
    assert figures.bubble(1) == 0.0, "it did not wait for data"
    figures.learner_waits(waits=True)
    figures.now += 4.0
    assert figures.bubble(1) == 0.5
    figures.learner_waits(waits=False)
    assert figures.bubble(1) == 0.5
    assert figures.starved_s == 4.0
    assert figures.measures.t_train.value == 3.0


def test_what_it_waits_for() -> None:
    figures = Figures()
    for step in range(3):
        figures.trained(step, (), 1.0)
        figures.learner_waits(waits=True)
        figures.now += 1.0
        figures.learner_waits(waits=True, lacks_rewards=True)
        figures.now += 3.0
        figures.learner_waits(waits=False)
        figures.now += 1.0
    assert figures.unscored_share(16) == 0.75
    assert (figures.starved_s, figures.unscored_s) == (12.0, 9.0)
    figures.trained(3, (), 1.0)
    assert figures.unscored_share(2) == 0.75
    figures.learner_waits(waits=True)
    figures.now += 8.0
    assert figures.unscored_share(2) == 6.0 / 16.0
