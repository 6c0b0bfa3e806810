"""T_verify and T_bcast end with the last worker that was there at the publish and still is."""

from echo2d.core.base.ids import PeerId, PublishSeq
from echo2d.core.broadcast.timing import PENDING_MAX, Broadcasts
from echo2d.core.cluster.statistics import Figures

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def seq(number: int) -> PublishSeq:
    return PublishSeq(number)


def test_the_last_worker_counts() -> None:
    figures = Figures()
    broadcasts = Broadcasts(figures)
    broadcasts.started(seq(1), {A, B}, now=10.0)
    broadcasts.verified(A, seq(1), now=11.0)
    broadcasts.served(A, seq(1), now=12.0)
    broadcasts.verified(C, seq(1), now=12.5)  # came later
    assert not figures.t_verify_s
    broadcasts.verified(B, seq(1), now=13.0)
    broadcasts.served(B, seq(1), now=15.0)
    assert (list(figures.t_verify_s), list(figures.t_bcast_s)) == ([3.0], [5.0])


def test_a_newer_version_counts_for_the_older_ones() -> None:
    figures = Figures()
    broadcasts = Broadcasts(figures)
    broadcasts.started(seq(1), {A}, now=0.0)
    broadcasts.started(seq(2), {A}, now=1.0)
    broadcasts.served(A, seq(2), now=4.0)
    assert list(figures.t_bcast_s) == [4.0, 3.0]


def test_lost_workers_are_not_waited_for() -> None:
    figures = Figures()
    broadcasts = Broadcasts(figures)
    broadcasts.started(seq(1), {A, B}, now=0.0)
    broadcasts.verified(A, seq(1), now=2.0)
    broadcasts.lost(B)
    assert list(figures.t_verify_s) == [2.0]
    broadcasts.lost(A)  # nobody ever served it: no measurement
    assert not figures.t_bcast_s
    broadcasts.check()


def test_one_that_is_stuck_keeps_no_broadcast_from_being_measured() -> None:
    figures = Figures()
    broadcasts = Broadcasts(figures)
    for number in range(PENDING_MAX + 3):
        broadcasts.started(seq(number), {A, B}, now=float(number))
        broadcasts.served(A, seq(number), now=number + 0.5)
        broadcasts.check()
    assert list(figures.t_bcast_s) == [0.5] * 3
    assert not figures.t_verify_s, "nobody has verified"


def test_one_of_many_that_is_late_is_no_slow_broadcast() -> None:
    figures = Figures()
    broadcasts = Broadcasts(figures)
    workers = [PeerId(f"w{number}") for number in range(10)]
    broadcasts.started(seq(1), set(workers), now=0.0)
    for number, worker in enumerate(workers):
        broadcasts.served(worker, seq(1), now=1.0 if number < 9 else 500.0)
    assert list(figures.t_bcast_s) == [500.0]
    assert figures.measures.t_bcast.estimate is not None
    assert figures.measures.t_bcast.estimate.value == 1.0
    broadcasts.started(seq(2), set(workers[:9]), now=0.0)
    for number, worker in enumerate(workers[:9]):
        broadcasts.served(worker, seq(2), now=float(number))
    assert list(figures.measures.t_bcast.samples) == [1.0, 8.0], "of few, everyone counts"


def test_what_a_version_took_from_those_who_had_it_before_a_late_one_came_counts() -> None:
    figures = Figures()
    broadcasts, measures = Broadcasts(figures), figures.measures
    for worker in (A, B, C):
        measures.holds(worker, 4, 0, now=0.0)
    for number in (1, 2):
        broadcasts.started(seq(number), {A, B, C}, now=0.0)
    for worker, number, still_s in ((A, 1, 12.0), (B, 1, 6.0), (A, 2, 12.0), (C, 1, 90.0), (C, 2, 6.0), (B, 2, 6.0)):
        measures.stood_still(worker, still_s, now=100.0)
        broadcasts.served(worker, seq(number), now=100.0)
    assert list(figures.still_s) == [36.0, 8.0]


def test_without_workers_nothing_is_measured_and_clocks_are_bounded() -> None:
    broadcasts = Broadcasts(Figures())
    broadcasts.started(seq(1), set(), now=0.0)
    for number in range(2, 3 * PENDING_MAX):
        broadcasts.started(seq(number), {A}, now=0.0)
    broadcasts.check()
