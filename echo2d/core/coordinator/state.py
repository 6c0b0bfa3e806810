"""The coordinator as one machine: it takes events, hands each to the part that decides, and
returns that part's actions.

    peers ----> membership --+--> groups, leases ----> staleness (gates, buffer, batches)
                             +--> publishing               ^
    learner --> learner_api -------------------------------+--> versions

Every event ends with one `_advance`: requested batches freeze, versions start to spread, and leases
are granted. Heartbeats, lease progress, and rewards that complete no group skip it when nothing waits
for them; they are nine of ten events. The first event also returns what a restart has to do (groups
to score or lease again), so `wake_at` is due at once until then. A peer that breaks the protocol
raises `PeerFault`, and its session is closed. Not here: sockets, disk, time, and every decision.
"""

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from blake3 import blake3

from echo2d.core.audit.audits import Audits
from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import (
    CloseSession,
    CopyLost,
    DialBackEnded,
    Note,
    PeerConnected,
    PeerDisconnected,
    PeerPardoned,
    PeerRevoked,
    PeerSaid,
    Persist,
    PublishAsked,
    RemovalPlanned,
    Send,
)
from echo2d.core.cluster.membership import CONVICTED
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.statistics import FAULT_CHARS_MAX, printable
from echo2d.core.cluster.step_history import StepSummary
from echo2d.core.coordinator.costs import Traffic
from echo2d.core.coordinator.events import (
    AliveTold,
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
    EpochAsked,
    EvaluationsAsked,
    Recovered,
    RefuseAsked,
    RequestGone,
    RulesAsked,
    SessionAsked,
    WorkerOrdered,
)
from echo2d.core.coordinator.glance import Glance, TreeView, make_glance, make_tree
from echo2d.core.coordinator.own_status import earned_together
from echo2d.core.coordinator.parts import make_parts
from echo2d.core.coordinator.status import make_status
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    ApplyFailed,
    DeltasKept,
    EdgeBroken,
    EncodeFailed,
    FormEncoded,
    FrameAccused,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseFailed,
    LeaseProgress,
    Leaving,
    PromptRead,
    RefitDone,
    RefitFailed,
    Refused,
    SampleFinished,
    ScoringFailed,
    SegmentEncoded,
    SegmentsWanted,
    ToCoordinator,
    TransferReport,
    VersionKey,
    VersionsRevoked,
    VersionVerified,
    Welcome,
)
from echo2d.core.rules.prices import FREE
from echo2d.core.rules.run import RunRules
from echo2d.core.status.schema import EarnedStatus, Status
from echo2d.core.tinker.events import (
    ClientAsked,
    OperationAsked,
    OperationEnded,
    OperationLost,
    SampleEnded,
)
from echo2d.core.tinker.service import TinkerService
from echo2d.core.work.calls.events import CallAsked, CallGone, ChoiceGrew, ChoiceStopped
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    RewardsProbed,
    SampleKept,
    SampleRewarded,
    SampleScored,
)
from echo2d.core.work.leases import TRAINING, kind_of
from echo2d.errors import PeerFault

PLAN_SECRET_BYTES = 32
# Lease and plan ids have 63 bits; the first TAG_BITS of them name this process.
TAG_BITS = 31
# No refit drops the KV caches of more tokens than this: SLOTS_MAX samples of a million tokens each.
RECOMPUTED_TOKENS_MAX = 1 << 32
SIGNS_OF_LIFE = Heartbeat | LeaseProgress


