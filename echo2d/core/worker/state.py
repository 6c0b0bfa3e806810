"""The machine of a worker or relay peer: holds versions, relays frames, refits engines, generates.

It composes three machines; events go in, actions come out:

    control link ---+--> WorkerVersions   which version to hold, apply, serve    (`versions`)
    links (relay) --+--> Relay            which frames to send and to ask for    (`relay/relay`)
    engines --------+--> WorkerLeases     what to generate, report, send again   (`leases`)

The machines meet here. Leases are taken for the served version, or for another one that is held, and
WorkerVersions labels their spans. A revoked version ends its leases. When Relay has all frames of a
form, WorkerVersions applies the form. While the control link is down the worker sends nothing: the
next Hello and Welcome repeat what must not be lost (leases, results, held and served versions). A
relay peer is the same machine without engines (slots == 0).
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import assert_never

from echo2d.core.base.ids import FormId, PeerId, PublishSeq, RunId
from echo2d.core.protocol.addresses import is_dialable
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    Address,
    DialledBack,
    Drain,
    EdgeBroken,
    EdgePeer,
    EncodeVersion,
    ForgetForm,
    FrameAccused,
    Goodbye,
    HeldLease,
    HeldVersions,
    Hello,
    LeaseCancelled,
    LeaseFailed,
    LeaseGranted,
    Leaving,
    PeerKind,
    PlanEdges,
    ReadPrompt,
    RefitDone,
    RefitFailed,
    Refused,
    SampleAnswered,
    ScoreAnswers,
    SegmentPage,
    SignedRoot,
    StripeEdge,
    ToPeer,
    VersionKey,
    VersionsRevoked,
    Welcome,
)
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.relay import Relay
from echo2d.core.topology.plan import STRIPES_MAX
from echo2d.core.worker.events import (
    ApplyCancelled,
    ApplyRejected,
    ArrivalFailed,
    ControlDown,
    ControlUp,
    CoordinatorSaid,
    DropForm,
    EngineLost,
    EngineRefitFailed,
    EngineRefitted,
    GenerationFailed,
    HoldEngines,
    LeaseAction,
    LeaveAsked,
    RefitEngines,
    RootVerified,
    SampleProgressed,
    SendControl,
    ShutDown,
    SnapshotReady,
    Standing,
    StartScoring,
    StopAsked,
    VersionAction,
    VersionEvent,
    WorkerNote,
)
from echo2d.core.worker.leases import WorkerLeases
from echo2d.core.worker.versions import UnderWay, WorkerVersions

WorkerEvent = (
    SampleProgressed | GenerationFailed | CoordinatorSaid | ControlUp | ControlDown | RootVerified
    | ArrivalFailed | SnapshotReady | ApplyRejected | ApplyCancelled | EngineRefitted
    | EngineRefitFailed | EngineLost | StopAsked | LeaveAsked | relay_events.RelayEvent
)  # fmt: skip
WorkerAction = LeaseAction | VersionAction | HoldEngines | relay_events.LinkAction | ShutDown

# At most this many refits happen between a hello and its welcome: these are seconds apart, and a refit
# takes about a second.
REFITS_MAX = 64
UNDIALABLE = (
    "others cannot dial this peer, it dials them (to be dialled: open its port and set "
    "listen_port, or say where it is open with --advertise)"
)


class WorkerState:
    """See the module docstring.

    standing: the versions that are verified in the slots at the start. slots: how many samples run at
    a time.
    """

    def __init__(
        self,
        relay: Relay,
        run_id: RunId,
        *,
        slots: int,
        publish_seq: PublishSeq,
        standing: Iterable[Standing],
    ) -> None:
        self._relay = relay
        self._leases = WorkerLeases(slots)
        self._versions = WorkerVersions(
            run_id,
            engines=slots > 0,
            publish_seq=publish_seq,
            standing=standing,
        )
        self._run_id, self._slots = run_id, slots
        self._up = False
        self._draining = False
        # Set when this worker asked to leave.
        self._leaving: Leaving | None = None
        self._exclusive = False  # as the last welcome said
        # Since when the engines are held for the next version; None: they run.
        self._still_since: float | None = None
        # Why others cannot dial this peer; empty: they can; None: not known yet.
        self._undialable: str | None = None
        # A refit that waits for leases that only one version may write, and until when it waits.
        self._waiting_refit: tuple[RefitEngines, float] | None = None
        self._since_hello: deque[RefitDone | RefitFailed] = deque(maxlen=REFITS_MAX)

    @property
    def running(self) -> int:
        """How many samples the engines run now."""
        return self._leases.running

    @property
    def serving(self) -> VersionKey | None:
        """The version that all engines serve."""
        return self._versions.serving

    @property
    def under_way(self) -> UnderWay | None:
        """The work on the newest version that is not served yet."""
        return self._versions.under_way

    def stands_mostly(self, form: FormId) -> bool:
        """Whether to look for chunks of this form in the slots before asking for any."""
        return self._versions.stands_mostly(form)

    def hello(
        self,
        *,
        kind: PeerKind,
        name: str,
        boot_id: str,
        listen: Address | None,
        forms: Sequence[FormId],
    ) -> Hello:
        """The first message to the coordinator. forms: the forms of which every frame is held."""
        self._since_hello.clear()
        versions, leases = self._versions, self._leases.held()
        return Hello(
            OURS, self._run_id, kind, name, boot_id, self._slots, listen,
            versions.serving, versions.holding(), leases, tuple(forms), self._leases.served(),
            held=versions.held,
        )  # fmt: skip

    def handle(self, event: WorkerEvent, *, now: float) -> list[WorkerAction]:
        """Handle an event. Returns the actions, in order. now: monotonic seconds."""
        if isinstance(event, relay_events.FrameVerified | relay_events.PeerReady):
            relayed = self._relay.handle(event, now=now)
            frames: list[WorkerAction] = [
                action for action in relayed if isinstance(action, relay_events.SendFrame)
            ]
            if len(frames) == len(relayed):
                # Most events are of this kind and concern only the relay.
                return frames
            actions = [*self._routed(relayed, now), *self._after(now)]
        else:
            actions = [*self._on_event(event, now), *self._after(now)]
        refits = [action.message for action in actions if isinstance(action, SendControl)]
        self._since_hello += [
            message for message in refits if isinstance(message, RefitDone | RefitFailed)
        ]
        return [action for action in actions if self._up or not isinstance(action, SendControl)]

    def wake_at(self) -> float | None:
        """When RelayDeadlinePassed is due; None: never."""
        until = None if self._waiting_refit is None else self._waiting_refit[1]
        times = (self._relay.wake_at(), self._leases.wake_at(), self._versions.wake_at(), until)
        return min((time for time in times if time is not None), default=None)

    def _on_event(  # noqa: C901 - one line per event
        self, event: WorkerEvent, now: float
    ) -> Sequence[WorkerAction]:
        match event:
            case SampleProgressed():
                return self._leases.progressed(event, self._versions.labels, now=now)
            case GenerationFailed(lease, attempt, reason):
                return self._leases.failed(HeldLease(lease, attempt), reason, now=now)
            case ControlUp(welcome):
                self._up, self._exclusive = True, welcome.exclusive
                self._versions.staleness_max = welcome.staleness_max
                # Results may name versions that the hello did not name: report their refits first.
                told = [SendControl(message) for message in self._since_hello]
                leaving = [] if self._leaving is None else [SendControl(self._leaving)]
                return [*told, *leaving, *self._leases.welcomed(welcome, now=now)]
            case ControlDown():
                self._up = False
                return []
            case CoordinatorSaid(message):
                return self._on_message(message, now)
            case StopAsked(reason):
                return [
                    *self._leases.give_back(reason),
                    SendControl(Goodbye(reason)),
                    ShutDown(reason),
                ]
            case LeaveAsked(reason):
                self._draining, self._leaving = True, Leaving(reason)
                return [SendControl(self._leaving)]
            case relay_events.RelayDeadlinePassed():
                due = [
                    *self._leases.report(now=now),
                    *self._versioned(self._versions.choose(now=now), now),
                ]
                return [*due, *self._relayed(event, now)]
            case RootVerified(root):
                announced = self._on_version_event(event, now)
                if self.stands_mostly(root.form):
                    self._relay.search(root.form)
                return self._versioned(announced, now)
            case (
                ArrivalFailed()
                | SnapshotReady()
                | ApplyRejected()
                | ApplyCancelled()
                | EngineLost()
            ):
                if isinstance(event, EngineLost) and self._waiting_refit is not None:
                    # The waiting refit repairs the engine, so it is due now.
                    self._waiting_refit = (self._waiting_refit[0], now)
                return self._versioned(self._on_version_event(event, now), now)
            case EngineRefitted() | EngineRefitFailed():
                return self._on_refit(event, now)
            case _:
                return [*self._relayed(event, now), *self._made_room(event, now)]

    def _made_room(self, event: relay_events.RelayEvent, now: float) -> list[WorkerAction]:
        """Stop waiting for a form that was deleted from a full disk to make room for another."""
        if not isinstance(event, relay_events.FormForgotten):
            return []
        return self._versioned(self._versions.forgotten(event.form, now=now), now)

    def _on_refit(
        self, event: EngineRefitted | EngineRefitFailed, now: float
    ) -> Sequence[WorkerAction]:
        key = VersionKey(event.version, event.digest)
        actions = self._versioned(self._on_version_event(event, now), now)
        served = self._versions.serving == key
        if served and self._still_since is not None:
            self._still_since = now
        leases = (
            self._leases.confirmed(key, self._versions.held, now=now)
            if served
            else self._leases.doubted(key, now=now)
        )
        return [*actions, *leases]

    def _on_version_event(self, event: VersionEvent, now: float) -> list[VersionAction]:
        match event:
            case RootVerified(root):
                return self._versions.announced(root, now=now)
            case ArrivalFailed(form, reason):
                return self._versions.lost(form, reason, now=now)
            case SnapshotReady():
                return self._versions.ready(event, now=now)
            case ApplyRejected():
                return self._versions.rejected(event, now=now)
            case ApplyCancelled(form):
                return self._versions.apply_cancelled(form, now=now)
            case EngineRefitted():
                held_s = 0.0 if self._still_since is None else now - self._still_since
                return self._versions.refitted(event, held_s=held_s, now=now)
            case EngineRefitFailed():
                return self._versions.refit_failed(event, now=now)
            case EngineLost(reason):
                return self._versions.engine_lost(reason, now=now)
            case _:
                assert_never(event)

    def _on_message(  # noqa: C901 - one line per message
        self, message: ToPeer, now: float
    ) -> Sequence[WorkerAction]:
        match message:
            case LeaseGranted():
                if self._draining:
                    return [SendControl(LeaseFailed(message.lease, message.attempt, "draining"))]
                if message.hold_s and self._versions.refitting and self._waiting_refit is None:
                    reason = "a newer version is being loaded"
                    return [SendControl(LeaseFailed(message.lease, message.attempt, reason))]
                versions = self._versions
                return self._leases.granted(message, versions.serving, versions.held, now=now)
            case LeaseCancelled(lease, attempt):
                return self._leases.cancelled(HeldLease(lease, attempt), now=now)
            case SampleAnswered():
                self._leases.answered(message)
                return []
            case PlanEdges(form=form):
                fault = (
                    "its root was refused"
                    if self._versions.refuses(form)
                    else edges_fault(message, self._relay.me)
                )
                if fault:
                    return [WorkerNote(f"plan refused: form {form}: {fault}")]
                planned = self._versioned(self._versions.planned(form, now=now), now)
                return [*planned, *self._relayed(relay_events.PlanReceived(message), now)]
            case VersionsRevoked(epoch, versions):
                revoked = self._versioned(self._versions.revoked(epoch, versions, now=now), now)
                return [*revoked, *self._leases.revoked(versions, now=now)]
            case HeldVersions():
                self._versions.hold(message)
                return []
            case ForgetForm(form):
                return self._versioned(self._versions.forgotten(form, now=now), now)
            case Drain():
                self._draining = True
                return []
            case ScoreAnswers() | ReadPrompt():
                return [StartScoring(message)]
            case DialledBack(fault):
                return self._dialled_back(fault)
            case Welcome() | Refused() | SignedRoot() | SegmentPage() | EncodeVersion():
                return [WorkerNote(f"unexpected message {type(message).__name__}")]
            case _:
                assert_never(message)

    def _dialled_back(self, fault: str) -> list[WorkerAction]:
        """Tell the owner whether others can dial this peer, each time that changes."""
        before, self._undialable = self._undialable, fault
        if fault == before:
            return []
        return [WorkerNote(f"{UNDIALABLE}: {fault}" if fault else "others can dial this peer")]

    def _versioned(self, actions: Iterable[VersionAction], now: float) -> list[WorkerAction]:
        done: list[WorkerAction] = []
        for action in actions:
            if isinstance(action, RefitEngines) and (hold_s := self._leases.hold_s):
                self._waiting_refit = (action, now + hold_s)
                continue
            done.append(action)
            if isinstance(action, DropForm):
                done += self._relayed(relay_events.FormForgotten(action.form), now)
        return done

    def _relayed(self, event: relay_events.RelayEvent, now: float) -> list[WorkerAction]:
        return self._routed(self._relay.handle(event, now=now), now)

    def _routed(
        self, relayed: Sequence[relay_events.RelayAction], now: float
    ) -> list[WorkerAction]:
        """Turn the relay's actions into the worker's; WorkerVersions handles a form that arrived."""
        done: list[WorkerAction] = []
        for action in relayed:
            match action:
                case relay_events.ReportEdgeBroken(plan, generation, peer, reason):
                    done.append(SendControl(EdgeBroken(plan, generation, peer, reason)))
                case relay_events.Accuse(form, frame, accused):
                    done.append(SendControl(FrameAccused(form, frame, accused)))
                case relay_events.FormArrived(form):
                    done += self._versioned(self._versions.arrived(form, now=now), now)
                case relay_events.FrameGone(form, frame):
                    # Only the seed is a root, so this does not happen at a worker.
                    done.append(WorkerNote(f"root of form {form}, and frame {frame} is gone"))
                case _:
                    done.append(action)
        return done

    def _after(self, now: float) -> list[WorkerAction]:
        """Apply the rules that hold after every event.

        A waiting refit begins once it has waited long enough. In exclusive mode the engines are paused while a newer
        version is on its way, unless a lease needs the version that they have now. While no version is served, all
        leases are given back. A drained worker leaves once it has no leases.
        """
        actions: list[WorkerAction] = self._refit_that_waited(now)
        still = self._exclusive and self._versions.awaits and not self._leases.hold_s
        if still != (self._still_since is not None):
            self._still_since = now if still else None
            self._leases.stand_still(still=still, now=now)
            actions.append(HoldEngines(still))
        if self._versions.serving is None:
            actions += self._leases.give_back("no version is served")
        if self._draining and self._leases.idle:
            self._draining = False
            actions += [SendControl(Goodbye("drained")), ShutDown("drained")]
        return actions

    def _refit_that_waited(self, now: float) -> list[WorkerAction]:
        """Do the waiting refit once no lease needs the present version, or it has waited long enough."""
        if self._waiting_refit is None:
            return []
        refit, until = self._waiting_refit
        if self._leases.hold_s and now < until and self._versions.serving is not None:
            return []
        self._waiting_refit = None
        return [*self._leases.give_up_held("a newer version is loaded", now=now), refit]

    def check(self) -> None:
        self._relay.check()
        self._leases.check()
        self._versions.check()
        assert self._versions.serving is not None or not self._leases.running


# --- a peer's part of a plan is checked before its relay follows it
#
# Not here: whether the plan is a good one, and whether it comes from the coordinator (the other end of
# the control link has proved that it holds the run's key).


def edges_fault(edges: PlanEdges, me: PeerId) -> str:
    """What is wrong with these edges of the peer `me`; empty: they can be followed."""
    peers = {edge.peer for edge in edges.peers}
    if (
        len(edges.stripes) > STRIPES_MAX
        or max(Counter(edge.stripe for edge in edges.stripes).values(), default=1) > 1
    ):
        return "its stripes are too many or the same"
    if len(peers) != len(edges.peers) or me in peers or not all(map(_is_edge, edges.peers)):
        return "a peer in it cannot be linked with"
    # A peer without a parent is the root, and a root begins every stripe of its plan.
    if len({edge.parent is None for edge in edges.stripes}) > 1:
        return "it begins here for some stripes only"
    if not peers.issuperset(edges.sources):
        return "a source in it is no peer of it"
    return (
        ""
        if all(_is_place(edge, peers) for edge in edges.stripes)
        else "a stripe's edges are impossible"
    )


def _is_edge(edge: EdgePeer) -> bool:
    # An edge needs an address only at the end that dials.
    reachable = is_dialable(edge.address) if edge.address is not None else not edge.dial
    return reachable and len(edge.secret) == SECRET_BYTES


def _is_place(edge: StripeEdge, peers: set[PeerId]) -> bool:
    others = edge.children if edge.parent is None else (edge.parent, *edge.children)
    shares = 0.0 <= edge.spare <= 1.0 and 0.0 <= edge.weight <= 1.0
    return shares and len(set(others)) == len(others) and peers.issuperset(others)
