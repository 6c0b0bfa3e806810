"""Many workers in one process, with real keys, enrolment and control links; the engines are scripted.

    LeaseGranted --> each sample "generates" for `generate_s`, give or take SPREAD --> SampleFinished --> answered
                          LeaseProgress every PROGRESS_S, with the tokens since the last one
    last root of a version --(APPLY_S)--> VersionVerified, RefitDone; this version writes the tokens from then on

Tokens and logprobs are cut out of a few outputs that are made once. A worker's first samples begin with as much
progress as those of a fleet that has been running for long. Not here: peer links and snapshots, which never touch the
coordinator.
"""

import asyncio
import functools
import random
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    Address,
    Drain,
    Goodbye,
    Heartbeat,
    HeldLease,
    Hello,
    LeaseCancelled,
    LeaseGranted,
    LeaseProgress,
    RefitDone,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    SignedRoot,
    ToPeer,
    VersionKey,
    VersionSpan,
    VersionVerified,
    Welcome,
)
from echo2d.core.protocol.peer_handshake import DIAL_BACK, SECRET_BYTES
from echo2d.core.weights.signed_index import Root
from echo2d.net.control.client import ControlLink, Identity, enrol
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.auth import TokenFile
from echo2d_lab.bench.coordinator.load_meter import LoadMeter

SPREAD = 0.25  # samples take generate_s, 25 % more or less
APPLY_S = 2.0  # fetching and applying a version takes up to this many seconds
VARIANTS = 16  # different outputs; samples of a group take them in turn
AT_ONCE = 32  # enrolments and first connections at the same time
ENROL_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Script:
    """The work of every worker. generate_s: seconds for one answer of `tokens` tokens below `vocab_size`."""

    slots: int
    tokens: int
    vocab_size: int
    generate_s: float


@dataclass(frozen=True, slots=True)
class FakeOutput:
    """Tokens and logprobs, packed as in messages."""

    tokens: bytes
    logprobs: bytes

    @staticmethod
    def draw(script: Script, variant: int) -> "FakeOutput":
        rng = np.random.default_rng(variant)
        tokens = rng.integers(script.vocab_size, size=script.tokens, dtype="<i4")
        tokens[0] = variant  # the reward is its parity: no group is without variance
        return FakeOutput(tokens.tobytes(), (-rng.random(script.tokens, dtype="<f4")).tobytes())


@dataclass(slots=True)
class _Sample:
    """A sample. versions: the versions that write it, each with its first token."""

    sample: int
    output: FakeOutput
    started_at: float
    ends_at: float
    versions: list[tuple[int, VersionKey]]
    reported: int = 0

    def written(self, tokens: int, now: float) -> int:
        """The number of tokens that are written by now."""
        return min(
            tokens, max(0, int(tokens * (now - self.started_at) / (self.ends_at - self.started_at)))
        )

    def spans(self, start: int, end: int) -> tuple[VersionSpan, ...]:
        ends = [*self.versions, (end, self.versions[-1][1])]
        cuts = (
            (max(start, first), min(end, last), key) for (first, key), (last, _) in pairwise(ends)
        )
        return tuple(
            VersionSpan(first, last, key.version, key.digest)
            for first, last, key in cuts
            if first < last
        )


@dataclass(slots=True)
class _Lease:
    """A lease. samples: those that are being generated."""

    key: HeldLease
    samples: dict[int, _Sample] = field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def _root(data: bytes) -> Root:
    return Root.decode(data)


def _no_frames(*_: object) -> None:
    """Events of peer links, which a scripted worker does not have."""


