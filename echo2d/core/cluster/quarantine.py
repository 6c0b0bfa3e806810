"""Quarantine: decides which peers pass bad frames on, and which send reports that no honest program sends.

    trusted --(peers of two owners, or the seed, got a bad frame from it)--> only receives
    trusted --(MISREPORTS_MAX in MISREPORTS_S, and MISREPORTS_SHARE of its results)--> does no work
    quarantined --(QUARANTINE_S, doubling each time)--> trusted

When a bad frame came over an edge, one of its two ends is at fault: the accused, or else the accuser
if it is the only accuser of more than ALONE_MAX peers. The accusations of such an accuser do not count.
A misreport is one of these: an impossible result or progress; a report about a lease that another worker has or that
does not exist; an accusation of a peer with which the accuser shares no edge. An honest program sends a few misreports
when messages cross.
Kept true: a peer that passes on what it was given is never quarantined, unless two other owners, or
two boxes of its own owner, lie about it. A peer is quarantined for misreports only by what it sends itself.
Not here: which peers share an edge, and what happens to a quarantined one (`broadcast`, `work`).
"""

import math
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

# An accuser is not believed any more if it is the only accuser of more peers than this.
ALONE_MAX = 2
# Seconds of a peer's first quarantine, in which a broken cable may be replaced; they double up to QUARANTINE_S_MAX.
QUARANTINE_S = 600.0
QUARANTINE_S_MAX = 86400.0
# At most this many accused peers are remembered (the limit of peers); the one accused longest ago is forgotten first.
ACCUSED_MAX = 2048
# At most this many accusers of one peer are remembered: they are its neighbours in a plan.
ACCUSERS_MAX = 64
# Misreports in MISREPORTS_MAX different seconds are a stream if they are MISREPORTS_SHARE of the worker's reports in
# that time: a broken engine may spoil one answer in a hundred, and a revoked version spoils all reports of its workers
# for a second.
MISREPORTS_MAX, MISREPORTS_S, MISREPORTS_SHARE = 16, 600.0, 0.125


class QuarantineTerms:
    """Keeps which peers are quarantined, and until when. Each quarantine of a peer lasts twice as long as the last."""

    def __init__(self) -> None:
        # When the first quarantine ends; None: no peer is quarantined. It is read at every event.
        self.ends_at: float | None = None
        self._until: dict[PeerId, float] = {}
        self._times: dict[PeerId, int] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._until

    def release(self, *, now: float) -> None:
        """Trust the peers whose quarantine is over again."""
        self._until = {peer: until for peer, until in self._until.items() if now < until}
        self.ends_at = min(self._until.values(), default=None)

    def close_in(self, peer: PeerId, now: float) -> None:
        if peer not in self._until:
            times = self._times.pop(peer, 0)
            self._times[peer] = times + 1
            keep_newest(self._times, ACCUSED_MAX)
            self._until[peer] = now + min(QUARANTINE_S_MAX, QUARANTINE_S * 2.0 ** min(times, 10))
            keep_newest(self._until, ACCUSED_MAX)
            self.ends_at = min(self._until.values())

    def check(self) -> None:
        assert max(len(self._until), len(self._times)) <= ACCUSED_MAX
        assert self.ends_at == min(self._until.values(), default=None)
        assert self._until.keys() <= self._times.keys() or len(self._times) == ACCUSED_MAX


class Quarantine(QuarantineTerms):
    """The quarantine of peers that pass bad frames on. `now` is monotonic seconds."""

    def __init__(self) -> None:
        super().__init__()
        # The accusers of each accused peer, and their owners.
        self._accusers: dict[PeerId, dict[PeerId, str]] = {}

    def accuse(
        self, accuser: PeerId, accused: PeerId, *, owner: str = "", is_seed: bool, now: float
    ) -> PeerId:
        """Take note of an accusation; returns which of the two is at fault.

        owner: the owner of the accuser; several accusers of one owner count once. Empty: the accuser counts by itself.
        is_seed: the accuser is the seed, which is always believed.
        """
        accusers = self._accusers.pop(accused, {})
        self._accusers[accused] = accusers
        owner = owner or accuser
        believed = {owner, *(own for one, own in accusers.items() if not self._is_alone(one))}
        accusers[accuser] = owner
        keep_newest(accusers, ACCUSERS_MAX)
        keep_newest(self._accusers, ACCUSED_MAX)
        if not is_seed and self._is_alone(accuser):
            return accuser
        # A single accuser may be at fault itself.
        if is_seed or len(believed) >= 2:
            self.close_in(accused, now)
            del self._accusers[accused]
        return accused

    def _is_alone(self, accuser: PeerId) -> bool:
        """Whether this peer is the only accuser of too many peers."""
        return sum(accusers.keys() == {accuser} for accusers in self._accusers.values()) > ALONE_MAX

    def check(self) -> None:
        super().check()
        assert len(self._accusers) <= ACCUSED_MAX
        assert all(0 < len(accusers) <= ACCUSERS_MAX for accusers in self._accusers.values())


@dataclass(slots=True)
class _Misreports:
    """The misreports of one worker."""

    # When the first one arrived.
    since: float
    # Accepted results of the worker by then.
    accepted: int
    count: int = 0
    # Different seconds in which misreports arrived.
    seconds: int = 0
    # When the last one arrived that began a new second.
    last: float = -math.inf


class Misreports(QuarantineTerms):
    """The quarantine of workers that send reports that no honest program sends. `now` is monotonic seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[PeerId, _Misreports] = {}

    def misreported(self, worker: PeerId, accepted: int, *, now: float) -> int:
        """Take note of a misreport. accepted: results of the worker so far.

        Returns how many misreports make a stream; 0: they are no stream.
        """
        found = self._of.pop(worker, None)
        if found is None or now - found.since > MISREPORTS_S:
            found = _Misreports(now, accepted)
        self._of[worker] = found
        keep_newest(self._of, ACCUSED_MAX)
        found.count += 1
        if now - found.last >= 1.0:
            found.last, found.seconds = now, found.seconds + 1
        reports = found.count + accepted - found.accepted
        if found.seconds < MISREPORTS_MAX or found.count < MISREPORTS_SHARE * reports:
            return 0
        self.close_in(worker, now)
        del self._of[worker]
        return found.count

    def check(self) -> None:
        super().check()
        assert len(self._of) <= ACCUSED_MAX
        assert all(found.count for found in self._of.values())
