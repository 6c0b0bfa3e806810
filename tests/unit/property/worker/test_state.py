"""A worker under any order of events: its shell answers orders late or badly, the coordinator comes and goes.

Beyond `check()`: one apply and one refit at a time; nothing is generated while nothing is served; no message is sent
while the control link is down; a result names only versions whose RefitDone was produced before, and none that is
revoked. A refit is of the version that its slot really holds. No report says that engines hold a version that they do
not hold, and a lease that names a version has tokens of this version alone.
"""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2d.core.base.ids import (
    Epoch,
    Generation,
    PeerId,
    PlanId,
    PublishSeq,
    SegmentId,
    frame_id,
    version_label,
)
from echo2d.core.protocol.control_messages import (
    Goodbye,
    HeldLease,
    LeaseCancelled,
    PlanEdges,
    RefitDone,
    RefitFailed,
    SampleAnswered,
    SampleFinished,
    VersionKey,
    VersionsRevoked,
    Welcome,
)
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
    EngineLost,
    EngineRefitFailed,
    EngineRefitted,
    GenerationFailed,
    LabelSpan,
    RefitEngines,
    RootVerified,
    SampleProgressed,
    SendControl,
    SnapshotReady,
    StartGeneration,
)
from echo2d.core.worker.state import WorkerAction, WorkerEvent, WorkerState
from tests.support.worker import RUN, a_key, a_lease, a_root, hold

ME = PeerId("b" * 32)
SLOTS, SAMPLES, TOKENS = 3, 2, 4
VERSIONS = st.integers(0, 3)


class WorkerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = WorkerState(
            Relay(ME),
            RUN,
            slots=SLOTS,
            publish_seq=PublishSeq(0),
            standing=(),
        )
        self.slots: dict[str, VersionKey] = {}  # what each directory holds
        self.now = 0.0
        self.up = False
        self.seq = self.epoch = 1
        self.roots: dict[str, Root] = {}
        self.plans = self.leases = 0
        self.applying: str | None = None
        self.cancelling = False
        self.refitting: RefitEngines | None = None
        self.label: str | None = None  # what the engine has loaded
        self.held: set[str] = set()  # and what it holds
        self.named: dict[HeldLease, VersionKey] = {}  # the version that alone writes a lease
        self.done: set[VersionKey] = set()
        self.revoked: dict[VersionKey, int] = {}  # publishes of earlier epochs are void
        self.generating: dict[
            HeldLease, dict[int, int]
        ] = {}  # tokens written, by unfinished sample
        self.unanswered: dict[tuple[HeldLease, int], SampleFinished] = {}

    def on(self, event: WorkerEvent) -> None:
        for action in self.state.handle(event, now=self.now):
            self.perform(action)
        self.state.check()

    def perform(self, action: WorkerAction) -> None:
        match action:
            case ApplyForm(form):
                assert self.applying is None
                self.applying = form
            case CancelApply(form):
                assert self.applying == form
                assert not self.cancelling
                self.cancelling = True
            case RefitEngines():
                assert self.refitting is None
                key = VersionKey(action.version, action.digest)
                assert key not in self.revoked
                assert self.slots[action.path] == key
                self.refitting = action
            case StartGeneration(lease):
                held = HeldLease(lease.lease, lease.attempt)
                assert held not in self.generating
                if lease.version is not None:
                    self.named[held] = lease.version
                self.generating[held] = dict.fromkeys(lease.samples, 0)
            case AbortGeneration(lease, attempt):
                self.generating.pop(HeldLease(lease, attempt), None)
            case SendControl(message):
                assert self.up
                assert not isinstance(message, Goodbye)
                self.hear(message)
            case _:
                pass

    def hear(self, message: object) -> None:
        match message:
            case RefitDone(version, digest):
                self.done.add(VersionKey(version, digest))
                self.hear_of(message.held)
                assert message.held[0] == VersionKey(version, digest)
            case RefitFailed():
                self.hear_of(message.held)
                assert message.held[:1] == (() if message.serving is None else (message.serving,))
            case SampleFinished():
                named = {VersionKey(span.version, span.digest) for span in message.spans}
                assert named <= self.done
                assert not named & self.revoked.keys()
                held = HeldLease(message.lease, message.attempt)
                assert held not in self.named or named == {self.named[held]}
                self.unanswered[HeldLease(message.lease, message.attempt), message.sample] = message
            case _:
                pass

    def hear_of(self, held: tuple[VersionKey, ...]) -> None:
        assert {version_label(*key) for key in held} <= self.held or not self.up
        assert not set(held) & self.revoked.keys()
        assert set(held) <= self.done

    # --- the coordinator

    @rule()
    @precondition(lambda self: not self.up)
    def connect(self) -> None:
        hello = self.state.hello(kind="worker", name="box", boot_id="b", listen=None, forms=())
        self.done |= {*hello.held}
        if self.refitting is None:
            self.hear_of(hello.held)
        self.up = True
        kept = tuple(key for key in hello.leases if key.lease % 2)
        self.generating = {
            key: samples for key, samples in self.generating.items() if key in hello.leases
        }
        self.on(ControlUp(Welcome(ME, RUN, Epoch(self.epoch), PublishSeq(self.seq), 2.0, kept, ())))

    @rule()
    @precondition(lambda self: self.up)
    def disconnect(self) -> None:
        self.up = False
        self.on(ControlDown())

    @rule(version=VERSIONS, whole=st.booleans(), again=st.booleans())
    @precondition(lambda self: self.up)
    def announce(self, version: int, *, whole: bool, again: bool) -> None:
        if again and self.roots:
            old = max(self.roots.values(), key=lambda root: root.facts.publish_seq).facts
            root = replace(a_root(old.version, seq=old.publish_seq), facts=old)
        else:
            self.seq += 1
            root = a_root(version, seq=self.seq, epoch=self.epoch, whole=whole)
        self.roots[root.form] = root
        key = a_key(root.facts.version)
        if root.totals is not None and root.facts.epoch >= self.revoked.get(key, root.facts.epoch):
            self.revoked.pop(key, None)
        self.on(RootVerified(root))

    @rule(data=st.data())
    @precondition(lambda self: self.up and self.roots)
    def plan(self, data: st.DataObject) -> None:
        form = data.draw(st.sampled_from(sorted(self.roots)))
        self.plans += 1
        self.on(
            CoordinatorSaid(
                PlanEdges(self.roots[form].form, PlanId(self.plans), Generation(1), (), ())
            )
        )

    @rule(data=st.data())
    @precondition(lambda self: self.roots)
    def arrive(self, data: st.DataObject) -> None:
        root = self.roots[data.draw(st.sampled_from(sorted(self.roots)))]
        if root.totals is not None:
            self.on(relay_events.TableHeld(root.form, SegmentId(0), (9,)))
            self.on(relay_events.FormComplete(root.form, 1))
            self.on(relay_events.FramesFound(root.form, (frame_id(SegmentId(0), 1),)))

    @rule(versions=st.sets(VERSIONS, min_size=1))
    @precondition(lambda self: self.up)
    def revoke(self, versions: set[int]) -> None:
        self.epoch += 1
        keys = tuple(map(a_key, sorted(versions)))
        self.revoked |= dict.fromkeys(keys, self.epoch)
        self.on(CoordinatorSaid(VersionsRevoked(Epoch(self.epoch), keys)))

    @rule(oldest=st.integers(0, 2))
    @precondition(lambda self: self.up)
    def grant(self, oldest: int) -> None:
        self.leases += 1
        lease = a_lease(self.leases, samples=range(SAMPLES), oldest=oldest, tokens=TOKENS)
        self.on(CoordinatorSaid(lease))

    @rule(most=st.integers(1, 3), versions=st.lists(VERSIONS, unique=True))
    @precondition(lambda self: self.up)
    def hold(self, most: int, versions: list[int]) -> None:
        self.on(CoordinatorSaid(hold(most, *versions)))

    @rule(version=VERSIONS)
    @precondition(lambda self: self.up)
    def grant_by_name(self, version: int) -> None:
        self.leases += 1
        lease = a_lease(self.leases, samples=range(SAMPLES), oldest=version, tokens=TOKENS)
        self.on(CoordinatorSaid(replace(lease, version=a_key(version))))

    @rule(data=st.data())
    @precondition(lambda self: self.up and self.generating)
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.generating)))
        self.on(CoordinatorSaid(LeaseCancelled(key.lease, key.attempt)))

    @rule()
    @precondition(lambda self: self.up and self.unanswered)
    def answer(self) -> None:
        (key, sample), _ = self.unanswered.popitem()
        self.on(CoordinatorSaid(SampleAnswered(key.lease, key.attempt, sample, True, "")))

    # --- the shell

    @rule(outcome=st.sampled_from(["ready", "rejected", "cancelled"]))
    @precondition(lambda self: self.applying is not None)
    def end_apply(self, outcome: str) -> None:
        assert self.applying is not None
        root = self.roots[self.applying]
        form, cancelled = root.form, self.cancelling
        self.applying, self.cancelling = None, False
        if outcome == "cancelled" and cancelled:
            self.on(ApplyCancelled(form))
        elif outcome == "rejected" or root.totals is None:
            self.on(ApplyRejected(form, "disk full"))
        else:
            key = VersionKey(root.facts.version, root.totals.snapshot)
            path = f"{form} {self.seq}"
            self.slots[path] = key
            self.on(SnapshotReady(form, key.version, key.digest, path))

    @rule(outcome=st.sampled_from(["done", "done", "kept", "damaged", "doubt", "memory"]))
    @precondition(lambda self: self.refitting is not None)
    def end_refit(self, outcome: str) -> None:
        assert self.refitting is not None
        order, self.refitting = self.refitting, None
        if outcome in ("done", "memory"):
            self.load(order)
            self.on(
                EngineRefitted(
                    order.version, order.digest, 0.1, outcome == "done", held=tuple(self.held)
                )
            )
        else:
            damaged = outcome == "damaged"
            self.label = self.label if damaged or outcome == "kept" else None
            self.held = set() if self.label is None else self.held
            self.on(
                EngineRefitFailed(
                    order.version,
                    order.digest,
                    "engine died",
                    self.label,
                    damaged=damaged,
                    held=tuple(self.held),
                )
            )

    def load(self, order: RefitEngines) -> None:
        assert len(order.kept) < order.most
        self.label = version_label(order.version, order.digest)
        self.held = {self.label, *(label for label in order.kept if label in self.held)}

    @rule()
    @precondition(lambda self: self.label is not None)
    def an_engine_dies(self) -> None:
        self.label, self.held = None, set()
        self.on(EngineLost("it died"))

    @rule()
    @precondition(lambda self: self.refitting is not None)
    def swap_before_the_refit_is_reported(self) -> None:
        assert self.refitting is not None
        self.load(self.refitting)

    @rule(data=st.data())
    @precondition(lambda self: self.generating and self.label is not None)
    def write_a_token(self, data: st.DataObject) -> None:
        assert self.label is not None
        key = data.draw(st.sampled_from(list(self.generating)))
        samples = self.generating[key]
        sample = data.draw(st.sampled_from(sorted(samples)))
        at = samples[sample]
        finish = at + 1 == TOKENS
        named = self.named.get(key)
        label = self.label if named is None else version_label(*named)
        if label not in self.held:
            del self.generating[key]
            self.on(GenerationFailed(key.lease, key.attempt, f"version {label} is not held"))
            return
        samples[sample] += 1
        if finish:
            del samples[sample]
        if not samples:
            del self.generating[key]
        span = LabelSpan(at, at + 1, label)
        self.on(
            SampleProgressed(
                key.lease, key.attempt, sample, (7,), (-1.0,), (span,), "length" if finish else None
            )
        )

    @rule(data=st.data())
    @precondition(lambda self: self.generating)
    def fail_generation(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.generating)))
        del self.generating[key]
        self.on(GenerationFailed(key.lease, key.attempt, "engine died"))

    @rule(after_s=st.sampled_from([0.5, 2.0, 130.0]))
    def wait(self, after_s: float) -> None:
        self.now += after_s
        self.on(relay_events.RelayDeadlinePassed())

    # --- everything going well, so that runs get far

    @rule(version=VERSIONS, keep=st.booleans())
    @precondition(lambda self: self.up)
    def serve(self, version: int, *, keep: bool = False) -> None:
        if keep:
            self.hold(4, [0, 1, 2, 3])
        self.announce(version, whole=True, again=False)
        root = list(self.roots.values())[-1]
        self.plans += 1
        self.on(CoordinatorSaid(PlanEdges(root.form, PlanId(self.plans), Generation(1), (), ())))
        while self.applying is not None:
            self.end_apply("cancelled" if self.cancelling else "ready")
        while self.refitting is not None:
            self.end_refit("done")

    @rule(data=st.data())
    @precondition(lambda self: self.up)
    def work(self, data: st.DataObject) -> None:
        self.grant(0)
        for _ in range(data.draw(st.integers(0, SAMPLES * TOKENS))):
            if self.generating and self.label is not None:
                self.write_a_token(data)

    # --- what holds

    @invariant()
    def samples_fit_the_slots(self) -> None:
        assert sum(map(len, self.generating.values())) <= SLOTS
        assert sum(map(len, self.generating.values())) == self.state.running


TestWorkerMachine = WorkerMachine.TestCase
