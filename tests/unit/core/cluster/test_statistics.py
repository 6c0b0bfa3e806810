"""Quantiles, kappa under "auto", the counts of a commit, and bounded counters."""

import pytest

from echo2d.core.capacity.estimators import quantile
from echo2d.core.cluster.statistics import (
    FAULTS_SHOWN_MAX,
    VERSIONS_MEASURED_MAX,
    SentVersions,
    Statistics,
)


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([], 0.5, None),
        ([3.0], 0.95, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        (list(map(float, range(1, 21))), 0.95, 19.0),
    ],
)
def test_a_quantile_is_one_of_the_values(
    values: list[float], share: float, found: float | None
) -> None:
    assert quantile(values, share) == found


def test_a_run_is_dissemination_bound_when_no_kappa_is_longer_than_a_broadcast() -> None:
    statistics = Statistics()
    assert not statistics.dissemination_bound(0), "nothing is measured yet"
    for _ in range(16):
        statistics.measurements.t_train.add(1.0)
        statistics.broadcast(500.0, (), cold=False, most_s=1.5)
    assert not statistics.dissemination_bound(3)
    assert statistics.dissemination_bound(0)


def test_the_numbers_of_faults_and_versions_are_limited() -> None:
    statistics = Statistics()
    for number in range(2 * VERSIONS_MEASURED_MAX):
        statistics.fault("lease", f"worker {number}\nis gone")
        statistics.sent.seed_sent(number, 1.0)
    statistics.check()
    assert len(statistics.faults) == FAULTS_SHOWN_MAX
    assert next(reversed(statistics.faults)) == (
        "lease",
        f"worker {2 * VERSIONS_MEASURED_MAX - 1} is gone",
    )
    assert statistics.fault_counts == {"lease": 2 * VERSIONS_MEASURED_MAX}


def test_a_repeated_fault_is_one_line_and_counts_as_the_newest() -> None:
    statistics = Statistics(now=10.0)
    statistics.fault("lease", "a")
    statistics.fault("lease", "b")
    statistics.now = 12.0
    statistics.fault("lease", "a")
    assert [(text, fault.at, fault.times) for (_, text), fault in statistics.faults.items()] == [
        ("b", 10.0, 1),
        ("a", 12.0, 2),
    ]


def test_a_commit_measures_t_train_unless_it_took_no_time() -> None:
    statistics = Statistics()
    statistics.trained(1, (), 0.0)
    assert statistics.measurements.t_train.value is None
    statistics.trained(2, (), 3.0)
    assert statistics.measurements.t_train.value == 3.0


# --- the bytes of versions


def test_the_newest_versions_are_kept_and_all_are_counted() -> None:
    sent = SentVersions()
    for version in range(2 * VERSIONS_MEASURED_MAX):
        sent.encoded(version, 10, 100)
        sent.seed_sent(version, 1.5)
        sent.check()
    newest = range(VERSIONS_MEASURED_MAX, 2 * VERSIONS_MEASURED_MAX)
    assert list(sent.by_version) == list(sent.seed_copies) == list(newest)
    assert (sent.wire_bytes, sent.full_bytes) == (
        20 * VERSIONS_MEASURED_MAX,
        200 * VERSIONS_MEASURED_MAX,
    )


def test_a_version_that_is_measured_again_counts_as_the_newest() -> None:
    sent = SentVersions()
    for version in (1, 2, 1):
        sent.seed_sent(version, float(version))
    assert list(sent.seed_copies.items()) == [(2, 2.0), (1, 1.0)]
