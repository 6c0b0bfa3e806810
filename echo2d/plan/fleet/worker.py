"""One worker of a simulated fleet: its leases, how long each sample takes, and when it stops for a version.

A sample has 16 tokens and takes slots/mu seconds on average, with a long tail. A pause delays the end of all samples
that are being generated. Every token except the last is attributed to the version under which the sample began, and
the last token to the version under which it ended. Not here: whether a worker gets leases, and what happens to its
results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseGranted,
    LeaseProgress,
    SampleDelta,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.core.rules.prices import Price
from echo2d.core.work.leases import Lease
from echo2d.plan.fleet.spec import WorkersTable

PLANNED_TOKENS_MAX = 4096
STOP = 1


@dataclass(slots=True)
class FleetSample:
    """A sample that is being generated."""

    lease: HeldLease
    sample: int
    began: VersionKey
    due: float  # when it ends, unless the worker has paused since `due` was computed
    paused_s: float  # the worker's `paused_s` when `due` was computed
    tokens: int  # tokens that this attempt writes
    token_s: float  # seconds for one token


@dataclass(slots=True)
class FleetWorker:
    """See the module docstring."""

    name: str
    kind: WorkersTable
    peer: Peer
    speed: float
    price: Price
    here: bool = True
    leaving: bool = False
    paused_s: float = 0.0  # all pauses so far
    paused_until: float = 0.0  # before this time it generates nothing
    samples: dict[tuple[HeldLease, int], FleetSample] = field(default_factory=dict)
    active_since: float | None = None
    usd: float = 0.0

    @property
    def expected(self) -> float:
        """The trajectories/s that the file gives for the worker's kind."""
        return max(self.kind.trajectories_per_h, 1e-3) / 3600.0

    @property
    def sample_s(self) -> float:
        """Mean seconds of one sample; infinite for a kind that makes nothing."""
        per_h = self.kind.trajectories_per_h * self.speed
        return self.peer.slots * 3600.0 / per_h if per_h else math.inf

    def begin(
        self, granted: LeaseGranted, works: Sequence[float], extra_s: float, now: float
    ) -> list[FleetSample]:
        """Begin the samples of a lease, all at once, because they run as one batch.

        works: length of each sample, over the mean. extra_s: seconds before the first token.
        """
        key, serving = HeldLease(granted.lease, granted.attempt), self.peer.engine.serving
        assert serving is not None
        begun = []
        start = max(now, self.paused_until) + extra_s
        for sample, work in zip(granted.samples, works, strict=True):
            # The mean is 16 tokens: few enough to be fast, and enough to distinguish long samples from short ones.
            whole = max(1, min(PLANNED_TOKENS_MAX, round(work * 16)))
            tokens = max(1, whole - granted.written)
            takes_s = self.sample_s * work * tokens / whole
            one = FleetSample(
                key, sample, serving, start + takes_s, self.paused_s, tokens, takes_s / tokens
            )
            self.samples[key, sample] = one
            begun.append(one)
        return begun

    def written(self, lease: Lease, now: float) -> dict[int, int]:
        """How many tokens each open sample of a lease has so far; the last token arrives only with the result."""
        found = {}
        for number in lease.samples:
            if (sample := self.samples.get((lease.key, number))) is not None:
                left_s = sample.due + self.paused_s - sample.paused_s - now
                left = max(1, math.ceil(left_s / sample.token_s))
                found[number] = max(0, sample.tokens - left)
        return found

    def progress(self, lease: Lease, now: float) -> LeaseProgress:
        """A report of all tokens that the worker has written for a lease."""
        ended = self.peer.engine.serving
        assert ended is not None
        deltas = tuple(
            SampleDelta(
                number,
                _tokens(count + 1)[: 4 * count],
                _logprobs(count),
                _spans(self.samples[lease.key, number].began, ended, count),
            )
            for number, count in self.written(lease, now).items()
            if count
        )
        return LeaseProgress(lease.key.lease, lease.key.attempt, deltas)

    def moved(self, sample: FleetSample) -> bool:
        """Whether a pause has delayed the sample's end; then `due` is set to the new end."""
        late_s = self.paused_s - sample.paused_s
        sample.due, sample.paused_s = sample.due + late_s, self.paused_s
        return late_s > 0

    def pause(self, seconds: float, now: float) -> float:
        """Generate nothing for at least this long. Returns by how many seconds the present pause got longer."""
        until = max(self.paused_until, now + seconds)
        longer_s = until - max(now, self.paused_until)
        self.paused_s += longer_s
        self.paused_until = until
        return longer_s

    def finish(self, sample: FleetSample) -> SampleFinished:
        """End the sample and return its result."""
        del self.samples[sample.lease, sample.sample]
        ended = self.peer.engine.serving
        assert ended is not None
        lease, count = sample.lease, sample.tokens
        return SampleFinished(
            lease.lease,
            lease.attempt,
            sample.sample,
            _tokens(count),
            _logprobs(count),
            _spans(sample.began, ended, count),
            "stop",
        )

    def cancel(self, lease: HeldLease) -> None:
        """Drop the samples of a lease that was cancelled."""
        for key in [key for key in self.samples if key[0] == lease]:
            del self.samples[key]

    def pay(self, now: float) -> None:
        """Add the cost of the time since the worker was activated, or since the last payment if that was later."""
        if self.active_since is not None:
            self.usd += self.price.usd_per_h * (now - self.active_since) / 3600.0
            self.active_since = now


@lru_cache(maxsize=1024)
def _tokens(count: int) -> bytes:
    return pack_tokens([2] * (count - 1) + [STOP])


@lru_cache(maxsize=1024)
def _logprobs(count: int) -> bytes:
    return pack_logprobs([-1.0] * count)


@lru_cache(maxsize=1024)
def _spans(began: VersionKey, ended: VersionKey, count: int) -> tuple[VersionSpan, ...]:
    """Spans of `count` tokens: the last token belongs to `ended`, all others to `began`. A single token belongs to
    `began`.
    """
    first = count - 1 if ended != began and count > 1 else count
    parts = [(began, 0, first), (ended, first, count)]
    return tuple(
        VersionSpan(at, end, key.version, key.digest) for key, at, end in parts if at < end
    )
