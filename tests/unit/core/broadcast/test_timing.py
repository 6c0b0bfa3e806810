"""T_verify and T_bcast end with the last worker that was present at the publish and still is."""

from echo2d.core.base.ids import PeerId, PublishSeq
from echo2d.core.broadcast.timing import PENDING_MAX, BroadcastTimings
from echo2d.core.cluster.statistics import Statistics

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def seq(number: int) -> PublishSeq:
    return PublishSeq(number)


def test_the_last_worker_ends_the_measured_time() -> None:
    statistics = Statistics()
    timings = BroadcastTimings(statistics)
    timings.started(seq(1), {A, B}, now=10.0)
    timings.verified(A, seq(1), now=11.0)
    timings.served(A, seq(1), now=12.0)
    timings.verified(C, seq(1), now=12.5)  # came later
    assert not statistics.t_verify_s
    timings.verified(B, seq(1), now=13.0)
    timings.served(B, seq(1), now=15.0)
    assert (list(statistics.t_verify_s), list(statistics.t_bcast_s)) == ([3.0], [5.0])


def test_a_worker_with_a_newer_version_counts_for_older_ones() -> None:
    statistics = Statistics()
    timings = BroadcastTimings(statistics)
    timings.started(seq(1), {A}, now=0.0)
    timings.started(seq(2), {A}, now=1.0)
    timings.served(A, seq(2), now=4.0)
    assert list(statistics.t_bcast_s) == [4.0, 3.0]


def test_a_measurement_does_not_wait_for_lost_workers() -> None:
    statistics = Statistics()
    timings = BroadcastTimings(statistics)
    timings.started(seq(1), {A, B}, now=0.0)
    timings.verified(A, seq(1), now=2.0)
    timings.lost(B)
    assert list(statistics.t_verify_s) == [2.0]
    timings.lost(A)  # nobody ever served it: no measurement
    assert not statistics.t_bcast_s
    timings.check()


def test_a_stuck_worker_keeps_no_broadcast_from_being_measured() -> None:
    statistics = Statistics()
    timings = BroadcastTimings(statistics)
    for number in range(PENDING_MAX + 3):
        timings.started(seq(number), {A, B}, now=float(number))
        timings.served(A, seq(number), now=number + 0.5)
        timings.check()
    assert list(statistics.t_bcast_s) == [0.5] * 3
    assert not statistics.t_verify_s, "nobody has verified"


def test_one_late_worker_of_many_does_not_make_a_broadcast_slow() -> None:
    statistics = Statistics()
    timings = BroadcastTimings(statistics)
    workers = [PeerId(f"w{number}") for number in range(10)]
    timings.started(seq(1), set(workers), now=0.0)
    for number, worker in enumerate(workers):
        timings.served(worker, seq(1), now=1.0 if number < 9 else 500.0)
    assert list(statistics.t_bcast_s) == [500.0]
    assert statistics.measurements.t_bcast.estimate is not None
    assert statistics.measurements.t_bcast.estimate.value == 1.0
    timings.started(seq(2), set(workers[:9]), now=0.0)
    for number, worker in enumerate(workers[:9]):
        timings.served(worker, seq(2), now=float(number))
    assert list(statistics.measurements.t_bcast.samples) == [1.0, 8.0], "of few, everyone counts"


def test_the_times_of_workers_before_a_late_one_count() -> None:
    statistics = Statistics()
    timings, measurements = BroadcastTimings(statistics), statistics.measurements
    for worker in (A, B, C):
        measurements.holds(worker, 4, 0, now=0.0)
    for number in (1, 2):
        timings.started(seq(number), {A, B, C}, now=0.0)
    for worker, number, still_s in (
        (A, 1, 12.0),
        (B, 1, 6.0),
        (A, 2, 12.0),
        (C, 1, 90.0),
        (C, 2, 6.0),
        (B, 2, 6.0),
    ):
        measurements.stood_still(worker, still_s, now=100.0)
        timings.served(worker, seq(number), now=100.0)
    assert list(statistics.still_s) == [36.0, 8.0]


def test_without_workers_nothing_is_measured_and_clocks_are_bounded() -> None:
    timings = BroadcastTimings(Statistics())
    timings.started(seq(1), set(), now=0.0)
    for number in range(2, 3 * PENDING_MAX):
        timings.started(seq(number), {A}, now=0.0)
    timings.check()


def test_the_delay_of_a_version_is_its_time_beyond_the_prediction() -> None:
    statistics = Statistics()
    timings = BroadcastTimings(statistics)
    timings.started(seq(1), {A, B}, now=10.0)
    assert timings.age_s(seq(1), now=14.0) == 4.0
    timings.planned(seq(1), 6.0, now=14.0)
    timings.served(A, seq(1), now=19.0)
    timings.served(B, seq(1), now=23.0)
    timings.started(seq(2), {A}, now=30.0)
    timings.served(A, seq(2), now=40.0)
    assert list(statistics.measurements.late_s) == [3.0], "the second had no plan"
    timings.planned(seq(2), 1.0, now=41.0)
    assert timings.age_s(seq(2), now=41.0) == 0.0
