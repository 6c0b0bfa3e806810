"""The load of `echo2d bench coordinator` in virtual time, without sockets and disk.

    workers --bytes--> decode -> CoordinatorState -> rows of the ledger, bytes --> workers

Each worker keeps its slots leased, reports all leases and sends a heartbeat every PROGRESS_S, and serves
a version within APPLY_S of its root. The learner takes each batch, commits it and publishes. `counted`
has the Python calls of the coordinator's side alone, so their number for each trajectory is the same
on every machine.
"""

import heapq
import random
from collections.abc import Callable
from cProfile import Profile
from dataclasses import dataclass
from itertools import count
from typing import Any

from echo2d.core.base.ids import Digest, SessionId, Version
from echo2d.core.cluster.events import PeerSaid, Persist, Reply, Send
from echo2d.core.coordinator.events import (
    CheckpointAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
)
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    TO_COORDINATOR,
    TO_PEER,
    Heartbeat,
    HeldLease,
    LeaseCancelled,
    LeaseGranted,
    LeaseProgress,
    RefitDone,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    ToPeer,
    VersionKey,
    VersionSpan,
    VersionVerified,
)
from echo2d.core.rules.run import RunRules
from echo2d.core.weights.signed_index import Root
from echo2d.store.ledger_rows import statements
from echo2d_lab.standins.memory_run import FakePeer, MemoryRun

GENERATE_S = 20.0  # seconds for a sample, 25 % more or less
APPLY_S = 2.0
TOKENS = 1000
STOP = (1).to_bytes(4, "little")
LOGPROB = b"\0\0\0\xbf"  # -0.5 as float32


@dataclass(slots=True)
class _Sample:
    """A sample that is being generated. tokens: of the whole sample. told: the number that the coordinator knows."""

    began: float
    takes_s: float
    tokens: int
    served: VersionKey
    told: int = 0


