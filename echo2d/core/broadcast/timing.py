"""How long versions take to arrive: T_verify and T_bcast, measured over the workers that were there at the publish.

Each counts until the last of them has verified, or serves, the version or a newer one; a worker lost since does not
count, nor does one that is quarantined, nor, where others serve anything, one that serves nothing yet. Who has not come
when PENDING_MAX newer versions have been published is waited for no more: what is measured is when the others had it.
Beside the last one's arrival, that of MOST of them: of many workers a few late ones make no learner wait.
Not here: what is sent to whom.
"""

import math
from dataclasses import dataclass, field

from echo2d.core.base.ids import PeerId, PublishSeq
from echo2d.core.cluster.statistics import Statistics

PENDING_MAX = (
    8  # publishes that wait for their last worker: one who lacks so many is stuck, or of no use
)
MOST = 0.9  # of the workers: up to nine of them, that is all


@dataclass(slots=True)
class _Pending:
    """One clock: who is still awaited, and when the others arrived. cold: they served nothing when it began."""

    awaited: set[PeerId]
    cold: bool
    arrived_at: dict[PeerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ended:
    """Seconds until the last of these workers, and MOST of them, had it."""

    workers: tuple[PeerId, ...]
    last_s: float
    most_s: float
    cold: bool


class BroadcastTimings:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._verify: dict[PublishSeq, tuple[float, _Pending]] = {}
        self._bcast: dict[PublishSeq, tuple[float, _Pending]] = {}

    def started(
        self, seq: PublishSeq, workers: set[PeerId], *, cold: bool = False, now: float
    ) -> None:
        """The publish was accepted while these workers were active. cold: they serve nothing yet."""
        if workers:
            self._verify[seq] = (now, _Pending(set(workers), cold))
            self._bcast[seq] = (now, _Pending(set(workers), cold))
        for clocks in (self._verify, self._bcast):
            for _, pending in list(clocks.values())[:-PENDING_MAX]:
                pending.awaited.clear()
        self._have_verified(_take_done(self._verify))
        self._have_served(_take_done(self._bcast))

    def verified(self, peer: PeerId, seq: PublishSeq, *, now: float) -> None:
        self._have_verified(_arrived(self._verify, peer, seq, now))

    def served(self, peer: PeerId, seq: PublishSeq, *, now: float) -> None:
        self._have_served(_arrived(self._bcast, peer, seq, now))

    def lost(self, peer: PeerId) -> None:
        """A worker that is gone is not waited for."""
        for clocks in (self._verify, self._bcast):
            for _, pending in clocks.values():
                pending.awaited.discard(peer)
        self._have_verified(_take_done(self._verify))
        self._have_served(_take_done(self._bcast))

    def _have_verified(self, ended: list[_Ended]) -> None:
        self._statistics.t_verify_s.extend(each.last_s for each in ended)

    def _have_served(self, ended: list[_Ended]) -> None:
        for each in ended:
            self._statistics.broadcast(
                each.last_s, each.workers, cold=each.cold, most_s=each.most_s
            )

    def check(self) -> None:
        for clocks in (self._verify, self._bcast):
            assert len(clocks) <= PENDING_MAX
            assert all(pending.awaited for _, pending in clocks.values())


def _arrived(
    clocks: dict[PublishSeq, tuple[float, _Pending]], peer: PeerId, seq: PublishSeq, now: float
) -> list[_Ended]:
    for started, (_, pending) in clocks.items():
        if started <= seq and peer in pending.awaited:
            pending.awaited.remove(peer)
            pending.arrived_at[peer] = now
    return _take_done(clocks)


def _take_done(clocks: dict[PublishSeq, tuple[float, _Pending]]) -> list[_Ended]:
    """The clocks for which nobody is awaited any more. Those that nobody reached are forgotten."""
    done = [seq for seq, (_, pending) in clocks.items() if not pending.awaited]
    ended = [clocks.pop(seq) for seq in done]
    return [_ended(started, each) for started, each in ended if each.arrived_at]


def _ended(started: float, pending: _Pending) -> _Ended:
    took_s = [at - started for at in pending.arrived_at.values()]
    most = math.ceil(MOST * len(took_s)) - 1
    return _Ended(tuple(pending.arrived_at), took_s[-1], took_s[most], pending.cold)
