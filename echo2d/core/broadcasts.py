"""How long versions take to arrive: T_verify and T_bcast, measured over the workers that were there at the publish.

Each counts until the last of them has verified, or serves, the version or a newer one; a worker lost since does not
count, nor does one that is quarantined, nor, where others serve anything, one that serves nothing yet. Who has not come
when PENDING_MAX newer versions have been published is waited for no more: what is measured is when the others had it.
Not here: what is sent to whom.
"""

from dataclasses import dataclass

from echo2d.core.figures import Figures
from echo2d.core.ids import PeerId, PublishSeq

PENDING_MAX = 8  # publishes that wait for their last worker: one who lacks so many is stuck, or of no use


@dataclass(slots=True)
class _Pending:
    """One clock: who is still awaited, and when the last one so far arrived (None: nobody yet).

    cold: they served nothing when it began.
    """

    awaited: set[PeerId]
    cold: bool
    arrived_at: float | None = None


class Broadcasts:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._verify: dict[PublishSeq, tuple[float, _Pending]] = {}
        self._bcast: dict[PublishSeq, tuple[float, _Pending]] = {}

    def started(self, seq: PublishSeq, workers: set[PeerId], *, cold: bool = False, now: float) -> None:
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

    def _have_verified(self, ended: list[tuple[float, bool]]) -> None:
        self._figures.t_verify_s.extend(seconds for seconds, _ in ended)

    def _have_served(self, ended: list[tuple[float, bool]]) -> None:
        for seconds, cold in ended:
            self._figures.broadcast(seconds, cold=cold)

    def check(self) -> None:
        for clocks in (self._verify, self._bcast):
            assert len(clocks) <= PENDING_MAX
            assert all(pending.awaited for _, pending in clocks.values())


def _arrived(
    clocks: dict[PublishSeq, tuple[float, _Pending]], peer: PeerId, seq: PublishSeq, now: float
) -> list[tuple[float, bool]]:
    for started, (_, pending) in clocks.items():
        if started <= seq and peer in pending.awaited:
            pending.awaited.remove(peer)
            pending.arrived_at = now
    return _take_done(clocks)


def _take_done(clocks: dict[PublishSeq, tuple[float, _Pending]]) -> list[tuple[float, bool]]:
    """Of the clocks for which nobody is awaited any more: seconds, and whether it was a cold one.

    Those that nobody reached are forgotten.
    """
    done = [seq for seq, (_, pending) in clocks.items() if not pending.awaited]
    ended = [clocks.pop(seq) for seq in done]
    reached = [(started, each.arrived_at, each.cold) for started, each in ended if each.arrived_at is not None]
    return [(arrived_at - started, cold) for started, arrived_at, cold in reached]
