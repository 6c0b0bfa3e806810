"""Decides when the spreading version has spread, so that the next one may start.

It has spread when it is whole at the seed and no worker is awaited any more. Once at least one worker
has verified it, there is also a time limit, so that slow workers do not delay the next version (I6):
FIXED_S plus PATIENCE times the predicted time, from when the version was whole at the seed. A worker
is awaited until it has verified the version or failed to apply it. A worker that is away, on standby,
quarantined, or takes another form is never awaited.
Not here: what happens at the end (`publishing`).
"""

from echo2d.core.broadcast.catch_up import CatchUps
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer

# While another version waits, slow workers get PATIENCE times the predicted time, and FIXED_S for
# encoding and applying, which the prediction leaves out.
PATIENCE = 2.0
FIXED_S = 1.0


class SpreadEnd:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, members: Membership, catch_ups: CatchUps) -> None:
        self._members, self._catch_ups = members, catch_ups
        # The awaited worker that was found last; it is looked at first.
        self._awaited: Peer | None = None

    def reached(self, transmission: Transmission, *, now: float) -> bool:
        """Whether this version has spread, or has had enough time."""
        if transmission.totals is not None and not self.awaits_anyone(transmission):
            return True
        return bool(transmission.verified) and now >= self.latest(transmission)

    def latest(self, transmission: Transmission) -> float:
        """The time at which this version has had enough time, if a worker has verified it."""
        predicted_s = 0.0 if transmission.plan is None else transmission.plan.predicted_s
        return transmission.whole_at + FIXED_S + PATIENCE * predicted_s

    def awaits_anyone(self, transmission: Transmission) -> bool:
        """Whether a worker must still verify this version or fail at it.

        This is called at every event, so the worker that was found last is looked at first.
        """
        if self._awaited is None or not self._awaits(transmission, self._awaited):
            self._awaited = next(
                (peer for peer in self._members if self._awaits(transmission, peer)), None
            )
        return self._awaited is not None

    def _awaits(self, transmission: Transmission, peer: Peer) -> bool:
        counts = peer.kind == "worker" and peer.alive and peer.service.active
        awaited = counts and not (peer.reach.quarantined or self._catch_ups.apart(peer.peer))
        return awaited and not (
            peer.peer in transmission.verified or peer.peer in transmission.failed
        )
