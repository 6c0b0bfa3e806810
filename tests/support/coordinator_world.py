"""A small world around CoordinatorState for tests: a ledger in memory, peers, a learner, and no clock but `now`.

Everything that is under way lies in `World.pending`; a test delivers it in the order it likes. Persists are applied
before any other action of the same turn, as the runtime does. `crash` forgets everything but the ledger.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from echo2d.core.base.ids import (
    Digest,
    Epoch,
    FormId,
    GroupId,
    PeerId,
    RequestId,
    RunId,
    SegmentId,
    SessionId,
    Version,
)
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    CloseSession,
    DeleteVersion,
    DialBack,
    DialBackEnded,
    PeerConnected,
    PeerSaid,
    Persist,
    PublishAsked,
    Send,
    StopRun,
)
from echo2d.core.cluster.rules import RunRules
from echo2d.core.coordinator.events import (
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorRecord,
    DeadlinePassed,
    RefuseAsked,
    Reply,
    SessionAsked,
)
from echo2d.core.coordinator.state import CoordinatorState
from echo2d.core.protocol.control_messages import (
    PROTOCOL_VERSION,
    Address,
    ApplyFailed,
    EncodeVersion,
    FormEncoded,
    HeldLease,
    Hello,
    LeaseCancelled,
    LeaseGranted,
    LeaseProgress,
    PeerKind,
    RefitDone,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    SegmentEncoded,
    ToCoordinator,
    VersionKey,
    VersionSpan,
    VersionsRevoked,
    VersionVerified,
    Welcome,
)
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.protocol.trajectory import (
    BatchBody,
    batch_digest,
    pack_logprobs,
    pack_tokens,
    unpack_batch,
)
from echo2d.core.rollouts.events import (
    BatchFrozen,
    DrawPrompt,
    PromptDrawn,
    SampleKept,
    SampleScored,
    ScoreSample,
)
from echo2d.core.weights.signed_index import Root
from echo2d.sim.run.memory_ledger import MemoryLedger

VOCAB = 32
RULES = RunRules(
    run_id=RunId("run-1"),
    staleness_max=2,
    publish_every=1,
    trajectories_per_step=4,
    group_size=2,
    max_new_tokens=8,
    temperature=1.0,
    top_p=1.0,
    stop_token_ids=(1,),
    vocab_size=VOCAB,
    over_stale="drop",
    filter_zero_variance=True,
    shape="chain",
    chains=1,
)


def rules(**changes: Any) -> RunRules:
    return replace(RULES, **changes)


def version_digest(version: int, salt: int = 0) -> Digest:
    return Digest(bytes([version % 251, salt]) * 16)


def version_key(version: int, salt: int = 0) -> VersionKey:
    return VersionKey(Version(version), version_digest(version, salt))


@dataclass
class Peer:
    """A peer as the test plays it."""

    name: str
    kind: PeerKind
    slots: int
    session: SessionId
    serving: VersionKey | None = None
    served: tuple[VersionKey, ...] = ()  # besides, for what it holds
    stands: VersionKey | None = None  # in its current slot
    ready: VersionKey | None = None  # verified, not refitted yet
    leases: dict[HeldLease, LeaseGranted] = field(default_factory=dict)
    open: list[tuple[HeldLease, int]] = field(default_factory=list)  # samples to generate
    unanswered: dict[tuple[HeldLease, int], SampleFinished] = field(default_factory=dict)
    inbox: list[object] = field(default_factory=list)
    closed: bool = False

    @property
    def peer(self) -> PeerId:
        return PeerId(self.name)

    def receive(self, message: object) -> None:
        self.inbox.append(message)
        match message:
            case LeaseGranted(lease, attempt, samples=samples):
                key = HeldLease(lease, attempt)
                self.leases[key] = message
                self.open += [(key, sample) for sample in samples]
            case LeaseCancelled(lease, attempt):
                self.forget(HeldLease(lease, attempt))
            case SampleAnswered(lease, attempt, sample):
                self.unanswered.pop((HeldLease(lease, attempt), sample), None)
            case Welcome(keep=keep):
                for key in [key for key in self.held() if key not in keep]:
                    self.forget(key)
            case VersionsRevoked(_, versions):
                if self.serving in versions:
                    self.serving = None
                if self.ready in versions:
                    self.ready = None
            case _:
                pass

    def forget(self, key: HeldLease) -> None:
        self.leases.pop(key, None)
        self.open = [each for each in self.open if each[0] != key]
        self.unanswered = {
            each: result for each, result in self.unanswered.items() if each[0] != key
        }

    def held(self) -> tuple[HeldLease, ...]:
        return tuple(dict.fromkeys([*self.leases, *(key for key, _ in self.unanswered)]))

    def hello(self, boot_id: str = "b") -> Hello:
        address = Address("127.0.0.1", 4000)
        holding = tuple(
            dict.fromkeys(key for key in (self.serving, self.stands) if key is not None)
        )
        return Hello(
            PROTOCOL_VERSION, RULES.run_id, self.kind, self.name, boot_id, self.slots, address, self.serving,
            holding, self.held(), (), self.served, dial_back_secret=bytes(SECRET_BYTES),
        )  # fmt: skip

    def finish(
        self, key: HeldLease, sample: int, *, tokens: tuple[int, ...] | None = None
    ) -> SampleFinished:
        """Generate the whole sample under what is served now."""
        assert self.serving is not None
        self.open.remove((key, sample))
        if not any(held == key for held, _ in self.open):
            self.leases.pop(key, None)
        output = (3, 4 + sample % 8, 1) if tokens is None else tokens
        spans = (VersionSpan(0, len(output), self.serving.version, self.serving.digest),)
        result = SampleFinished(
            key.lease,
            key.attempt,
            sample,
            pack_tokens(output),
            pack_logprobs([-0.5] * len(output)),
            spans,
            "stop",
        )
        self.unanswered[key, sample] = result
        return result

    def wrote(self, key: HeldLease, sample: int, *tokens: int, start: int = 0) -> LeaseProgress:
        """It reports these tokens of a sample, behind the first `start`, under what is served now."""
        assert self.serving is not None
        end = start + len(tokens)
        spans = (VersionSpan(start, end, self.serving.version, self.serving.digest),)
        delta = SampleDelta(
            sample, pack_tokens(tokens), pack_logprobs([-0.25] * len(tokens)), spans
        )
        return LeaseProgress(key.lease, key.attempt, (delta,))


class World:
    """See the module docstring."""

    def __init__(self, the_rules: RunRules = RULES) -> None:
        self.rules = the_rules
        self.now = 0.0
        self.ledger = MemoryLedger()
        self.pending: list[CoordinatorEvent] = []
        self.replies: dict[RequestId, Reply] = {}
        self.peers: dict[str, Peer] = {}
        self.actions: list[CoordinatorAction] = []  # of the last event
        self.done: list[DeleteVersion] = []
        self.stopped: str | None = None
        self.closed: set[str] = set()  # peers that nobody can dial
        self.receive_only: set[str] = set()
        self.slow: set[str] = set()  # peers to whom no version gets through
        self.reward: Callable[[int, int], float | None] = lambda cursor, sample: float(sample % 2)
        self.trained: dict[int, BatchBody] = {}
        self.kept: set[tuple[HeldLease, int]] = set()  # durable results
        self.step_of: dict[GroupId, int] = {}  # of every group that was ever frozen
        self.digests: dict[int, Digest] = {}  # of the frozen batches
        self._sessions = 0
        self._requests = 0
        self._boots = 0
        self.state = self._boot()

    def _boot(self) -> CoordinatorState:
        self._boots += 1
        secret = self._boots.to_bytes(32, "big")
        return CoordinatorState(self.rules, self.ledger.recover(), plan_secret=secret, now=self.now)

    # --- time and order

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = self.actions = self.state.handle(event, now=self.now)
        self.state.check()
        for action in actions:
            if isinstance(action, Persist):
                self._persist(action.record)
        for action in actions:
            self._perform(action)
        return actions

    def deliver(self, index: int = 0) -> None:
        self.handle(self.pending.pop(index))

    def drain(self) -> None:
        """Deliver until nothing is under way."""
        while self.pending:
            self.deliver()

    def pass_time(self, seconds: float) -> None:
        """Let the clock run; every deadline on the way is met at its time."""
        end = self.now + seconds
        for _ in range(1000):
            wake_at = self.state.wake_at()
            if wake_at is None or wake_at > end:
                break
            self.now = max(self.now, wake_at)
            self.handle(DeadlinePassed())
        else:
            raise AssertionError("the clock stands still")
        self.now = end

    def work(self) -> None:
        """Ideal workers: everything is generated, verified and refitted at once, until nothing moves."""
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

    def refit(self, peer: Peer) -> bool:
        if peer.ready is None:
            return False
        peer.serving, peer.ready = peer.ready, None
        self.say(peer, RefitDone(peer.serving.version, peer.serving.digest, 0.1, memory_ok=True))
        return True

    def crash(self) -> None:
        """The coordinator dies and comes back; so does the seed. Everything under way is lost."""
        self.pending.clear()
        self.now += 1.0
        self.state = self._boot()
        self.state.check()
        for peer in list(self.peers.values()):
            self.connect(peer.name, kind=peer.kind, slots=peer.slots)

    # --- peers

    def connect(
        self, name: str, *, kind: PeerKind = "worker", slots: int = 4, boot_id: str = "b"
    ) -> Peer:
        """A session of this peer; a known one comes back with what it holds."""
        self._sessions += 1
        peer = self.peers.get(name) or Peer(name, kind, slots, SessionId(0))
        peer.session, peer.closed = SessionId(self._sessions), False
        self.peers[name] = peer
        hello = replace(peer.hello(boot_id), receive_only=name in self.receive_only)
        self.handle(PeerConnected(peer.session, peer.peer, hello))
        self.pending += [PeerSaid(peer.session, result) for result in peer.unanswered.values()]
        return peer

    def say(self, peer: Peer, message: ToCoordinator) -> list[CoordinatorAction]:
        return self.handle(PeerSaid(peer.session, message))

    # --- learner

    def ask(self, make: Callable[[RequestId], CoordinatorEvent]) -> RequestId:
        self._requests += 1
        request = RequestId(self._requests)
        self.handle(make(request))
        return request

    def call(self, make: Callable[[RequestId], CoordinatorEvent]) -> Reply:
        return self.replies[self.ask(make)]

    def open_session(self, resume_step: int = 0) -> Reply:
        return self.call(lambda number: SessionAsked(number, resume_step))

    def publish(self, version: int, *, salt: int = 0, epoch: int | None = None) -> Reply:
        mine = self.ledger.epoch if epoch is None else Epoch(epoch)
        path = f"versions/{mine}-{version}"
        return self.call(
            lambda number: PublishAsked(
                number, mine, Version(version), version_digest(version, salt), path, 1000
            )
        )

    def ask_batch(self, step: int) -> RequestId:
        return self.ask(lambda number: BatchAsked(number, self.ledger.epoch, step))

    @property
    def newest_version(self) -> int | None:
        newest = self.state.status().newest_version
        return None if newest is None else newest.version

    def commit(self, step: int, digest: Digest, *, t_train_s: float = 1.0) -> Reply:
        return self.call(
            lambda number: CommitAsked(number, self.ledger.epoch, step, digest, t_train_s)
        )

    def refuse(self, step: int, *groups: GroupId) -> Reply:
        named = tuple((group, "bad") for group in groups)
        return self.call(lambda number: RefuseAsked(number, self.ledger.epoch, step, named))

    def checkpoint(self, step: int) -> Reply:
        return self.call(lambda number: CheckpointAsked(number, self.ledger.epoch, step))

    # --- inside

    def _persist(self, record: CoordinatorRecord) -> None:
        self.ledger.append(record)
        match record:
            case SampleKept(_, lease, attempt, kept):
                self.kept.add((HeldLease(lease, attempt), kept.sample))
            case BatchFrozen(step, digest, groups):
                self._check_frozen(step, digest, groups)
            case _:
                pass

    def _check_frozen(self, step: int, digest: Digest, groups: tuple[GroupId, ...]) -> None:
        """I1, I5: what is frozen is whole, fresh and of unrevoked versions; and never of two steps (I4)."""
        size, counts = self.rules.group_size, min if self.rules.over_stale == "mask" else max
        assert len(set(groups)) == self.rules.trajectories_per_step // size
        for group in groups:
            assert self.step_of.setdefault(group, step) == step
            trajectories = self.ledger.groups[group].record.trajectories
            assert [trajectory.sample for trajectory in trajectories] == list(range(size))
            assert not any(math.isnan(trajectory.reward) for trajectory in trajectories)
            spans = [span for trajectory in trajectories for span in trajectory.spans]
            ages = [step - 1 - span.version for span in spans]
            assert min(ages) >= 0
            assert counts(ages) <= self.rules.staleness_max
            assert not any(
                VersionKey(span.version, span.digest) in self.ledger.revoked for span in spans
            )
        self.digests[step] = digest

    def _perform(self, action: CoordinatorAction) -> None:
        match action:
            case Send(session, message):
                self._deliver_to(session, message)
            case SendRoot(sessions, root):
                for session in sessions:
                    self._root(session, Root.decode(root))
            case CloseSession(session):
                for peer in self.peers.values():
                    peer.closed = peer.closed or peer.session == session
            case Reply(request):
                assert request not in self.replies, "answered twice"
                self.replies[request] = action
                self._check_batch(action)
            case DialBack(session, peer):
                self.pending.append(
                    DialBackEnded(session, "no answer" if peer in self.closed else "")
                )
            case DrawPrompt(cursor):
                self.pending.append(PromptDrawn(cursor, pack_tokens([2, 3, cursor % VOCAB])))
            case ScoreSample(group, sample, cursor):
                reward = self.reward(cursor, sample)
                self.pending.append(
                    SampleScored(group, sample, reward, "" if reward is not None else "crashed")
                )
            case StopRun(reason):
                self.stopped = reason
            case DeleteVersion():
                self.done.append(action)
            case _:
                pass

    def _deliver_to(self, session: SessionId, message: object) -> None:
        for peer in self.peers.values():
            if peer.session == session and not peer.closed:
                if isinstance(message, EncodeVersion):
                    self._encode(peer, message)
                if isinstance(message, SampleAnswered) and message.accepted:
                    key = HeldLease(message.lease, message.attempt)
                    assert (key, message.sample) in self.kept or self.state._gateway.owns(key)  # I4
                peer.receive(message)

    def _encode(self, seed: Peer, order: EncodeVersion) -> None:
        segment = Digest(order.digest[::-1])
        self.pending.append(
            PeerSaid(seed.session, SegmentEncoded(order.form, SegmentId(0), segment))
        )
        self.pending.append(
            PeerSaid(seed.session, FormEncoded(order.form, order.digest, 1, 900, 1000, 0.1))
        )

    def _root(self, session: SessionId, root: Root) -> None:
        for peer in self.peers.values():
            if peer.session == session and root.totals is not None and peer.name not in self.slow:
                key = VersionKey(root.facts.version, root.totals.snapshot)
                base = root.facts.base_digest
                if (
                    base is not None
                    and peer.stands != key
                    and (peer.stands is None or peer.stands.digest != base)
                ):
                    self.pending.append(
                        PeerSaid(session, ApplyFailed(root.form, "no base", lacks_base=True))
                    )
                    continue
                peer.ready = peer.stands = key
                self.pending.append(
                    PeerSaid(session, VersionVerified(root.form, key.version, key.digest))
                )

    def _check_batch(self, reply: Reply) -> None:
        """A batch that is given out is the one that was frozen, whatever happened since (I4)."""
        if isinstance(reply.body, bytes):
            batch: BatchBody = unpack_batch(reply.body)
            assert reply.digest == batch_digest(reply.body) == self.digests[batch.step]
            assert (
                tuple(group.group for group in batch.groups)
                == self.ledger.frozen[batch.step].groups
            )


def train(
    world: World, steps: int, *, start: int = 0, kappa: int = 1, prefetch: bool = False
) -> None:
    """An ideal learner from a session on: with ideal workers it never waits for ever."""
    assert world.open_session(start).status == 200
    assert world.publish(start).status == 200
    published = start
    for step in range(start + 1, start + steps + 1):
        request = world.ask_batch(step)
        world.work()
        reply = world.replies.get(request)
        assert reply is not None, f"no batch for step {step}: {world.state.status()}"
        assert reply.status == 200
        assert isinstance(reply.body, bytes)
        assert reply.digest is not None
        if prefetch:
            world.ask_batch(step + 1)
        world.now += 1.0
        world.trained[step] = unpack_batch(reply.body)
        assert world.commit(step, reply.digest).status == 200
        if step - published >= kappa:
            assert world.publish(step).status == 200
            published = step


def publish_step(world: World, step: int) -> None:
    """Train it, and publish what it makes."""
    request = world.ask_batch(step)
    world.work()
    digest = world.replies[request].digest
    assert digest is not None
    world.commit(step, digest)
    world.publish(step)


def messages(peer: Peer, kind: type) -> list[Any]:
    return [message for message in peer.inbox if isinstance(message, kind)]


def form_of(world: World) -> FormId:
    order: EncodeVersion = messages(world.peers["seed"], EncodeVersion)[-1]
    return order.form
