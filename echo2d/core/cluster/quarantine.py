"""Who passes bad frames on: what peers say of each other, and who only receives because of it.

    trusted --(ACCUSERS_MIN different peers, or the seed, had a bad frame of it)--> quarantined
    quarantined --(QUARANTINE_S, doubling each time)--> trusted

Where a bad frame came over an edge, one of its two ends is at fault: the accused, unless the accuser has accused more
than ALONE_MAX peers of whom nobody else complains; what such a one says counts for nothing. Kept true: without two that
lie together, whoever passes on what it was given is never quarantined.
Not here: who shares an edge with whom, and what becomes of it (`publishing`, `broadcast/transmission`).
"""

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

ACCUSERS_MIN = 2  # one may be at fault itself
ALONE_MAX = 2  # peers that one accuses and nobody else does
QUARANTINE_S = 600.0  # the first time: a cable may have been changed ...
QUARANTINE_S_MAX = 86400.0  # ... doubling up to this
ACCUSED_MAX = 1024  # as many as a run has peers; the one accused longest ago is forgotten
ACCUSERS_MAX = 64  # of one peer: its neighbours in a plan


class Quarantine:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._accusers: dict[PeerId, dict[PeerId, None]] = {}  # by accused
        self._until: dict[PeerId, float] = {}
        self._times: dict[PeerId, int] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._until

    def accuse(self, accuser: PeerId, accused: PeerId, *, is_seed: bool, now: float) -> PeerId:
        """Who of the two is at fault. is_seed: the accuser is."""
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
        """Those whose time has passed may pass on again."""
        self._until = {peer: until for peer, until in self._until.items() if now < until}

    def wake_at(self) -> float | None:
        return min(self._until.values(), default=None)

    def _is_alone(self, accuser: PeerId) -> bool:
        """Whether it accuses too many of whom nobody else complains."""
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