class TimedFleet(MemoryRun):
    """See the module docstring. accepted: trajectories."""

    def __init__(self, rules: RunRules, *, workers: int, slots: int) -> None:
        self.accepted = 0
        self.counted = Profile(builtins=False)
        self._rng = random.Random(0)
        self._due: list[tuple[float, int, Callable[..., object], Any]] = []
        self._order = count()
        self._by_session: dict[SessionId, FakePeer] = {}
        self._running: dict[SessionId, dict[HeldLease, dict[int, _Sample]]] = {}
        super().__init__(rules)
        peers = [self.connect(f"w{number}", slots=slots) for number in range(workers)]
        for peer in (self.connect("seed", kind="seed"), *peers):
            self._by_session[peer.session] = peer
            self._after(self._rng.random() * PROGRESS_S, self._beat, peer)
        self.open_session()
        self._step = 0
        self._publish()

    def play(self, seconds: float) -> None:
        """Let this much time pass."""
        end = self.now + seconds
        while self._due[0][0] <= end:
            self.now, _, act, what = heapq.heappop(self._due)
            act(*what)
            self.drain()
        self.now = end

    @property
    def calls(self) -> int:
        """The Python calls of the coordinator's side so far."""
        return sum(entry.callcount for entry in self.counted.getstats())

    # --- the coordinator's side

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        said = TO_COORDINATOR.encode(event.message) if isinstance(event, PeerSaid) else b""
        actions = self.counted.runcall(self._handle, event, said)
        for action in actions:
            if isinstance(action, Persist):
                self._persist(action.record)
        for action in actions:
            self._perform(action)
        return actions

    def _handle(self, event: CoordinatorEvent, said: bytes) -> list[CoordinatorAction]:
        if isinstance(event, PeerSaid):
            event = PeerSaid(event.session, TO_COORDINATOR.decode(said))
        wake_at = self.state.wake_at()
        actions = self.state.handle(event, now=self.now)
        if wake_at is not None and wake_at <= self.now:
            actions += self.state.handle(DeadlinePassed(), now=self.now)
        for action in actions:
            if isinstance(action, Persist):
                statements(action.record)
            elif isinstance(action, Send):
                TO_PEER.encode(action.message)
        return actions

    # --- workers and learner

    def _after(self, seconds: float, act: Callable[..., object], *what: object) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), act, what))

    def _at(self, *sessions: SessionId) -> list[FakePeer]:
        return [self._by_session[session] for session in sessions if session in self._by_session]

    def _beat(self, peer: FakePeer) -> None:
        """Report everything that the peer holds, and a heartbeat."""
        leases = self._running.get(peer.session, {})
        for key in [each for each, samples in leases.items() if not samples]:
            del leases[key]
        for key, samples in leases.items():
            deltas = tuple(self._delta(number, each) for number, each in samples.items())
            self.say(peer, LeaseProgress(key.lease, key.attempt, deltas))
        self.say(peer, Heartbeat(len(leases)))
        self._after(PROGRESS_S, self._beat, peer)

    def _delta(self, number: int, sample: _Sample) -> SampleDelta:
        so_far = int(sample.tokens * (self.now - sample.began) / sample.takes_s)
        start, sample.told = sample.told, min(so_far, sample.tokens - 1)
        span = VersionSpan(start, sample.told, sample.served.version, sample.served.digest)
        new = sample.told - start
        return SampleDelta(number, bytes(4 * new), LOGPROB * new, (span,) if new else ())

    def _receive(self, peer: FakePeer, message: ToPeer) -> None:
        match message:
            case LeaseGranted(lease, attempt, samples=samples, max_new_tokens=most):
                assert peer.serving is not None
                key = HeldLease(lease, attempt)
                running = self._running.setdefault(peer.session, {}).setdefault(key, {})
                for sample in samples:
                    takes_s = GENERATE_S * self._rng.uniform(0.75, 1.25)
                    # The first samples are shorter, so that they do not end all at once.
                    share = self._rng.uniform(0.05, 1.0) if self.now < GENERATE_S else 1.0
                    running[sample] = _Sample(
                        self.now, share * takes_s, int(share * min(most, TOKENS)), peer.serving
                    )
                    self._after(share * takes_s, self._finish, peer, key, sample)
            case LeaseCancelled(lease, attempt):
                self._running[peer.session].pop(HeldLease(lease, attempt), None)
            case SampleAnswered(accepted=accepted, reason=reason):
                assert accepted, reason
                self.accepted += 1
            case _:
                super()._receive(peer, message)

    def _finish(self, peer: FakePeer, key: HeldLease, sample: int) -> None:
        written = self._running[peer.session].get(key, {}).pop(sample, None)
        if written is None:
            return
        served, count = written.served, written.tokens
        spans = (VersionSpan(0, count, served.version, served.digest),)
        tokens, logprobs = bytes(4 * (count - 1)) + STOP, LOGPROB * count
        self.say(
            peer, SampleFinished(key.lease, key.attempt, sample, tokens, logprobs, spans, "stop")
        )

    def _root(self, peer: FakePeer, root: Root) -> None:
        if root.totals is not None:
            key = VersionKey(root.facts.version, root.totals.snapshot)
            self._after(self._rng.uniform(0, APPLY_S), self._serve, peer, root, key)

    def _serve(self, peer: FakePeer, root: Root, key: VersionKey) -> None:
        peer.serving = key
        self.say(peer, VersionVerified(root.form, key.version, key.digest))
        self.say(peer, RefitDone(key.version, key.digest, 0.01, memory_ok=True))

    def _perform(self, action: CoordinatorAction) -> None:
        super()._perform(action)
        if isinstance(action, Reply) and isinstance(action.body, bytes):
            assert action.digest is not None
            digest = action.digest
            self._after(0.0, self._trained, digest)

    def _trained(self, digest: Digest) -> None:
        epoch, step = self.ledger.epoch, self._step
        self.call(lambda number: CommitAsked(number, epoch, step, digest, 1.0))
        self._publish()
        self.call(lambda number: CheckpointAsked(number, epoch, step))

    def _publish(self) -> None:
        """Publish the last step's version, and ask for the next batch."""
        digest = Digest(self._step.to_bytes(32, "big"))
        self.publish_key(VersionKey(Version(self._step), digest))
        self._step += 1
        self.ask_batch(self._step)
