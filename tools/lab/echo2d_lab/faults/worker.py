"""A worker of a simulated run: the real WorkerState and Relay, with a simulated disk, engine and links.

Whole forms, two snapshot slots and the newest publish_seq are on its disk, and survive a crash. Applying a version
makes the spare slot garbage until it is done. Everything else is lost with the process.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from echo2d.core.base.ids import Digest, FormId, PublishSeq, RunId
from echo2d.core.protocol.control_messages import (
    Address,
    Hello,
    LeaseGranted,
    LeaseProgress,
    PlanEdges,
    SampleFinished,
    SignedRoot,
    ToCoordinator,
    ToPeer,
    VersionKey,
    Welcome,
)
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.relay import Relay
from echo2d.core.weights.signed_index import Root
from echo2d.core.worker.events import (
    AbortGeneration,
    ApplyCancelled,
    ApplyForm,
    ApplyRejected,
    CancelApply,
    ControlDown,
    ControlUp,
    CoordinatorSaid,
    DropForm,
    HoldEngines,
    IndexRoot,
    KeepPublishSeq,
    LeaveAsked,
    RefitEngines,
    RootVerified,
    SendControl,
    ShutDown,
    SnapshotReady,
    Standing,
    StartGeneration,
    StartScoring,
    StopAsked,
    WorkerNote,
)
from echo2d.core.worker.state import WorkerAction, WorkerEvent, WorkerState
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.byzantine_worker import INVENTED, forged_progress, invented, lie
from echo2d_lab.faults.control_links import Control, SimPeer
from echo2d_lab.faults.engine import Pace, SimEngine
from echo2d_lab.faults.peer_links import SimPeerLinks, held

CHECK_EVERY = 16  # events between two checks of the machine
POLL_S = 0.2  # seconds between two looks of an apply for its frames
SLOTS = ("slot-0", "slot-1")
_ARRIVALS = (
    relay_events.FrameVerified, relay_events.RepairVerified, relay_events.TableHeld, relay_events.FramesFound,
    relay_events.FormComplete,
)  # fmt: skip
Noted = Callable[[int, object, int], None]  # process number, what happened, actions


class Slots:
    """Two snapshot directories; the current one is whole, the spare one is whole or garbage."""

    def __init__(self) -> None:
        self._holds: dict[str, VersionKey | None] = dict.fromkeys(SLOTS)
        self._current: str | None = None

    def standing(self) -> tuple[Standing, ...]:
        """The versions in the slots, the current one last."""
        order = sorted(SLOTS, key=lambda path: path == self._current)
        return tuple(
            Standing(key, path) for path in order if (key := self._holds[path]) is not None
        )

    @property
    def current(self) -> VersionKey | None:
        return None if self._current is None else self._holds[self._current]

    def read(self, path: str) -> VersionKey | None:
        return self._holds[path]

    def begin(self, stands: Digest | None) -> str:
        """The path of the spare slot. From now on it is garbage, unless it has the version `stands`."""
        spare = SLOTS[self._current == SLOTS[0]]
        held = self._holds[spare]
        self._holds[spare] = held if held is not None and held.digest == stands else None
        return spare

    def flip(self, path: str, key: VersionKey) -> None:
        self._holds[path], self._current = key, path


class SimWorker(SimPeer):
    """See the module docstring. lies: share of its results that it falsifies. granted: all leases ever given.

    stopped: is called when it has ended in order. Every second worker is closed to dials.
    """

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        control: Control,
        links: SimPeerLinks,
        number: int,
        *,
        run_id: RunId,
        slots: int,
        latency_s: float,
        pace: Pace,
        noted: Noted,
        granted: list[LeaseGranted],
        stopped: Callable[[int], None],
    ) -> None:
        super().__init__(clock, chance, control, number, latency_s)
        self._links, self._run_id, self._slot_count = links, run_id, slots
        self.pace = pace
        self.closed = number % 2 == 0
        self.lies = 0.0
        self.invents = False
        self._noted, self._granted, self._stopped = noted, granted, stopped
        self._slots = Slots()
        self._disk: dict[FormId, None] = {}
        self._kept_seq = PublishSeq(0)
        links.add(self)

    def start(self) -> None:
        self.begin(skew_s=self.chance.uniform(0.0, 1e5))
        self._relay = Relay(self.peer)
        self.state = WorkerState(
            self._relay,
            self._run_id,
            slots=self._slot_count,
            publish_seq=self._kept_seq,
            standing=self._slots.standing(),
        )
        self._engine = SimEngine(self, self.chance, self.pace, self.feed, self._slots.read)
        self._inbox: deque[WorkerEvent] = deque()
        self._feeding = False
        self._events = 0
        self._roots: dict[FormId, Root] = {}
        self._searched: set[FormId] = set()
        self._applying: FormId | None = None
        self._apply_cancelled = False
        self._plan: PlanEdges | None = None
        self.dial()

    def end(self) -> None:
        super().end()
        self._links.died(self.peer)

    def stop(self) -> None:
        """The operator stops it in order."""
        self.call(self.boots, self.feed, StopAsked("SIGTERM"))

    def leave(self) -> None:
        """It gets the notice that its machine will be taken away."""
        self.call(self.boots, self.feed, LeaveAsked("notice"))

    # --- its loop

    def wake_at(self) -> float | None:
        return self.state.wake_at()

    def woken(self) -> None:
        self.feed(relay_events.RelayDeadlinePassed())

    def relayed(self, event: relay_events.RelayEvent) -> None:
        self.feed(event)

    def feed(self, event: WorkerEvent) -> None:
        """Handle events one after the other: an event that an action causes is handled after all actions."""
        self._inbox.append(event)
        if self._feeding:
            return
        self._feeding = True
        while self._inbox and self.up:
            self._turn(self._inbox.popleft())
        self._feeding = False
        if self.up:
            self.set_alarm()

    def _turn(self, event: WorkerEvent) -> None:
        actions = self.state.handle(event, now=self.now)
        self._noted(self.number, event, len(actions))
        self._events += 1
        if self._events % CHECK_EVERY == 0:
            self.state.check()
        if isinstance(event, _ARRIVALS):
            self._note_whole(event.form)
        if isinstance(event, relay_events.TableHeld):
            self._search(event.form)
        for action in actions:
            if isinstance(action, ShutDown):
                if self.session is not None:
                    self.lose(self.session)  # after the messages that were sent before
                self.end()
                self._stopped(self.number)
                return
            self._perform(action)

    def _note_whole(self, form: FormId) -> None:
        transfer = self._relay.transfer(form)
        if transfer is not None and transfer.complete:
            self._disk[form] = None

    def _search(self, form: FormId) -> None:
        """Find the form's version in a slot, so that it need not come over a link."""
        root = self._roots.get(form)
        if root is None or form in self._searched or not self.state.stands_mostly(form):
            return
        self._searched.add(form)
        standing = [each.key.digest for each in self._slots.standing()]
        if root.totals is not None and root.totals.snapshot in standing:
            self._inbox.append(held(form)[1])
        self._inbox.append(relay_events.FormSearched(form))

    def _perform(self, action: WorkerAction) -> None:  # noqa: C901 - one line per action
        match action:
            case SendControl(message):
                self._tell(message)
            case StartGeneration(lease):
                self._engine.start(lease)
            case AbortGeneration(lease, attempt):
                self._engine.abort(lease, attempt)
            case HoldEngines(hold):
                self._engine.hold(hold=hold)
            case IndexRoot(root):
                self._index(root)
            case KeepPublishSeq(publish_seq):
                self.later(self.chance.uniform(0.0, 0.1), self._keep_seq, publish_seq)
            case ApplyForm(form, stands):
                self._begin_apply(form, stands)
            case CancelApply(form):
                assert form == self._applying
                self._apply_cancelled = True
            case RefitEngines():
                self._engine.refit(action)
            case DropForm(form):
                self._disk.pop(form, None)
                self._roots.pop(form, None)
                self._searched.discard(form)
                self._apply_cancelled |= form == self._applying
            case WorkerNote() | ShutDown():
                pass
            case StartScoring():
                raise AssertionError("simulated workers are not trusted, and score nothing")
            case _:
                self._links.perform(self, action)

    def _tell(self, message: ToCoordinator) -> None:
        words: list[ToCoordinator] = [message]
        if isinstance(message, SampleFinished) and self.lies and self.chance.random() < self.lies:
            if self.invents and self.chance.random() < INVENTED:
                words = [invented(message, self.chance)]
            else:
                words = lie(message, self.chance, self._granted, self._plan)
        if (
            isinstance(message, LeaseProgress)
            and message.samples
            and self.lies
            and self.chance.random() < self.lies
        ):
            words = [forged_progress(message, self.chance)]
        for word in words:
            self.say(word)

    # --- its disk

    def _keep_seq(self, publish_seq: PublishSeq) -> None:
        self._kept_seq = max(self._kept_seq, publish_seq)

    def _index(self, root: Root) -> None:
        known = self._roots.get(root.form)
        if (
            known is None or known.totals is None
        ):  # another coordinator process repeats the first root
            self._roots[root.form] = root
        if root.form in self._disk:
            self._inbox.extend(held(root.form))
        if root.totals is not None:
            self._inbox.append(relay_events.FormComplete(root.form, root.segment_count))

    def _begin_apply(self, form: FormId, stands: Digest | None) -> None:
        assert self._applying is None, "one apply at a time"
        self._applying, self._apply_cancelled = form, False
        self.later(POLL_S, self._apply, form, self._slots.begin(stands))

    def _apply(self, form: FormId, path: str) -> None:
        root, stands = self._roots.get(form), self._slots.read(path)
        if self._apply_cancelled or root is None:
            self._end_apply(ApplyCancelled(form))
        elif stands is not None:
            self._slots.flip(path, stands)
            self._end_apply(SnapshotReady(form, stands.version, stands.digest, path))
        elif root.totals is None or form not in self._disk:
            self.later(POLL_S, self._apply, form, path)
        elif self._lacks_base(root):
            self._end_apply(ApplyRejected(form, "another base", lacks_base=True))
        elif self.chance.random() < self.pace.faulty:
            self._end_apply(ApplyRejected(form, "disk full"))
        else:
            key = VersionKey(root.facts.version, root.totals.snapshot)
            self._slots.flip(path, key)
            self._end_apply(SnapshotReady(form, key.version, key.digest, path))

    def _lacks_base(self, root: Root) -> bool:
        """Whether the delta's base is missing: the slot has another version, or the base has rotted."""
        current = self._slots.current
        if root.facts.base_digest is None:
            return False
        other = current is None or current.digest != root.facts.base_digest
        return other or self.chance.random() < self.pace.faulty

    def _end_apply(self, event: SnapshotReady | ApplyRejected | ApplyCancelled) -> None:
        self._applying = None
        self.feed(event)

    # --- its control link

    def hello(self) -> Hello:
        boot_id = f"{self.peer}-{self.boots}"
        forms = tuple(form for form in self._disk if form in self._roots)
        hello = self.state.hello(
            kind="worker" if self._slot_count else "relay",
            name=f"w{self.number}",
            boot_id=boot_id,
            listen=Address(f"10.0.1.{self.number}", 1),
            forms=forms,
        )
        return replace(hello, dial_back_secret=bytes(SECRET_BYTES))

    def running(self) -> int:
        return self.state.running

    def connected(self, welcome: Welcome) -> None:
        self.feed(ControlUp(welcome))

    def heard(self, message: ToPeer) -> None:
        if isinstance(message, SignedRoot):
            self.feed(RootVerified(Root.decode(message.root)))
        else:
            if isinstance(message, PlanEdges):
                self._plan = message
            self.feed(CoordinatorSaid(message))

    def disconnected(self) -> None:
        self.feed(ControlDown())
