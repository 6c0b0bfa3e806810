"""Measures how long versions take to arrive: T_verify and T_bcast.

Each is the time from a publish until the last of the workers that were active at the publish has
verified (T_verify) or serves (T_bcast) the version or a newer one. A worker that is lost or
quarantined meanwhile does not count. A worker that serves nothing at the publish does not count
either, unless no worker serves anything. After PENDING_MAX newer publishes the measurement ends
without the workers that are still missing. T_bcast is also measured for nine tenths of the workers,
because a few late workers among many do not make the learner wait.
Not here: what is sent to which peer.
"""

import math
from dataclasses import dataclass, field

from echo2d.core.base.ids import PeerId, PublishSeq
from echo2d.core.cluster.statistics import Statistics

# At most this many publishes wait for their last worker; a worker further behind is stuck or useless.
PENDING_MAX = 8


@dataclass(slots=True)
class _Pending:
    """The clock of one publish: the workers that are awaited, and when the others arrived."""

    awaited: set[PeerId]
    # No worker served anything when the clock began.
    cold: bool
    # Seconds until all workers hold the version, by its plan; None: no plan predicts them.
    expected_s: float | None = None
    arrived_at: dict[PeerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The clock of a publish that has ended."""

    workers: tuple[PeerId, ...]
    # Seconds until the last of these workers had the version.
    last_s: float
    # Seconds until nine tenths of them had it.
    most_s: float
    # These two as in `_Pending`.
    cold: bool
    expected_s: float | None


class BroadcastTimings:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._verify: dict[PublishSeq, tuple[float, _Pending]] = {}
        self._bcast: dict[PublishSeq, tuple[float, _Pending]] = {}

    def started(
        self, seq: PublishSeq, workers: set[PeerId], *, cold: bool = False, now: float
    ) -> None:
        """A publish was accepted, and these workers should get it.

        cold: none of them serves anything yet.
        """
        if workers:
            self._verify[seq] = (now, _Pending(set(workers), cold))
            self._bcast[seq] = (now, _Pending(set(workers), cold))
        for clocks in (self._verify, self._bcast):
            for _, pending in list(clocks.values())[:-PENDING_MAX]:
                pending.awaited.clear()
        self._count_verified(_take_done(self._verify))
        self._count_served(_take_done(self._bcast))

    def age_s(self, seq: PublishSeq, *, now: float) -> float:
        """Seconds since this publish; 0 if no worker is awaited."""
        return now - self._bcast[seq][0] if seq in self._bcast else 0.0

    def planned(self, seq: PublishSeq, predicted_s: float, *, now: float) -> None:
        """By the plan of this version, all workers hold it `predicted_s` from now."""
        if seq in self._bcast:
            started_at, pending = self._bcast[seq]
            pending.expected_s = now - started_at + predicted_s

    def verified(self, peer: PeerId, seq: PublishSeq, *, now: float) -> None:
        self._count_verified(_take_arrival(self._verify, peer, seq, now))

    def served(self, peer: PeerId, seq: PublishSeq, *, now: float) -> None:
        self._count_served(_take_arrival(self._bcast, peer, seq, now))

    def lost(self, peer: PeerId) -> None:
        """A worker is gone or quarantined: do not wait for it any longer."""
        for clocks in (self._verify, self._bcast):
            for _, pending in clocks.values():
                pending.awaited.discard(peer)
        self._count_verified(_take_done(self._verify))
        self._count_served(_take_done(self._bcast))

    def _count_verified(self, ended: list[_Ended]) -> None:
        self._statistics.t_verify_s.extend(each.last_s for each in ended)

    def _count_served(self, ended: list[_Ended]) -> None:
        for each in ended:
            self._statistics.broadcast(
                each.last_s,
                each.workers,
                cold=each.cold,
                most_s=each.most_s,
                expected_s=each.expected_s,
            )

    def check(self) -> None:
        for clocks in (self._verify, self._bcast):
            assert len(clocks) <= PENDING_MAX
            assert all(pending.awaited for _, pending in clocks.values())


def _take_arrival(
    clocks: dict[PublishSeq, tuple[float, _Pending]], peer: PeerId, seq: PublishSeq, now: float
) -> list[_Ended]:
    for started, (_, pending) in clocks.items():
        if started <= seq and peer in pending.awaited:
            pending.awaited.remove(peer)
            pending.arrived_at[peer] = now
    return _take_done(clocks)


def _take_done(clocks: dict[PublishSeq, tuple[float, _Pending]]) -> list[_Ended]:
    """Remove and return the clocks that wait for no worker; those without arrivals are dropped."""
    done = [seq for seq, (_, pending) in clocks.items() if not pending.awaited]
    ended = [clocks.pop(seq) for seq in done]
    return [_ended(started, each) for started, each in ended if each.arrived_at]


def _ended(started: float, pending: _Pending) -> _Ended:
    took_s = [at - started for at in pending.arrived_at.values()]
    # The index of the arrival that completes nine tenths of the workers; of up to nine it is the last.
    most = math.ceil(0.9 * len(took_s)) - 1
    return _Ended(
        tuple(pending.arrived_at), took_s[-1], took_s[most], pending.cold, pending.expected_s
    )