class CoordinatorState:
    """See the module docstring.

    plan_secret: PLAN_SECRET_BYTES random bytes, new in each process. now: monotonic seconds.
    """

    def __init__(
        self, rules: RunRules, recovered: Recovered, *, plan_secret: bytes, now: float
    ) -> None:
        assert len(plan_secret) == PLAN_SECRET_BYTES
        tag = int.from_bytes(blake3(b"tag" + plan_secret).digest(8), "big") >> (64 - TAG_BITS)
        self._parts = parts = make_parts(
            rules, recovered, tag=tag, plan_secret=plan_secret, now=now
        )
        self._rules = rules
        self._statistics, self._members = parts.statistics, parts.members
        self._reachability, self._versions = parts.reachability, parts.versions
        self._holding = parts.holding
        self._staleness, self._scheduler = parts.staleness, parts.scheduler
        self._audits, self._evaluations = parts.audits, parts.evaluations
        self._groups, self._gateway = parts.groups, parts.gateway
        self._publishing, self._calls = parts.publishing, parts.calls
        self._activation_loop = parts.activation_loop
        self._cordons, self._costs, self._tinker = parts.cordons, parts.costs, parts.tinker
        self._timed_parts = (
            self._members,
            self._reachability,
            self._scheduler,
            self._publishing,
            self._activation_loop,
            *(part for part in (self._audits, self._tinker) if part is not None),
        )
        self._wake_at: float | None = None
        self._knows_wake_at = False
        # Whether the groups of held-out rows that are from before a restart have been dropped.
        self._held_out_known = False
        self._start: tuple[float, Sequence[CoordinatorAction]] | None = (
            now,
            self._groups.recover(recovered, now=now),
        )

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        """The actions that one event calls for, in the order in which to perform them."""
        self._statistics.now = now
        actions: list[CoordinatorAction] = []
        if self._start is not None:
            actions += self._start[1]
            self._start = None
        actions += self._route(event, now)
        if self._is_done_with(event, actions):
            # The event only moved deadlines later, so none of them is due before the known time.
            return actions
        self._knows_wake_at = False
        return [*(found := [*actions, *self._advance(now)]), *self._newly_earned(found)]

    def _newly_earned(self, actions: Sequence[CoordinatorAction]) -> list[CoordinatorAction]:
        """What workers have earned by this event, to be kept with it."""
        earned = self._statistics.earned
        for each in actions:
            if isinstance(each, Persist) and isinstance(each.record, SampleKept):
                earned.accepted(each.record.trajectory.worker)
        return [earned.to_keep()] if earned.due else []

    def wake_at(self) -> float | None:
        """When `DeadlinePassed` is due, or sooner; None: not before another event."""
        if not self._knows_wake_at:
            self._wake_at, self._knows_wake_at = self._earliest_deadline(), True
        return self._wake_at

    def _earliest_deadline(self) -> float | None:
        if self._start is not None:
            return self._start[0]
        times = [part.wake_at() for part in self._timed_parts]
        return min([at for at in times if at is not None], default=None)

    def seed_alive(self) -> bool:
        """Whether the seed can be spoken to. `status` says it too, and takes a thousand times longer."""
        return self._members.seed is not None

    def status(self, *, now: float | None = None) -> Status:
        """As of `now`, or of the last event."""
        return make_status(self._parts, now=self._statistics.now if now is None else now)

    def earned(self, workers: Iterable[PeerId]) -> EarnedStatus:
        """What these workers together have earned in the run."""
        return earned_together(map(self._statistics.earned.of, workers))

    def glance(self) -> Glance:
        """The few facts that change all the time; cheap, however many workers there are."""
        return make_glance(self._parts)

    def tree(self, stripe: int) -> TreeView | None:
        """A tree of the plan by which a version spreads now; None: there is no plan."""
        spreading = self._publishing.spreading
        return None if spreading is None else make_tree(spreading, stripe)

    def step_summary(self, step: int) -> StepSummary | None:
        """The summary of a step that was committed a moment ago."""
        return self._statistics.step_history.of(step)

    # --- routes

    def _route(  # noqa: C901 - one line per event
        self, event: CoordinatorEvent, now: float
    ) -> Sequence[CoordinatorAction]:
        match event:
            case PeerConnected():
                return self._connected(event, now)
            case PeerSaid(session, message):
                return self._said(session, message, now)
            case PeerDisconnected(session):
                peer = self._members.of_session(session)
                if peer is not None and self._audits is not None:
                    self._audits.scorers.gone(peer.peer)
                self._members.disconnected(session)
                return []
            case PeerPardoned(peer_id):
                if self._audits is not None:
                    self._audits.pardoned(peer_id)
                return []
            case PeerRevoked(peer):
                known = self._members.get(peer)
                return [] if known is None else self._revoke(known, now)
            case RemovalPlanned(peer, reason):
                known = self._members.get(peer)
                if known is None or known.state == "gone":
                    return []
                return self._leaving(known, reason)
            case DialBackEnded():
                return self._reachability.ended(event, now=now)
            case CopyLost(path):
                return self._versions.lose(path)
            case SessionAsked():
                return self._session_asked(event, now)
            case RulesAsked():
                return self._calls.rules_asked(event)
            case AliveTold():
                return self._calls.alive(event)
            case EpochAsked():
                return self._calls.epoch_asked(event)
            case PublishAsked():
                return [*self._calls.publish_asked(event, now=now), *self._revoked(now)]
            case BatchAsked():
                return self._calls.batch_asked(event)
            case CommitAsked():
                return self._calls.commit_asked(event)
            case RefuseAsked():
                return self._calls.refuse_asked(event)
            case CheckpointAsked():
                return self._calls.checkpoint_asked(event)
            case EvaluationsAsked():
                return self._calls.evaluations_asked(event)
            case WorkerOrdered():
                return self._ordered(event, now)
            case RequestGone(request):
                self._calls.request_gone(request)
                if self._tinker is not None:
                    self._tinker.request_gone(request)
                return []
            case PromptDrawn(source=source):
                return self._scheduler.of_task(source.task).prompt_drawn(event)
            case PromptFailed(task=task):
                return self._scheduler.of_task(task).prompt_failed(event)
            case PromptsEnded(task=task):
                return self._scheduler.of_task(task).prompts_ended(event)
            case SampleScored(group):
                return self._scheduler.of_group(group).scored(event)
            case RewardsProbed():
                return self._groups.probed(event)
            case EnvironmentStepped(group):
                return self._scheduler.of_group(group).environment_stepped(event, now=now)
            case EpisodeEnded(group):
                return self._scheduler.of_group(group).episode_ended(event, now=now)
            case CallAsked():
                return self._gateway.asked(event, now=now)
            case ChoiceStopped():
                return self._gateway.stopped(event, now=now)
            case CallGone():
                return self._gateway.gone(event, now=now)
            case ClientAsked() | OperationLost() | SampleEnded():
                return self._of_tinker().handle(event, now=now)
            case OperationAsked(request, epoch) | OperationEnded(request, epoch):
                fenced = self._calls.fenced(request, epoch)
                return fenced or self._of_tinker().handle(event, now=now)
            case DeadlinePassed():
                return self._deadlines(now)
            case _:
                assert_never(event)

    def _session_asked(self, event: SessionAsked, now: float) -> Sequence[CoordinatorAction]:
        before = self._calls.epoch
        actions = [*self._calls.session_asked(event, now=now), *self._revoked(now)]
        if self._tinker is not None and self._calls.epoch != before:
            actions += self._tinker.learner_began(now=now)
        return actions

    def _of_tinker(self) -> TinkerService:
        assert self._tinker is not None, "its routes are mounted only with [tinker]"
        return self._tinker

    def _revoke(self, peer: Peer, now: float) -> Sequence[CoordinatorAction]:
        return [*self._members.revoked(peer), *self._gone(peer, now, revoked=True)]

    def _revoked(self, now: float) -> Sequence[CoordinatorAction]:
        """Versions may just have been revoked."""
        self._holding.revoked()
        return [*self._evaluations.revoked(), *self._gateway.revoked(now=now)]

    def _connected(self, event: PeerConnected, now: float) -> Sequence[CoordinatorAction]:
        if self._audits is not None and self._audits.is_convicted(event.peer):
            refused = Refused("convicted", CONVICTED, permanent=True)
            return [Send(event.session, refused), CloseSession(event.session)]
        joined, actions = self._members.connected(event, now=now)
        if joined is None:
            return actions
        peer, hello = joined.peer, event.hello
        self._cordons.joined(peer)
        self._bill(peer, now)
        told = Traffic(hello.received_bytes, hello.sent_bytes)
        sent = self._costs.began(peer.peer, hello.boot_id, told, now=now)
        self._statistics.earned.sent(peer.peer, sent)
        verdicts = [] if self._audits is None else self._audits.joined(peer, now=now)
        if self._tinker is not None:
            self._tinker.prompts.joined(peer)
        self._activation_loop.changed()
        kept, cancelled, lease_actions = self._scheduler.rejoined(peer, hello.leases, now=now)
        welcome = Welcome(
            peer.peer,
            self._rules.run_id,
            self._calls.epoch,
            self._versions.publish_seq,
            self._rules.heartbeat_s,
            kept,
            cancelled,
            self._rules.dissemination.mode == "exclusive",
            self._rules.staleness_max,
        )
        # At most eight versions of a hello are checked; a worker has only two snapshot slots.
        claimed = [hello.serving, *hello.holding[:8], *peer.engine.held]
        revocations = self._revoke_unpublished(peer, claimed, now)
        publishing_actions = self._publishing.joined(peer, renewed=joined.renewed, now=now)
        dial_back = self._reachability.joined(peer, now=now)
        # The welcome is the first message of a session.
        return [
            *actions,
            *verdicts,
            Send(event.session, welcome),
            *self._holding.joined(peer),
            *lease_actions,
            *self._held_changed(now),
            *revocations,
            *publishing_actions,
            *dial_back,
        ]

    def _said(
        self, session: SessionId, message: ToCoordinator, now: float
    ) -> Sequence[CoordinatorAction]:
        peer, returned = self._members.heard(session, now=now)
        if peer is None:
            # The session has been closed; its last messages may still arrive.
            return []
        if not isinstance(message, SIGNS_OF_LIFE):
            self._members.changed.add(peer.peer)
        # A suspected peer lost its place in the plan; it gets a new one when it is heard again.
        rejoining = self._publishing.joined(peer, renewed=False, now=now) if returned else []
        if returned:
            self._bill(peer, now)
        quarantined = peer.service.misreports > 0
        try:
            actions = self._message(peer, message, now)
        except PeerFault as fault:
            self._members.disconnected(session)
            note = self._statistics.fault("peer", f"{peer.name}: {fault}")
            return [
                *rejoining,
                note,
                Send(session, Refused("protocol", str(fault), permanent=False)),
                CloseSession(session),
            ]
        if peer.service.misreports and not quarantined:
            self._activation_loop.changed()
            actions = [*actions, *self._scheduler.hand_over(peer, now=now)]
        return [*rejoining, *actions]

    def _bill(self, peer: Peer, now: float) -> None:
        """The peer is here from now on, and costs what its price says."""
        if peer.kind == "worker":
            self._costs.here(peer.peer, self._activation_loop.price(peer), now=now)
        elif peer.kind == "relay":
            self._costs.here(peer.peer, FREE, now=now)

    def _encode_failed(
        self, peer: Peer, message: EncodeFailed, now: float
    ) -> Sequence[CoordinatorAction]:
        record = self._publishing.never_right(message.form) if message.differs else None
        if record is None or peer.kind != "seed":
            return self._publishing.encode_failed(peer, message, now=now)
        return [*self._calls.differs(record, message.reason, now=now), *self._revoked(now)]

    def _message(  # noqa: C901 - one line per message
        self, peer: Peer, message: ToCoordinator, now: float
    ) -> Sequence[CoordinatorAction]:
        match message:
            case Heartbeat(running, disk_free, received, sent):
                peer.engine.running, peer.engine.disk_free = running, disk_free
                new = self._costs.moved(peer.peer, Traffic(received, sent), now=now)
                self._statistics.earned.sent(peer.peer, new)
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
                return self._encode_failed(peer, message, now)
            case DeltasKept():
                return self._publishing.deltas_kept(peer, message)
            case SegmentsWanted():
                return self._publishing.segments_wanted(peer, message)
            case EdgeBroken() | FrameAccused() if peer.service.misreports:
                return []
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
            case RefitFailed():
                return self._refit_failed(peer, message, now)
            case LeaseProgress():
                return self._scheduler.progressed(peer, message, now=now)
            case SampleFinished():
                return self._scheduler.finished(peer, message, now=now)
            case LeaseFailed():
                return self._scheduler.failed(peer, message, now=now)
            case AnswersScored():
                if self._audits is None:
                    raise PeerFault("a message about scores, but this run has no [audit]")
                return self._audits.found(peer, message, now=now)
            case ScoringFailed():
                if self._audits is None:
                    raise PeerFault("a message about scores, but this run has no [audit]")
                return self._audits.failed(peer, message)
            case PromptRead():
                if self._tinker is None:
                    raise PeerFault("a message about a prompt, but this run has no [tinker]")
                return self._tinker.prompt_read(peer, message, now=now)
            case Hello():
                raise PeerFault("a second hello")
            case _:
                assert_never(message)

    def _leaving(self, peer: Peer, reason: str) -> Sequence[CoordinatorAction]:
        """The peer will be taken away: it gets no more leases, and others are activated for it."""
        if peer.service.leaving:
            return []
        peer.service.leaving = True
        self._members.changed.add(peer.peer)
        self._activation_loop.changed()
        return [Note("leaving", f"{peer.name}: {printable(reason, FAULT_CHARS_MAX)}")]

    def _ordered(self, event: WorkerOrdered, now: float) -> Sequence[CoordinatorAction]:
        self._activation_loop.changed()
        peer = self._members.get(event.peer)
        handed: list[CoordinatorAction] = []
        if event.hand_over and peer is not None:
            handed += self._scheduler.hand_over(peer, now=now)
        return [*handed, *self._cordons.ordered(event)]

    # --- what several parts must hear of

    def _refitted(self, peer: Peer, message: RefitDone, now: float) -> Sequence[CoordinatorAction]:
        spent_s = (message.pause_s, message.held_s, message.recompute_s or 0.0)
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in spent_s):
            raise PeerFault("pause_s, held_s and recompute_s must be finite and >= 0")
        if not 0 <= message.recomputed_tokens <= RECOMPUTED_TOKENS_MAX:
            raise PeerFault(
                f"recomputed_tokens must be 0 to {RECOMPUTED_TOKENS_MAX}; "
                f"found {message.recomputed_tokens}"
            )
        before = peer.engine.serving
        key = VersionKey(message.version, message.digest)
        peer.engine.refitted(message, self._holding.beside(peer, key, message.held))
        if revocations := self._revoke_unpublished(peer, [peer.engine.serving], now):
            note = self._statistics.fault(
                "refit", f"{peer.name}: version {message.version} is not published"
            )
            return [note, *revocations]
        published = self._versions.live(peer.engine.serving)
        assert published is not None
        newer = published.publish_seq > peer.engine.newest_seq
        peer.engine.newest_seq = max(peer.engine.newest_seq, published.publish_seq)
        # Loading the first version pauses nothing, so its time is no refit pause.
        if before is None:
            self._activation_loop.changed()
        elif newer:
            # A worker that goes back and forth would have all its time forgiven.
            still_s = self._activation_loop.refitted(peer, message, now=now)
            self._scheduler.deliveries.stood_still(peer.peer, still_s)
        peer.engine.refitted_at = now
        self._publishing.served(peer, now=now)
        # The next weights of clients may have waited for this one.
        published_next = [] if self._tinker is None else self._tinker.advance(now=now)
        return [*self._gateway.refitted(now=now), *published_next]

    def _refit_failed(
        self, peer: Peer, message: RefitFailed, now: float
    ) -> Sequence[CoordinatorAction]:
        serving = message.serving if message.serving in peer.engine.acknowledged else None
        peer.engine.serves(serving, self._holding.beside(peer, serving, message.held))
        self._activation_loop.changed()
        text = f"{peer.name}, version {message.version}: {message.reason}"
        return [self._statistics.fault("refit", text), *self._held_changed(now)]

    def _held_changed(self, now: float) -> Sequence[CoordinatorAction]:
        """A worker may hold fewer versions than before."""
        return self._gateway.refitted(now=now) if self._holding.several else []

    def _revoke_unpublished(
        self, peer: Peer, claimed: Iterable[VersionKey | None], now: float
    ) -> Sequence[CoordinatorAction]:
        """Tell the peer which of the versions it claims to have are not published (I1).

        They may have been revoked while it was away.
        """
        unpublished = tuple(
            key
            for key in dict.fromkeys(claimed)
            if key is not None and self._versions.live(key) is None
        )
        if not unpublished or peer.session is None:
            return []
        self._holding.revoked()
        return [
            *self._groups.revoke(unpublished, now=now),
            Send(peer.session, VersionsRevoked(self._calls.epoch, unpublished)),
        ]

    def _gone(
        self, peer: Peer, now: float, *, revoked: bool = False
    ) -> Sequence[CoordinatorAction]:
        """The peer will not come back soon: its work goes to others."""
        self._activation_loop.changed()
        self._costs.gone(peer.peer, now=now)
        return [
            *self._scheduler.worker_left(peer, revoked=revoked, now=now),
            *self._gateway.refitted(now=now),
            *self._publishing.lost(peer),
        ]

    def _deadlines(self, now: float) -> Sequence[CoordinatorAction]:
        suspected, session_actions = self._members.deadlines(now=now)
        repairs: list[CoordinatorAction] = []
        for peer in suspected:
            self._activation_loop.changed()
            self._costs.gone(peer.peer, now=now)
            repairs += self._publishing.lost(peer)
        if self._audits is not None:
            self._audits.deadlines(now=now)
        return [
            *session_actions,
            *repairs,
            *(self._held_changed(now) if suspected else []),
            *self._reachability.deadlines(now=now),
            *self._publishing.tell_on(now=now),
            *self._scheduler.deadlines(now=now),
            *([] if self._tinker is None else self._tinker.advance(now=now)),
        ]

    def _settle_audits(self, audits: Audits, now: float) -> Sequence[CoordinatorAction]:
        """Do what the audit has decided, and give auditors their next orders."""
        verdicts = audits.waiting.take_decided()
        actions: list[CoordinatorAction] = []
        for worker in audits.take_convicted():
            if (peer := self._members.get(worker)) is not None:
                actions += self._members.revoked(peer, "convicted", CONVICTED)
                actions += self._gone(peer, now, revoked=True)
            actions += self._groups.convicted(worker, now=now)
            actions += self._gateway.convicted(worker, now=now)
        for verdict in verdicts:
            actions += self._groups.judged(verdict)
            actions += self._gateway.judged(verdict, now=now)
        return [*actions, *audits.scorers.advance(now)]

    def _advance(self, now: float) -> Sequence[CoordinatorAction]:
        audit_actions = [] if self._audits is None else self._settle_audits(self._audits, now)
        held_out: Sequence[CoordinatorAction] = []
        if self._rules.evals and not self._held_out_known and self._evaluations.ready:
            self._held_out_known = True
            held_out = self._groups.drop_held_out()
        actions = [
            *audit_actions,
            *held_out,
            *self._calls.advance(),
            *self._activation_loop.advance(now=now),
            *self._cordons.advance(),
            *self._publishing.advance(now=now),
        ]
        actions += self._groups.age(now=now)
        actions += self._groups.move(self._groups.late_moves(now=now), now=now)
        actions += self._evaluations.advance(now=now)
        actions += self._scheduler.fill(now=now)
        actions += [] if self._tinker is None else self._tinker.read_prompts(now=now)
        # Which rows are held out must be known before prompts are drawn.
        if self._evaluations.ready:
            actions += self._groups.draw_ahead(self._scheduler.slots)
            if self._groups.are_outside:
                actions += self._groups.offer_episodes()
        return actions

    def _is_done_with(self, event: CoordinatorEvent, actions: Sequence[CoordinatorAction]) -> bool:
        """The event changed nothing that batches, versions or leases wait for."""
        if self._members.changed:
            return False
        if isinstance(event, PeerSaid):
            return isinstance(event.message, SIGNS_OF_LIFE) and all(
                isinstance(action, ChoiceGrew) for action in actions
            )
        # The event is a reward for a group of the run, and the group still lacks other rewards.
        return (
            isinstance(event, SampleScored)
            and kind_of(event.group) == TRAINING
            and all(
                isinstance(action, Persist) and isinstance(action.record, SampleRewarded)
                for action in actions
            )
        )

    def check(self) -> None:
        """Check the invariants of every part."""
        for part in (
            self._statistics,
            self._members,
            self._versions,
            self._staleness,
            self._scheduler,
            self._publishing,
        ):
            part.check()
        if self._audits is not None:
            self._audits.check()
        if self._tinker is not None:
            self._tinker.check()
        self._reachability.check()
        self._calls.check()
        self._activation_loop.check()
        self._cordons.check()
        self._costs.check()
