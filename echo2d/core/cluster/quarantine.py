"""Quarantine: decides which peers pass bad frames on, by what other peers report.

    trusted --(ACCUSERS_MIN different peers, or the seed, got a bad frame from it)--> quarantined
    quarantined --(QUARANTINE_S, doubling each time)--> trusted

When a bad frame came over an edge, one of its two ends is at fault: the accused, unless the accuser
has accused more than ALONE_MAX peers that no other peer accuses. The accusations of such an accuser
do not count.
Kept true: a peer that passes on what it was given is never quarantined, unless two other peers lie
about it.
Not here: which peers share an edge, and what happens to a quarantined one (`broadcast`).
"""

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

# A single accuser may be at fault itself.
ACCUSERS_MIN = 2
# Peers that only one accuser accuses, before it is not believed any more.
ALONE_MAX = 2
# The first quarantine, in which a broken cable may be replaced; it doubles up to QUARANTINE_S_MAX.
QUARANTINE_S = 600.0
QUARANTINE_S_MAX = 86400.0
# As many as a run has peers; the peer that was accused longest ago is forgotten.
ACCUSED_MAX = 2048
# Accusers of one peer: its neighbours in a plan.
ACCUSERS_MAX = 64


class Quarantine:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        # The accusers of each accused peer.
        self._accusers: dict[PeerId, dict[PeerId, None]] = {}
        self._until: dict[PeerId, float] = {}
        self._times: dict[PeerId, int] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._until

    def accuse(self, accuser: PeerId, accused: PeerId, *, is_seed: bool, now: float) -> PeerId:
        """Take note of an accusation; returns which of the two is at fault.

        is_seed: the accuser is the seed, which is always believed.
        """
        accusers = self._accusers.pop(accused, {})
        self._accusers[accused] = accusers
        believed = {accuser, *(one for one in accusers if not self._is_alone(one))}
        accusers[accuser] = None
        keep_newest(accusers, ACCUSERS_MAX)
        keep_newest(self._accusers, ACCUSED_MAX)
        if not is_seed and self._is_alone(accuser):
            return accuser
        if is_seed or len(believed) >= ACCUSERS_MIN:
            self._close_in(accused, now)
        return accused

    def release(self, *, now: float) -> None:
        """Peers whose quarantine is over may pass frames on again."""
        self._until = {peer: until for peer, until in self._until.items() if now < until}

    def wake_at(self) -> float | None:
        return min(self._until.values(), default=None)

    def _is_alone(self, accuser: PeerId) -> bool:
        """Whether it is the only accuser of too many peers."""
        return sum(accusers.keys() == {accuser} for accusers in self._accusers.values()) > ALONE_MAX

    def _close_in(self, peer: PeerId, now: float) -> None:
        if peer not in self._until:
            times = self._times.pop(peer, 0)
            self._times[peer] = times + 1
            keep_newest(self._times, ACCUSED_MAX)
            self._until[peer] = now + min(QUARANTINE_S_MAX, QUARANTINE_S * 2.0 ** min(times, 10))
            keep_newest(self._until, ACCUSED_MAX)
        del self._accusers[peer]

    def check(self) -> None:
        assert max(len(self._accusers), len(self._until), len(self._times)) <= ACCUSED_MAX
        assert all(0 < len(accusers) <= ACCUSERS_MAX for accusers in self._accusers.values())
        assert self._until.keys() <= self._times.keys() or len(self._times) == ACCUSED_MAX
