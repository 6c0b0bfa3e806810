"""The coordinator as one machine: events in, actions out. It only routes; the parts decide.

    peers ----> membership --+--> groups, leases ----> staleness (gates, buffer, batches)
                             +--> publishing, spread      ^
    learner --> learner_calls ----------------------------+--> versions

Every event ends with one `_advance`: batches that were asked for freeze, versions start to spread, leases are granted;
but not a sign of life that calls for nothing, of which there are ten for each other event.
What a restart has to do first (groups to score or lease again) comes out of the first event; `wake_at` is now until
then. A peer that breaks the protocol is closed (`PeerFault`). Not here: sockets, disk, time, and every decision.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from blake3 import blake3

from echo2d.core.base.ids import SessionId
from echo2d.core.broadcast.publishing import Publishing
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.cluster.events import (
    CloseSession,
    DialBackEnded,
    Note,
    PeerConnected,
    PeerDisconnected,
    PeerRevoked,
    PeerSaid,
    PublishAsked,
    RemovalPlanned,
    Send,
)
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.reachability import Reachability
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import FAULT_CHARS_MAX, Statistics, printable
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.coordinator.activation_loop import ActivationLoop
from echo2d.core.coordinator.events import (
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
    EpochAsked,
    Recovered,
    RefuseAsked,
    RequestGone,
    SessionAsked,
)
from echo2d.core.coordinator.learner_api import LearnerCalls
from echo2d.core.coordinator.status import make_status
from echo2d.core.gateway.calls import GatewayCalls
from echo2d.core.gateway.events import CallAsked, CallGone, ChoiceGrew, ChoiceStopped
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    DeltasKept,
    EdgeBroken,
    EncodeFailed,
    FormEncoded,
    FrameAccused,
    Goodbye,
    Heartbeat,
    HeldLease,
    Hello,
    LeaseFailed,
    LeaseProgress,
    Leaving,
    RefitDone,
    RefitFailed,
    Refused,
    SampleFinished,
    SegmentEncoded,
    SegmentsWanted,
    ToCoordinator,
    TransferReport,
    VersionKey,
    VersionsRevoked,
    VersionVerified,
    Welcome,
)
from echo2d.core.rollouts.events import PromptDrawn, SampleScored
from echo2d.core.rollouts.groups import Groups
from echo2d.core.rollouts.scheduler import LeaseScheduler
from echo2d.core.rollouts.staleness import Staleness
from echo2d.errors import PeerFault

PLAN_SECRET_BYTES = 32
HOLDING_MAX = 8  # versions of one hello that are looked at; a worker has two slots
TAG_BITS = 31  # of this process, in front of lease and plan ids, which are 63 bits long
SIGNS_OF_LIFE = Heartbeat | LeaseProgress  # nine of ten events


class CoordinatorState:
    """See the module docstring. plan_secret: PLAN_SECRET_BYTES random bytes of this process. now: monotonic seconds."""

    def __init__(
        self, rules: RunRules, recovered: Recovered, *, plan_secret: bytes, now: float
    ) -> None:
        assert len(plan_secret) == PLAN_SECRET_BYTES
        tag = int.from_bytes(blake3(b"tag" + plan_secret).digest(8), "big") >> (64 - TAG_BITS)
        self._rules = rules
        self._statistics = Statistics(now, Measurements(rules.group_size))
        self._members = Membership(rules.run_id, rules.heartbeat_s, p2p=rules.p2p)
        self._reachability = Reachability(self._members)
        self._versions = PublishedVersions(
            recovered.published, recovered.publish_seq, lost=recovered.lost
        )
        self._staleness = Staleness(rules, recovered)
        self._scheduler = LeaseScheduler(
            members=self._members, versions=self._versions, statistics=self._statistics
        )
        self._groups = Groups(
            rules, recovered, members=self._members, versions=self._versions, staleness=self._staleness,
            statistics=self._statistics, scheduler=self._scheduler, tag=tag,
        )  # fmt: skip
        self._gateway = GatewayCalls(
            rules, members=self._members, versions=self._versions, statistics=self._statistics,
            scheduler=self._scheduler, tag=tag ^ 1,
        )  # fmt: skip
        self._publishing = Publishing(
            rules, members=self._members, versions=self._versions, statistics=self._statistics, plan_secret=plan_secret,
            tag=tag, rates=recovered.rates, form=recovered.form, now=now,
        )  # fmt: skip
        self._calls = LearnerCalls(
            rules, recovered, members=self._members, versions=self._versions, staleness=self._staleness,
            groups=self._groups, publishing=self._publishing, statistics=self._statistics,
        )  # fmt: skip
        self._activation_loop = ActivationLoop(
            rules,
            self._members,
            self._staleness,
            self._groups,
            self._publishing,
            self._calls,
            self._statistics,
        )
        self._start: tuple[float, Sequence[CoordinatorAction]] | None = (
            now,
            self._groups.recover(recovered, now=now),
        )

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        """What to do about one event."""
        self._statistics.now = now
        actions: list[CoordinatorAction] = []
        if self._start is not None:
            actions += self._start[1]
            self._start = None
        actions += self._route(event, now)
        if self._only_lives(event, actions):
            return actions
        return [*actions, *self._advance(now)]

    def wake_at(self) -> float | None:
        """When a DeadlinePassed is due; None: not before another event."""
        if self._start is not None:
            return self._start[0]
        parts = (
            self._members, self._reachability, self._groups, self._gateway, self._scheduler, self._publishing,
            self._activation_loop,
        )  # fmt: skip
        return min(
            (at for at in (part.wake_at() for part in parts) if at is not None), default=None
        )

    def status(self, *, now: float | None = None) -> dict[str, Any]:
        """Of `now`, or of the last event."""
        return make_status(
            self._rules, now=self._statistics.now if now is None else now, members=self._members,
            versions=self._versions, staleness=self._staleness,
            groups=self._groups, gateway=self._gateway, publishing=self._publishing, calls=self._calls,
            statistics=self._statistics, activation_loop=self._activation_loop,
        )  # fmt: skip

    # --- routes

    def _route(self, event: CoordinatorEvent, now: float) -> Sequence[CoordinatorAction]:  # noqa: C901 - one line per event
        match event:
            case PeerConnected():
                return self._connected(event, now)
            case PeerSaid(session, message):
                return self._said(session, message, now)
            case PeerDisconnected(session):
                self._members.disconnected(session)
                return []
            case PeerRevoked(peer):
                known = self._members.get(peer)
                return (
                    []
                    if known is None
                    else [*self._members.revoked(known), *self._gone(known, now, revoked=True)]
                )
            case RemovalPlanned(peer, reason):
                known = self._members.get(peer)
                return (
                    [] if known is None or known.state == "gone" else self._leaving(known, reason)
                )
            case DialBackEnded():
                return self._reachability.ended(event, now=now)
            case SessionAsked():
                return [*self._calls.session_asked(event, now=now), *self._gateway.revoked(now=now)]
            case EpochAsked():
                return self._calls.epoch_asked(event)
            case PublishAsked():
                return [*self._calls.publish_asked(event, now=now), *self._gateway.revoked(now=now)]
            case BatchAsked():
                return self._calls.batch_asked(event)
            case CommitAsked():
                return self._calls.commit_asked(event)
            case RefuseAsked():
                return self._calls.refuse_asked(event)
            case CheckpointAsked():
                return self._calls.checkpoint_asked(event)
            case RequestGone(request):
                self._calls.request_gone(request)
                return []
            case PromptDrawn():
                return self._groups.prompt_drawn(event)
            case SampleScored():
                return self._groups.scored(event)
            case CallAsked():
                return self._gateway.asked(event, now=now)
            case ChoiceStopped():
                return self._gateway.stopped(event, now=now)
            case CallGone():
                return self._gateway.gone(event, now=now)
            case DeadlinePassed():
                return self._deadlines(now)
            case _:
                assert_never(event)

    def _connected(self, event: PeerConnected, now: float) -> Sequence[CoordinatorAction]:
        joined, actions = self._members.connected(event, now=now)
        if joined is None:
            return actions
        peer, hello = joined.peer, event.hello
        self._activation_loop.changed()
        mine = [key for key in hello.leases if self._gateway.owns(key)]
        kept, called_off = self._gateway.rejoined(peer, mine, now=now)
        calls = frozenset(kept)
        keep, cancel, ended = self._groups.rejoined(
            peer, [key for key in hello.leases if key not in calls], now=now
        )
        seq = self._versions.publish_seq
        rules, epoch = self._rules, self._calls.epoch
        exclusive = rules.mode == "exclusive"
        welcome = Welcome(
            peer.peer,
            rules.run_id,
            epoch,
            seq,
            rules.heartbeat_s,
            (*kept, *keep),
            cancel,
            exclusive,
        )
        void = self._tell_void(peer, [hello.serving, *hello.holding[:HOLDING_MAX]], now)
        placed = self._publishing.joined(peer, renewed=joined.renewed, now=now)
        dialled = self._reachability.joined(peer, now=now)
        return [
            *actions,
            Send(event.session, welcome),
            *called_off,
            *ended,
            *void,
            *placed,
            *dialled,
        ]

    def _said(
        self, session: SessionId, message: ToCoordinator, now: float
    ) -> Sequence[CoordinatorAction]:
        peer, returned = self._members.heard(session, now=now)
        if peer is None:
            return []
        if not isinstance(message, SIGNS_OF_LIFE):
            self._members.changed.add(peer.peer)
        back = self._publishing.joined(peer, renewed=False, now=now) if returned else []
        try:
            return [*back, *self._message(peer, message, now)]
        except PeerFault as fault:
            self._members.disconnected(session)
            note = self._statistics.fault("peer", f"{peer.name}: {fault}")
            return [
                *back,
                note,
                Send(session, Refused("protocol", str(fault), permanent=False)),
                CloseSession(session),
            ]

    def _message(  # noqa: C901 - one line per message
        self, peer: Peer, message: ToCoordinator, now: float
    ) -> Sequence[CoordinatorAction]:
        match message:
            case Heartbeat(running):
                peer.running = running
                return []
            case Leaving(reason):
                return self._leaving(peer, reason)
            case Goodbye():
                return [*self._members.left(peer), *self._gone(peer, now)]
            case SegmentEncoded():
                return self._publishing.segment_encoded(peer, message, now=now)
            case FormEncoded():
                return self._publishing.form_encoded(peer, message, now=now)
            case EncodeFailed():
                return self._publishing.encode_failed(peer, message, now=now)
            case DeltasKept():
                return self._publishing.deltas_kept(peer, message)
            case SegmentsWanted():
                return self._publishing.segments_wanted(peer, message)
            case EdgeBroken():
                return self._publishing.edge_broken(peer, message)
            case FrameAccused():
                return self._publishing.frame_accused(peer, message, now=now)
            case TransferReport():
                return self._publishing.transferred(peer, message, now=now)
            case VersionVerified():
                return self._publishing.verified(peer, message, now=now)
            case ApplyFailed():
                return self._publishing.apply_failed(peer, message, now=now)
            case RefitDone():
                return self._refitted(peer, message, now)
            case RefitFailed(version, _, serving, reason):
                peer.serving = serving if serving in peer.acknowledged else None
                self._activation_loop.changed()
                return [
                    self._statistics.fault("refit", f"{peer.name}, version {version}: {reason}")
                ]
            case LeaseProgress():
                return self._granted_by(message).progressed(peer, message, now=now)
            case SampleFinished():
                return self._granted_by(message).finished(peer, message, now=now)
            case LeaseFailed():
                return self._granted_by(message).failed(peer, message, now=now)
            case Hello():
                raise PeerFault("a second hello")
            case _:
                assert_never(message)

    def _leaving(self, peer: Peer, reason: str) -> Sequence[CoordinatorAction]:
        """It will be taken away: no more leases, and others are activated in its stead."""
        if peer.leaving:
            return []
        peer.leaving = True
        self._members.changed.add(peer.peer)
        self._activation_loop.changed()
        return [Note("leaving", f"{peer.name}: {printable(reason, FAULT_CHARS_MAX)}")]

    def _granted_by(
        self, message: LeaseProgress | SampleFinished | LeaseFailed
    ) -> Groups | GatewayCalls:
        return (
            self._gateway
            if self._gateway.owns(HeldLease(message.lease, message.attempt))
            else self._groups
        )

    def _refitted(self, peer: Peer, message: RefitDone, now: float) -> Sequence[CoordinatorAction]:
        if not all(
            math.isfinite(seconds) and seconds >= 0 for seconds in (message.pause_s, message.held_s)
        ):
            raise PeerFault("a pause that is no duration")
        before = peer.serving
        peer.refitted(message)
        if void := self._tell_void(peer, [peer.serving], now):
            note = self._statistics.fault(
                "refit", f"{peer.name}: version {message.version} is not published"
            )
            return [note, *void]
        if before is None:  # then nothing was generating that could pause
            self._activation_loop.changed()
        elif before != peer.serving:
            self._activation_loop.refitted(peer, message, now=now)
        peer.refitted_at = now
        self._publishing.served(peer, now=now)
        return []

    def _tell_void(
        self, peer: Peer, keys: Iterable[VersionKey | None], now: float
    ) -> Sequence[CoordinatorAction]:
        """Of these versions that are not published: the peer may have been away when they were revoked (I1)."""
        void = tuple(
            key
            for key in dict.fromkeys(keys)
            if key is not None and self._versions.live(key) is None
        )
        if not void or peer.session is None:
            return []
        return [
            *self._groups.revoke(void, now=now),
            Send(peer.session, VersionsRevoked(self._calls.epoch, void)),
        ]

    def _gone(
        self, peer: Peer, now: float, *, revoked: bool = False
    ) -> Sequence[CoordinatorAction]:
        """It will not come back soon: its work goes to others."""
        self._activation_loop.changed()
        calls = self._gateway.worker_left(peer, now=now)
        return [
            *calls,
            *self._groups.worker_left(peer, revoked=revoked, now=now),
            *self._publishing.lost(peer),
        ]

    def _deadlines(self, now: float) -> Sequence[CoordinatorAction]:
        suspected, closed = self._members.deadlines(now=now)
        lost: list[CoordinatorAction] = []
        for peer in suspected:
            self._activation_loop.changed()
            lost += self._publishing.lost(peer)
        return [
            *closed,
            *lost,
            *self._reachability.deadlines(now=now),
            *self._publishing.tell_on(now=now),
            *self._groups.deadlines(now=now),
            *self._gateway.deadlines(now=now),
        ]

    def _advance(self, now: float) -> Sequence[CoordinatorAction]:
        actions = [
            *self._calls.advance(),
            *self._activation_loop.advance(now=now),
            *self._publishing.advance(now=now),
        ]
        actions += self._groups.age(now=now)
        actions += self._scheduler.fill(now=now)
        return [*actions, *self._groups.draw_ahead(self._scheduler.slots)]

    def _only_lives(self, event: CoordinatorEvent, actions: Sequence[CoordinatorAction]) -> bool:
        """It has changed nothing that batches, versions or leases wait for."""
        lives = isinstance(event, PeerSaid) and isinstance(event.message, SIGNS_OF_LIFE)
        return (
            lives
            and not self._members.changed
            and all(isinstance(action, ChoiceGrew) for action in actions)
        )

    def check(self) -> None:
        """All invariants of all parts."""
        for part in (
            self._statistics,
            self._members,
            self._versions,
            self._staleness,
            self._groups,
            self._scheduler,
            self._publishing,
        ):
            part.check()
        self._reachability.check()
        self._gateway.check()
        self._calls.check()
        self._activation_loop.check()
