"""A run in memory: the real CoordinatorState, a `MemoryLedger`, a seed, workers, and no clock but `now`.

Undelivered events and messages are in `MemoryRun.pending`; the owner delivers them in any order.
Persists are applied before any other action of the same turn, as the runtime does. The seed encodes
and the workers verify, refit and generate at once; `work` runs them until nothing is left to do.

Not here: the invariants of a run. The owner may check them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echo2d.core.base.ids import Digest, Epoch, PeerId, RequestId, RunId, SegmentId, SessionId
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    CloseSession,
    DialBack,
    DialBackEnded,
    PeerConnected,
    PeerSaid,
    Persist,
    PublishAsked,
    Reply,
    Send,
    StopRun,
)
from echo2d.core.coordinator.events import (
    BatchAsked,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorRecord,
    SessionAsked,
)
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    Address,
    AnswersScored,
    AnswerToScore,
    ApplyFailed,
    EncodeVersion,
    Finish,
    FormEncoded,
    HeldLease,
    HeldVersions,
    Hello,
    LeaseCancelled,
    LeaseGranted,
    LeaseProgress,
    PeerKind,
    RefitDone,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    ScoreAnswers,
    SegmentEncoded,
    ToCoordinator,
    ToPeer,
    VersionKey,
    VersionSpan,
    VersionsRevoked,
    VersionVerified,
    Welcome,
)
from echo2d.core.protocol.evidence import TOLERANCES, Evidence
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.protocol.trajectory import Source, pack_logprobs, pack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.core.weights.signed_index import Root
from echo2d.core.work.events import (
    DrawPrompt,
    ForgetEpisode,
    ProbeRewards,
    PromptDrawn,
    RewardsProbed,
    SampleScored,
    ScoreSample,
    StepEnvironment,
)
from echo2d_lab.faults.environment import ModelEnvironment
from echo2d_lab.faults.memory_ledger import MemoryLedger


@dataclass
class FakePeer:
    """A peer that its owner plays.

    served: versions besides `serving` that wrote tokens for its present leases. stands: the version
    in its current slot. ready: a version that is verified but not refitted yet. leases: those with
    samples to generate (`open`) or unanswered results.
    """

    name: str
    kind: PeerKind
    slots: int
    session: SessionId
    serving: VersionKey | None = None
    served: tuple[VersionKey, ...] = ()
    stands: VersionKey | None = None
    ready: VersionKey | None = None
    # What it is told to hold, and what it holds beside the served version.
    to_hold: HeldVersions = field(default_factory=lambda: HeldVersions(1, ()))
    beside: tuple[VersionKey, ...] = ()
    leases: dict[HeldLease, LeaseGranted] = field(default_factory=dict)
    open: list[tuple[HeldLease, int]] = field(default_factory=list)
    unanswered: dict[tuple[HeldLease, int], SampleFinished] = field(default_factory=dict)
    inbox: list[ToPeer] = field(default_factory=list)
    trusted: bool = False
    closed: bool = False
    run_id: RunId | None = None
    quantization: str = ""
    scores: bool = False

    @property
    def peer(self) -> PeerId:
        return PeerId(self.name)

    def receive(self, message: ToPeer) -> None:
        self.inbox.append(message)
        match message:
            case LeaseGranted(lease, attempt, samples=samples):
                key = HeldLease(lease, attempt)
                self.leases[key] = message
                self.open += [(key, sample) for sample in samples]
            case LeaseCancelled(lease, attempt):
                self.forget(HeldLease(lease, attempt))
            case SampleAnswered(lease, attempt, sample):
                key = HeldLease(lease, attempt)
                self.unanswered.pop((key, sample), None)
                if key not in {each for each, _ in [*self.open, *self.unanswered]}:
                    self.leases.pop(key, None)
            case Welcome(keep=keep):
                for key in [key for key in self.held() if key not in keep]:
                    self.forget(key)
            case VersionsRevoked(_, versions):
                if self.serving in versions:
                    self.serving = None
                if self.ready in versions:
                    self.ready = None
                self.beside = tuple(key for key in self.beside if key not in versions)
            case HeldVersions():
                self.to_hold = message
            case _:
                pass

    def forget(self, key: HeldLease) -> None:
        self.leases.pop(key, None)
        self.open = [each for each in self.open if each[0] != key]
        self.unanswered = {
            each: result for each, result in self.unanswered.items() if each[0] != key
        }

    def held(self) -> tuple[HeldLease, ...]:
        return tuple(self.leases)

    @property
    def versions(self) -> tuple[VersionKey, ...]:
        """What its engines hold, the served version first."""
        return () if self.serving is None else (self.serving, *self.beside)

    def loads(self, key: VersionKey) -> None:
        """Its engines serve this version from now on."""
        kept = [each for each in self.to_hold.versions if each in self.versions and each != key]
        self.serving, self.beside = key, tuple(kept[: self.to_hold.most - 1])

    def hello(self, boot_id: str = "b") -> Hello:
        address = Address("127.0.0.1", 4000)  # no peer dials it
        holding = tuple(
            dict.fromkeys(key for key in (self.serving, self.stands) if key is not None)
        )
        return Hello(
            OURS, self.run_id, self.kind, self.name, boot_id, self.slots, address, self.serving,
            holding, self.held(), (), self.served, dial_back_secret=bytes(SECRET_BYTES),
            scores=self.scores, quantization=self.quantization, held=self.versions,
        )  # fmt: skip

    def finish(
        self,
        key: HeldLease,
        sample: int,
        *,
        tokens: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        finish: Finish = "stop",
    ) -> SampleFinished:
        """Generate the whole sample with the version that the lease names, or that is served now."""
        writer = self.writer(key)
        self.open.remove((key, sample))
        output = (3, 4 + sample % 8, 1) if tokens is None else tokens
        spans = (VersionSpan(0, len(output), *writer),)
        result = SampleFinished(
            key.lease,
            key.attempt,
            sample,
            pack_tokens(output),
            pack_logprobs([-0.5] * len(output) if logprobs is None else logprobs),
            spans,
            finish,
        )
        self.unanswered[key, sample] = result
        return result

    def wrote(self, key: HeldLease, sample: int, *tokens: int, start: int = 0) -> LeaseProgress:
        """Report these tokens of a sample, after the first `start`, with the version that `finish` would take."""
        end = start + len(tokens)
        spans = (VersionSpan(start, end, *self.writer(key)),)
        delta = SampleDelta(
            sample, pack_tokens(tokens), pack_logprobs([-0.25] * len(tokens)), spans
        )
        return LeaseProgress(key.lease, key.attempt, (delta,))

    def writer(self, key: HeldLease) -> VersionKey:
        """The version that writes the tokens of this lease now."""
        assert self.serving is not None
        lease = self.leases.get(key)
        return self.serving if lease is None else lease.version or self.serving


class MemoryRun:
    """See the module docstring. stopped: why the coordinator ended the run; None: it has not.

    probed: for how many prompts the task fails to score the expected answer, and for how many it scores it.
    """

    probed = (0, 8)

    def __init__(self, rules: RunRules) -> None:
        self.rules = rules
        self.now = 0.0
        self.ledger = MemoryLedger()
        self.environment = ModelEnvironment()
        self.pending: list[CoordinatorEvent] = []
        self.replies: dict[RequestId, Reply] = {}
        self.peers: dict[str, FakePeer] = {}
        self.stopped: str | None = None
        self._sessions = 0
        self._requests = 0
        self._boots = 0
        self.state = self._boot()

    def _boot(self) -> CoordinatorState:
        self._boots += 1
        self.environment.restarted()
        secret = self._boots.to_bytes(PLAN_SECRET_BYTES, "big")
        return CoordinatorState(self.rules, self.ledger.recover(), plan_secret=secret, now=self.now)

    # --- delivery

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = self.state.handle(event, now=self.now)
        for action in actions:
            if isinstance(action, Persist):
                self._persist(action.record)
                self.environment.heard(action.record)
        for action in actions:
            self._perform(action)
        return actions

    def deliver(self, index: int = 0) -> None:
        self.handle(self.pending.pop(index))

    def drain(self) -> None:
        """Deliver until nothing is pending."""
        while self.pending:
            self.deliver()

    def work(self) -> None:
        """Let every worker generate, verify and refit at once, until nothing is left to do."""
        while self.pending or self.step_workers():
            self.drain()

    def step_workers(self) -> bool:
        moved = False
        for peer in self.peers.values():
            moved = self.refit(peer) or moved
            while peer.open and peer.serving is not None:
                key, sample = peer.open[0]
                self.say(peer, peer.finish(key, sample))
                moved = True
        return moved

    def refit(self, peer: FakePeer) -> bool:
        # As a real worker does, wait for leases that only the present version may write.
        if peer.ready is None or any(lease.hold_s for lease in peer.leases.values()):
            return False
        key, peer.ready = peer.ready, None
        peer.loads(key)
        self.say(peer, RefitDone(*key, 0.1, memory_ok=True, recompute_s=0.0, held=peer.versions))
        return True

    # --- peers

    def connect(
        self,
        name: str,
        *,
        kind: PeerKind = "worker",
        slots: int = 4,
        boot_id: str = "b",
        trusted: bool = False,
        quantization: str = "",
    ) -> FakePeer:
        """Open a session of this peer; a known one reconnects with its leases."""
        self._sessions += 1
        peer = self.peers.get(name) or FakePeer(name, kind, slots, SessionId(0), trusted=trusted)
        peer.quantization = quantization or peer.quantization
        peer.session, peer.closed = SessionId(self._sessions), False
        peer.run_id = self.rules.run_id
        self.peers[name] = peer
        self.handle(
            PeerConnected(peer.session, peer.peer, self._hello(peer, boot_id), peer.trusted)
        )
        self.pending += [PeerSaid(peer.session, result) for result in peer.unanswered.values()]
        return peer

    def say(self, peer: FakePeer, message: ToCoordinator) -> list[CoordinatorAction]:
        return self.handle(PeerSaid(peer.session, message))

    # --- learner

    def ask(self, make: Callable[[RequestId], CoordinatorEvent]) -> RequestId:
        self._requests += 1
        request = RequestId(self._requests)
        self.handle(make(request))
        return request

    def call(self, make: Callable[[RequestId], CoordinatorEvent]) -> Reply:
        return self.replies[self.ask(make)]

    def open_session(self, resume_step: int = 0, *, steps: int = 0) -> Reply:
        """Open a learner's session. steps: the learner ends after this many."""
        return self.call(lambda number: SessionAsked(number, resume_step, steps=steps))

    def publish_key(self, key: VersionKey, *, epoch: int | None = None) -> Reply:
        """Publish a version. epoch: the default is that of the session in force."""
        mine = self.ledger.epoch if epoch is None else Epoch(epoch)
        path = f"versions/{mine}-{key.version}"
        return self.call(
            lambda number: PublishAsked(number, mine, key.version, key.digest, path, 1000)
        )

    def ask_batch(self, step: int) -> RequestId:
        return self.ask(lambda number: BatchAsked(number, self.ledger.epoch, step))

    # --- methods that an owner may override

    def _hello(self, peer: FakePeer, boot_id: str) -> Hello:
        return peer.hello(boot_id)

    def _persist(self, record: CoordinatorRecord) -> None:
        self.ledger.append(record)

    def _drawn(self, order: DrawPrompt) -> CoordinatorEvent:
        return PromptDrawn(order.cursor, self._prompt(order.cursor), Source(order.task))

    def _prompt(self, cursor: int) -> bytes:
        return pack_tokens([2, 3, cursor % self.rules.vocab_size])

    def _end_reward(self, order: StepEnvironment) -> float | None:
        """The reward of an episode that may end here. None: the environment crashed."""
        return float(order.sample % 2)

    def _reward(self, order: ScoreSample) -> float | None:
        """The reward: every second sample of a group is right. None: the task crashed."""
        return float(order.sample % 2)

    def _score(self, answer: AnswerToScore) -> Evidence:
        """The auditor's evidence about an answer: it is honest."""
        return Evidence(len(answer.tokens) // 4, 1e-6, 0.0, 1.0, 0.0, 0.0, (0,) * len(TOLERANCES))

    def _dial_back(self, order: DialBack) -> str:  # noqa: ARG002 - for owners who need it
        """Why the peer cannot be dialled; empty if it can."""
        return ""

    def _perform(self, action: CoordinatorAction) -> None:  # noqa: C901 - one case per action
        match action:
            case Send(session, message):
                for peer in self._at(session):
                    self._receive(peer, message)
            case SendRoot(sessions, root):
                for peer in self._at(*sessions):
                    self._root(peer, Root.decode(root))
            case CloseSession(session):
                for peer in self._at(session):
                    peer.closed = True
            case Reply(request):
                assert request not in self.replies, "answered twice"
                self.replies[request] = action
            case DialBack(session):
                self.pending.append(DialBackEnded(session, self._dial_back(action)))
            case DrawPrompt():
                self.pending.append(self._drawn(action))
            case ScoreSample(group, sample):
                reward = self._reward(action)
                fault = "" if reward is not None else "crashed"
                failed = reward is None
                self.pending.append(SampleScored(group, sample, reward, fault, failed=failed))
            case ProbeRewards(task):
                self.pending.append(RewardsProbed(task, *self.probed, "crashed"))
            case StepEnvironment():
                self.pending.append(self.environment.step(action, self._end_reward(action)))
            case ForgetEpisode():
                self.environment.forget(action)
            case StopRun(reason):
                self.stopped = reason
            case _:
                pass

    def _at(self, *sessions: SessionId) -> list[FakePeer]:
        """The peers of these sessions, in this order, without peers that have a later session."""
        by_session = {peer.session: peer for peer in self.peers.values()}
        return [by_session[session] for session in sessions if session in by_session]

    def _receive(self, peer: FakePeer, message: ToPeer) -> None:
        if peer.closed:
            return
        if isinstance(message, EncodeVersion):
            self._encode(peer, message)
        if isinstance(message, ScoreAnswers):
            found = tuple(map(self._score, message.answers))
            scored = AnswersScored(message.order, found, 0.1, 0.1)
            self.pending.append(PeerSaid(peer.session, scored))
        peer.receive(message)

    def _encode(self, seed: FakePeer, order: EncodeVersion) -> None:
        segment = Digest(order.digest[::-1])
        for message in (
            SegmentEncoded(order.form, SegmentId(0), segment),
            FormEncoded(order.form, order.digest, 1, 900, 1000, 0.1),
        ):
            self.pending.append(PeerSaid(seed.session, message))

    def _root(self, peer: FakePeer, root: Root) -> None:
        """The peer holds the whole version as soon as it knows its root, if it has the base."""
        if root.totals is None:
            return
        key, base = VersionKey(root.facts.version, root.totals.snapshot), root.facts.base_digest
        if base is None or (
            peer.stands is not None and (peer.stands == key or peer.stands.digest == base)
        ):
            peer.ready = peer.stands = key
            said: ToCoordinator = VersionVerified(root.form, key.version, key.digest)
        else:
            said = ApplyFailed(root.form, "no base", lacks_base=True)
        self.pending.append(PeerSaid(peer.session, said))
