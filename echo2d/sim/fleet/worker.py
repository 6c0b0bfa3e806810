"""One worker of a simulated fleet: its leases, how long each sample takes, and when it stops for a version.

A sample takes slots/mu seconds on average, with a long tail; a pause moves the end of all that are under way. What a
sample was written by is told in two tokens, the first by the version it began under, the second by the one it ended
under. Not here: whether it gets leases, and what becomes of its results.
"""

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache

from echo2d.core.capacity.prices import Price
from echo2d.core.cluster.membership import Peer
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseGranted,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.sim.fleet.spec import WorkersTable

TOKENS_MAX = 2
STOP = 1
_TOKENS = {1: pack_tokens([STOP]), TOKENS_MAX: pack_tokens([2, STOP])}
_LOGPROBS = {count: pack_logprobs([-1.0] * count) for count in (1, TOKENS_MAX)}


@dataclass(slots=True)
class FleetSample:
    """One that is generated. due: unless the box pauses more than it had (`paused_s`) when that was reckoned."""

    lease: HeldLease
    sample: int
    began: VersionKey
    due: float
    paused_s: float


@dataclass(slots=True)
class FleetWorker:
    """See the module docstring. paused_s: in all its life; paused_until: it generates nothing before."""

    name: str
    kind: WorkersTable
    peer: Peer
    speed: float
    price: Price
    here: bool = True
    leaving: bool = False
    paused_s: float = 0.0
    paused_until: float = 0.0
    samples: dict[tuple[HeldLease, int], FleetSample] = field(default_factory=dict)
    active_since: float | None = None
    usd: float = 0.0

    @property
    def expected(self) -> float:
        """Trajectories/s, as the file says of its kind."""
        return max(self.kind.trajectories_per_h, 1e-3) / 3600.0

    @property
    def sample_s(self) -> float:
        """Of one sample, on average, when it is there; infinite for a kind that makes nothing."""
        per_h = self.kind.trajectories_per_h * self.speed
        return self.peer.slots * 3600.0 / per_h if per_h else math.inf

    def begin(
        self, granted: LeaseGranted, chance: random.Random, sigma: float, now: float
    ) -> list[FleetSample]:
        """The samples of a lease, all at once: batches run together."""
        key, serving = HeldLease(granted.lease, granted.attempt), self.peer.serving
        assert serving is not None
        begun = []
        start = max(now, self.paused_until)
        for sample in granted.samples:
            takes_s = self.sample_s * chance.lognormvariate(-sigma * sigma / 2, sigma)
            one = FleetSample(key, sample, serving, start + takes_s, self.paused_s)
            self.samples[key, sample] = one
            begun.append(one)
        return begun

    def moved(self, sample: FleetSample) -> bool:
        """Whether a pause has moved its end meanwhile; then `due` is the new one."""
        late_s = self.paused_s - sample.paused_s
        sample.due, sample.paused_s = sample.due + late_s, self.paused_s
        return late_s > 0

    def pause(self, seconds: float, now: float) -> float:
        """It generates nothing for so long, or as long as it does anyway; by how much longer that is."""
        until = max(self.paused_until, now + seconds)
        longer_s = until - max(now, self.paused_until)
        self.paused_s += longer_s
        self.paused_until = until
        return longer_s

    def finish(self, sample: FleetSample) -> SampleFinished:
        """Its result."""
        del self.samples[sample.lease, sample.sample]
        ended = self.peer.serving
        assert ended is not None
        spans = _spans(sample.began, ended)
        lease, count = sample.lease, len(spans)
        return SampleFinished(
            lease.lease,
            lease.attempt,
            sample.sample,
            _TOKENS[count],
            _LOGPROBS[count],
            spans,
            "stop",
        )

    def cancel(self, lease: HeldLease) -> None:
        """Its samples are not wanted any more."""
        for key in [key for key in self.samples if key[0] == lease]:
            del self.samples[key]

    def pay(self, now: float) -> None:
        """The hours since it was activated, or paid last."""
        if self.active_since is not None:
            self.usd += self.price.usd_per_h * (now - self.active_since) / 3600.0
            self.active_since = now


@lru_cache(maxsize=64)
def _spans(began: VersionKey, ended: VersionKey) -> tuple[VersionSpan, ...]:
    """A token of each."""
    keys = (began,) if ended == began else (began, ended)
    return tuple(VersionSpan(at, at + 1, key.version, key.digest) for at, key in enumerate(keys))