class FakeWorker:
    """One worker and its control link. `full`: set while all its slots are leased."""

    def __init__(
        self,
        name: str,
        script: Script,
        outputs: list[FakeOutput],
        meter: LoadMeter,
        rng: random.Random,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        """key: of a worker that joins again; None: a worker that has never joined."""
        self.key = key or Ed25519PrivateKey.generate()
        self.welcomed = asyncio.Event()
        self._name = name
        self._script = script
        self._outputs = outputs
        self._meter = meter
        self._rng = rng
        self._boot_id = secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._link: ControlLink | None = None
        self._listen: Address | None = (
            None  # other peers can dial it, but no frame is ever requested
        )
        self._dial_back_secret = secrets.token_bytes(SECRET_BYTES)
        self._serving: VersionKey | None = None
        self._leases: dict[HeldLease, _Lease] = {}
        self._unanswered: dict[tuple[HeldLease, int], tuple[SampleFinished, float]] = {}
        self._waiting: deque[tuple[_Lease, int]] = deque()  # samples for which there is no slot yet
        self._empty_since: deque[float] = deque()  # slots that a result has freed
        self._left = self._draining = False
        self._reports = False  # whether the next report is planned
        self._young = True  # until it has its first samples

    @property
    def running(self) -> int:
        return sum(len(lease.samples) for lease in self._leases.values())

    def empty_since(self) -> Iterator[float]:
        return iter(self._empty_since)

    async def run(self, url: str, run_key: bytes) -> None:
        """Run its control link until `leave`."""
        identity = Identity(self.key, run_key)
        self._link = ControlLink(url, identity, self, rng=self._rng)
        links = PeerLinks(
            run_id=identity.run_id, me=identity.peer, on_event=_no_frames, on_ready=_no_frames
        )
        links.expect(DIAL_BACK, self._dial_back_secret)
        self._listen = Address(*await links.listen("127.0.0.1", 0))
        try:
            await self._link.run()
        finally:
            await links.close("left")

    def leave(self) -> None:
        self._left = True
        self._leases.clear()
        if self._link is not None:
            self._link.leave()

    def output(self, sample: int) -> FakeOutput:
        """The output of its next answer."""
        return self._outputs[sample % VARIANTS]

    def acknowledged(self, result: SampleFinished, *, accepted: bool) -> None:
        """Called when the coordinator has answered a result."""

    # --- callbacks of its link

    def hello(self) -> Hello:
        held = tuple(dict.fromkeys([*self._leases, *(key for key, _ in self._unanswered)]))
        return Hello(
            OURS, None, "worker", self._name, self._boot_id, self._script.slots, self._listen,
            self._serving, (), held, (), dial_back_secret=self._dial_back_secret,
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.running)

    async def connected(self, welcome: Welcome) -> None:
        self.welcomed.set()
        for key in welcome.cancel:
            self._leases.pop(key, None)
        for (key, _), (message, _) in self._unanswered.items():
            if key in welcome.keep:
                self._send(message)

    async def disconnected(self, reason: str) -> None:  # noqa: ARG002 - a link owner's signature
        if not self._left:
            self._meter.lost_links += 1

    async def received(self, message: ToPeer) -> None:
        match message:
            case SampleAnswered():
                self._answered(message)
            case LeaseGranted():
                self._granted(message)
            case LeaseCancelled(lease, attempt):
                self._leases.pop(HeldLease(lease, attempt), None)
                self._fill()
            case SignedRoot(data):
                self._on_root(_root(data))
            case Drain():
                self._draining = True
            case _:
                pass  # plans: no frames travel here
        if self._draining and not self._leases and not self._unanswered:
            self._send(Goodbye("drained"))
            self.leave()

    # --- leases

    def _granted(self, grant: LeaseGranted) -> None:
        key = HeldLease(grant.lease, grant.attempt)
        lease = self._leases[key] = _Lease(key)
        for sample in grant.samples:
            if self._empty_since:
                self._meter.filled(time.monotonic() - self._empty_since.popleft())
            self._waiting.append((lease, sample))
        self._fill()
        if not self._reports:
            self._reports = True
            self._loop.call_later(PROGRESS_S, self._report)

    def _fill(self) -> None:
        """Start waiting samples while slots are free."""
        while self._waiting and self.running < self._script.slots:
            lease, number = self._waiting.popleft()
            if self._leases.get(lease.key) is lease:
                sample = lease.samples[number] = self._start(number)
                self._loop.call_at(sample.ends_at, self._finish, lease, number)
        self._young = self._young and self.running < self._script.slots

    def _start(self, number: int) -> _Sample:
        assert self._serving is not None, "leases go to workers that serve a version"
        now, seconds = (
            self._loop.time(),
            self._script.generate_s * self._rng.uniform(1 - SPREAD, 1 + SPREAD),
        )
        started_at = now - self._rng.random() * seconds if self._young else now
        output = self.output(number)
        return _Sample(number, output, started_at, started_at + seconds, [(0, self._serving)])

    def _report(self) -> None:
        """Report all leases together, as a worker does."""
        now = self._loop.time()
        for lease in self._leases.values():
            deltas = tuple(self._delta(sample, now) for sample in lease.samples.values())
            self._send(LeaseProgress(lease.key.lease, lease.key.attempt, deltas))
        self._reports = bool(self._leases)
        if self._reports:
            self._loop.call_later(PROGRESS_S, self._report)

    def _delta(self, sample: _Sample, now: float) -> SampleDelta:
        start, end = sample.reported, sample.written(self._script.tokens, now)
        sample.reported, part = end, slice(4 * start, 4 * end)
        output = sample.output
        return SampleDelta(
            sample.sample, output.tokens[part], output.logprobs[part], sample.spans(start, end)
        )

    def _finish(self, lease: _Lease, number: int) -> None:
        if self._leases.get(lease.key) is not lease or number not in lease.samples:
            return  # cancelled
        sample, tokens = lease.samples.pop(number), self._script.tokens
        if not lease.samples and all(waiting is not lease for waiting, _ in self._waiting):
            del self._leases[lease.key]
        result = SampleFinished(
            lease.key.lease, lease.key.attempt, number, sample.output.tokens, sample.output.logprobs,
            sample.spans(0, tokens), "length",
        )  # fmt: skip
        now = time.monotonic()
        self._unanswered[lease.key, number] = (result, now)
        self._send(result)
        self._fill()
        if self.running < self._script.slots:
            self._empty_since.append(now)

    def _answered(self, message: SampleAnswered) -> None:
        key = HeldLease(message.lease, message.attempt)
        result, sent_at = self._unanswered.pop((key, message.sample), (None, time.monotonic()))
        if result is not None:
            self.acknowledged(result, accepted=message.accepted)
        self._meter.answered(
            time.monotonic() - sent_at, refusal="" if message.accepted else message.reason
        )

    # --- versions

    def _on_root(self, root: Root) -> None:
        if root.totals is not None and (
            self._serving is None or root.facts.version > self._serving.version
        ):
            key = VersionKey(root.facts.version, root.totals.snapshot)
            self._loop.call_later(self._rng.uniform(0, APPLY_S), self._refit, root, key)

    def _refit(self, root: Root, key: VersionKey) -> None:
        if self._serving is not None and key.version <= self._serving.version:
            return  # a newer version arrived earlier
        self._serving, now = key, self._loop.time()
        for lease in self._leases.values():
            for sample in lease.samples.values():
                sample.versions.append((sample.written(self._script.tokens, now), key))
        self._send(VersionVerified(root.form, key.version, key.digest))
        self._send(RefitDone(key.version, key.digest, 0.01, memory_ok=True))

    def _send(
        self, message: SampleFinished | LeaseProgress | VersionVerified | RefitDone | Goodbye
    ) -> None:
        assert self._link is not None
        self._link.send(message)


class FakeFleet:
    """All scripted workers."""

    def __init__(self, count: int, script: Script, meter: LoadMeter, *, rng_seed: int) -> None:
        outputs = [FakeOutput.draw(script, variant) for variant in range(VARIANTS)]
        self.workers = [
            FakeWorker(
                f"scripted-{number}", script, outputs, meter, random.Random(f"{rng_seed} {number}")
            )
            for number in range(count)
        ]
        self.slots = count * script.slots

    @property
    def running(self) -> int:
        """Samples that are being generated."""
        return sum(worker.running for worker in self.workers)

    async def enrol(self, url: str, token: TokenFile) -> None:
        """Enrol all workers with one token, AT_ONCE at a time."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(worker: FakeWorker) -> None:
            async with gate:
                await enrol(
                    url,
                    token,
                    Identity.of(url, token, worker.key),
                    rng=random.Random(),
                    patience_s=ENROL_PATIENCE_S,
                )

        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(one(worker))

    async def connect(self, url: str, run_key: bytes, tasks: asyncio.TaskGroup) -> None:
        """Run the workers' links in `tasks`; return when all have been welcomed."""
        for start in range(0, len(self.workers), AT_ONCE):
            part = self.workers[start : start + AT_ONCE]
            for worker in part:
                tasks.create_task(worker.run(url, run_key))
            for worker in part:
                await worker.welcomed.wait()

    def empty_for(self, seconds: float, now: float) -> int:
        """The number of slots that have been empty for this long."""
        return sum(
            now - since >= seconds for worker in self.workers for since in worker.empty_since()
        )

    def leave(self) -> None:
        for worker in self.workers:
            worker.leave()
