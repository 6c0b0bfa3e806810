"""A run without processes, sockets, disk or clock: the real CoordinatorState, a task, and one eager worker.

    run = InProcess(rules, task, writer)
    run.open_session(); run.publish(0, digest)
    body, digest = run.take(1); run.commit(1, digest); run.publish(1, digest) ...

The worker is faster than any learner: whenever it may start a group it has finished it at once, by the newest version.
So it always runs ahead as far as admission lets it, and what waits in the buffer is as stale as S and kappa make it:
with kappa = 1 exactly S train steps, else S - kappa + 1 to S, once the first S + 1 batches are through. The seed hands
every version over whole. The same writer and task give the same batches. For experiments; nothing here is durable.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2d.core.base.ids import Digest, Epoch, PeerId, RequestId, SegmentId, SessionId, Version
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    DialBack,
    DialBackEnded,
    PeerConnected,
    PeerSaid,
    PublishAsked,
    Send,
    StopRun,
)
from echo2d.core.cluster.rules import RunRules
from echo2d.core.coordinator.events import (
    BatchAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    Recovered,
    Reply,
    SessionAsked,
)
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.protocol.control_messages import (
    PROTOCOL_VERSION,
    Address,
    EncodeVersion,
    Finish,
    FormEncoded,
    Hello,
    LeaseGranted,
    PeerKind,
    RefitDone,
    SampleFinished,
    SegmentEncoded,
    ToPeer,
    VersionKey,
    VersionSpan,
    VersionVerified,
)
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens, unpack_tokens
from echo2d.core.rollouts.events import DrawPrompt, PromptDrawn, SampleScored, ScoreSample
from echo2d.core.weights.signed_index import Root
from echo2d.tasks.base import Task

SEED, WORKER = SessionId(1), SessionId(2)
OK = 200


@dataclass(frozen=True, slots=True)
class Written:
    """One whole answer, and log p of each of its tokens under the distribution it was drawn from."""

    tokens: list[int]
    logprobs: list[float]


class Writer(Protocol):
    """What the worker generates with."""

    def refit(self, version: VersionKey) -> None:
        """From now on this one writes."""

    def write(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[Written]]:
        """samples[i] answers to prompts[i]."""


class InProcess:
    """See the module docstring. slots: samples that the worker writes at a time."""

    def __init__(self, rules: RunRules, task: Task, writer: Writer, *, slots: int) -> None:
        self._rules, self._task, self._writer = rules, task, writer
        self._now = 0.0
        self._requests = 0
        self._replies: dict[RequestId, Reply] = {}
        self._events: deque[CoordinatorEvent] = deque()
        self._granted: list[LeaseGranted] = []
        self._serving: VersionKey | None = None
        secret = bytes(PLAN_SECRET_BYTES)
        self.state = CoordinatorState(rules, Recovered.nothing(), plan_secret=secret, now=self._now)
        self._handle(_connected(SEED, "seed", 0))
        self._handle(_connected(WORKER, "worker", slots))

    def open_session(self) -> None:
        self._ask(lambda number: SessionAsked(number, 0))

    def publish(self, version: int, digest: Digest) -> None:
        """The worker has it, and everything that it may write by it, when this returns."""
        epoch = self._epoch
        self._ask(
            lambda number: PublishAsked(number, epoch, Version(version), digest, f"v{version}", 1)
        )

    def take(self, step: int) -> tuple[bytes, Digest]:
        """The bytes of the step's batch and their digest."""
        epoch = self._epoch
        reply = self._ask(lambda number: BatchAsked(number, epoch, step))
        assert isinstance(reply.body, bytes)
        assert reply.digest is not None
        return reply.body, reply.digest

    def commit(self, step: int, digest: Digest) -> int:
        """The publish period in force. A train step takes a second."""
        epoch = self._epoch
        self._now += 1.0
        reply = self._ask(lambda number: CommitAsked(number, epoch, step, digest, 1.0))
        assert isinstance(reply.body, dict)
        return int(reply.body["publish_every"])

    # --- inside

    @property
    def _epoch(self) -> Epoch:
        return Epoch(1)

    def _ask(self, make: Callable[[RequestId], CoordinatorEvent]) -> Reply:
        """The answer, once nothing moves any more."""
        self._requests += 1
        number = RequestId(self._requests)
        self._handle(make(number))
        reply = self._replies.pop(number, None)
        assert reply is not None, f"nothing moves, and no answer: {self.state.status()}"
        assert reply.status == OK, reply.body
        return reply

    def _handle(self, event: CoordinatorEvent) -> None:
        """This event, and all that comes of it."""
        self._events.append(event)
        while self._events or self._granted:
            if not self._events:
                self._write()
            for action in self.state.handle(self._events.popleft(), now=self._now):
                self._perform(action)

    def _perform(self, action: CoordinatorAction) -> None:
        match action:
            case Send(_, message):
                self._receive(message)
            case SendRoot(sessions, root) if WORKER in sessions:
                self._root(Root.decode(root))
            case Reply(request):
                self._replies[request] = action
            case DialBack(session):
                self._events.append(DialBackEnded(session, ""))
            case DrawPrompt(cursor):
                self._events.append(
                    PromptDrawn(cursor, pack_tokens(self._task.prompt(cursor).tokens))
                )
            case ScoreSample(group, sample, cursor, tokens):
                reward = self._task.reward(
                    self._task.prompt(cursor), unpack_tokens(tokens).tolist()
                )
                self._events.append(SampleScored(group, sample, reward, ""))
            case StopRun(reason):
                raise AssertionError(f"the run stopped: {reason}")
            case _:
                pass  # what is for disk, peers that are not there, or people

    def _receive(self, message: ToPeer) -> None:
        match message:
            case EncodeVersion(form, digest=digest):
                segment = Digest(digest[::-1])
                self._events.append(PeerSaid(SEED, SegmentEncoded(form, SegmentId(0), segment)))
                self._events.append(PeerSaid(SEED, FormEncoded(form, digest, 1, 900, 1000, 0.1)))
            case LeaseGranted():
                self._granted.append(message)
            case _:
                pass

    def _root(self, root: Root) -> None:
        """The whole version is there as soon as it is known."""
        if root.totals is None:
            return
        key = VersionKey(root.facts.version, root.totals.snapshot)
        if key == self._serving:
            return
        self._serving = key
        self._writer.refit(key)
        self._events.append(PeerSaid(WORKER, VersionVerified(root.form, key.version, key.digest)))
        self._events.append(
            PeerSaid(WORKER, RefitDone(key.version, key.digest, 0.0, memory_ok=True))
        )

    def _write(self) -> None:
        """All that was granted."""
        granted, self._granted = self._granted, []
        prompts = [unpack_tokens(lease.prompt).tolist() for lease in granted]
        answers = self._writer.write(prompts, [len(lease.samples) for lease in granted])
        for lease, written in zip(granted, answers, strict=True):
            for sample, each in zip(lease.samples, written, strict=True):
                self._events.append(PeerSaid(WORKER, self._finished(lease, sample, each)))

    def _finished(self, lease: LeaseGranted, sample: int, written: Written) -> SampleFinished:
        assert self._serving is not None
        spans = (VersionSpan(0, len(written.tokens), self._serving.version, self._serving.digest),)
        tokens, logprobs = pack_tokens(written.tokens), pack_logprobs(written.logprobs)
        finish: Finish = "stop" if written.tokens[-1] in self._rules.stop_token_ids else "length"
        return SampleFinished(lease.lease, lease.attempt, sample, tokens, logprobs, spans, finish)


def _connected(session: SessionId, kind: PeerKind, slots: int) -> PeerConnected:
    listen = Address("127.0.0.1", 1)  # nobody dials
    secret = bytes(SECRET_BYTES)
    hello = Hello(
        PROTOCOL_VERSION, None, kind, kind, "boot", slots, listen, None, (), (), (), dial_back_secret=secret
    )  # fmt: skip
    return PeerConnected(session, PeerId(kind), hello)
