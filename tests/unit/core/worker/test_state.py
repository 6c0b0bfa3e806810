"""The worker's machine as a whole, with all its parts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from echo2d.core.base.ids import (
    Digest,
    Epoch,
    FormId,
    FrameId,
    Generation,
    LeaseId,
    PeerId,
    PlanId,
    PublishSeq,
    SegmentId,
    StripeId,
    Version,
    frame_id,
    version_label,
)
from echo2d.core.protocol.control_messages import (
    Address,
    ApplyFailed,
    Drain,
    EdgePeer,
    ForgetForm,
    FrameAccused,
    Goodbye,
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    PlanEdges,
    RefitDone,
    RefitFailed,
    SampleAnswered,
    SampleFinished,
    ScoreAnswers,
    StripeEdge,
    VersionsRevoked,
    VersionVerified,
    Welcome,
)
from echo2d.core.protocol.peer_messages import StreamOpened
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.relay import Relay
from echo2d.core.topology.plan import STRIPES_MAX
from echo2d.core.worker.events import (
    AbortGeneration,
    ApplyCancelled,
    ApplyForm,
    ApplyRejected,
    ArrivalFailed,
    ControlDown,
    ControlUp,
    CoordinatorSaid,
    DropForm,
    EngineLost,
    EngineRefitFailed,
    GenerationFailed,
    HoldEngines,
    LabelSpan,
    RefitEngines,
    RootVerified,
    SampleProgressed,
    SendControl,
    ShutDown,
    Standing,
    StartGeneration,
    StartScoring,
    StopAsked,
)
from echo2d.core.worker.leases import ENGINE_STALL_S
from echo2d.core.worker.state import WorkerAction, WorkerEvent, WorkerState, edges_fault
from tests.support.relay_peer import told
from tests.support.worker import (
    RUN,
    a_key,
    a_lease,
    a_refit,
    a_refit_failure,
    a_root,
    a_snapshot,
    an_order,
    hold,
)

ME, PARENT = PeerId("b" * 32), PeerId("a" * 32)
LABEL = version_label(a_key(0).version, a_key(0).digest)
WELCOME = Welcome(ME, RUN, Epoch(1), PublishSeq(0), 2.0, (), ())
LEASE = a_lease(1, samples=(4,))
KEY = HeldLease(LeaseId(1), 1)


class Machine:
    """A WorkerState that is checked after every event."""

    def __init__(self, *, slots: int = 4, standing: Sequence[Standing] = ()) -> None:
        self.state = WorkerState(
            Relay(ME), RUN, slots=slots, publish_seq=PublishSeq(0), standing=standing
        )
        self.now = 0.0

    def on(self, *events: WorkerEvent) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for event in events:
            actions += self.state.handle(event, now=self.now)
            self.state.check()
        return actions

    def serve(self, version: int) -> None:
        root = a_root(version)
        self.on(RootVerified(root), a_snapshot(root), a_refit(version))

    def said(self, *events: WorkerEvent) -> list[object]:
        return [action.message for action in self.on(*events) if isinstance(action, SendControl)]


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    machine.on(ControlUp(WELCOME))
    yield machine
    machine.state.check()


def a_token(finish: bool = False, sample: int = 4) -> SampleProgressed:
    span = LabelSpan(0, 1, LABEL)
    return SampleProgressed(
        LeaseId(1), 1, sample, (7,), (-1.0,), (span,), "stop" if finish else None
    )


def a_plan(form: FormId) -> PlanEdges:
    edge = StripeEdge(StripeId(0), PARENT, ())
    return PlanEdges(
        form, PlanId(1), Generation(1), (edge,), (EdgePeer(PARENT, None, False, bytes(32)),)
    )


def test_a_lease_is_accepted_for_the_served_version(machine: Machine) -> None:
    assert machine.said(CoordinatorSaid(LEASE)) == [
        LeaseFailed(LeaseId(1), 1, "no version is served")
    ]
    machine.serve(0)
    assert machine.on(CoordinatorSaid(LEASE)) == [StartGeneration(LEASE)]
    [result] = machine.said(a_token(finish=True))
    assert isinstance(result, SampleFinished)
    assert (result.sample, result.spans[0].digest) == (4, a_key(0).digest)
    machine.on(CoordinatorSaid(SampleAnswered(LeaseId(1), 1, 4, True, "")))
    assert machine.state.running == 0


HELD = replace(LEASE, hold_s=30.0)


def test_a_newer_version_waits_for_a_lease_that_only_the_served_version_may_write(
    machine: Machine,
) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(HELD))
    root = a_root(1)
    actions = machine.on(RootVerified(root), a_snapshot(root))
    assert not [action for action in actions if isinstance(action, RefitEngines)]
    assert machine.state.wake_at() is not None
    [finished] = machine.said(a_token(finish=True))
    assert isinstance(finished, SampleFinished)
    [refit] = machine.on(CoordinatorSaid(SampleAnswered(LeaseId(1), 1, 4, True, "")))
    assert isinstance(refit, RefitEngines)
    assert refit.version == 1


def test_a_newer_version_waits_between_two_turns_for_the_next_lease(machine: Machine) -> None:
    """A turn's result is answered once the next turn is leased; all of them together wait for `hold_s`."""
    machine.serve(0)
    machine.on(CoordinatorSaid(HELD))
    root = a_root(1)
    machine.on(RootVerified(root), a_snapshot(root), a_token(finish=True))
    machine.now += 20.0
    second = replace(HELD, lease=LeaseId(2))
    assert StartGeneration(second) in machine.on(CoordinatorSaid(second))
    machine.on(CoordinatorSaid(SampleAnswered(LeaseId(1), 1, 4, True, "")))
    assert machine.state.running == 1
    machine.on(replace(a_token(finish=True), lease=LeaseId(2)))
    machine.now += 10.0
    actions = machine.on(relay_events.RelayDeadlinePassed())
    assert [action for action in actions if isinstance(action, RefitEngines)]


@pytest.mark.parametrize("why", ["late", "engine lost"])
def test_a_refit_waits_no_longer_than_the_lease_says(machine: Machine, why: str) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(HELD), CoordinatorSaid(a_lease(2, samples=(1,))))
    root = a_root(1)
    machine.on(RootVerified(root), a_snapshot(root))
    if why == "late":
        machine.now += 29.0
        early = machine.on(relay_events.RelayDeadlinePassed())
        assert not [action for action in early if isinstance(action, RefitEngines)]
        machine.now += 1.0
        assert machine.state.wake_at() == machine.now
        actions = machine.on(relay_events.RelayDeadlinePassed())
    else:
        actions = machine.on(EngineLost("out of memory"))
    assert AbortGeneration(LeaseId(1), 1) in actions
    assert SendControl(LeaseFailed(LeaseId(1), 1, "a newer version is loaded")) in actions
    assert isinstance(actions[-1], RefitEngines)
    # A lease of the run goes on.
    assert AbortGeneration(LeaseId(2), 1) not in actions
    assert machine.state.running == 1


def test_a_lease_for_another_version_alone_is_refused(machine: Machine) -> None:
    machine.serve(1)
    assert machine.said(CoordinatorSaid(HELD)) == [
        LeaseFailed(LeaseId(1), 1, "version 1 is served, 0 alone may write")
    ]
    assert machine.on(CoordinatorSaid(replace(HELD, oldest=Version(1)))) == [
        StartGeneration(replace(HELD, oldest=Version(1)))
    ]


def test_no_lease_for_one_version_is_accepted_while_a_newer_one_is_loaded(machine: Machine) -> None:
    """The engines may serve it any moment; the coordinator does not know of it yet."""
    machine.serve(0)
    root = a_root(1)
    actions = machine.on(RootVerified(root), a_snapshot(root))
    assert [action for action in actions if isinstance(action, RefitEngines)]
    assert machine.said(CoordinatorSaid(HELD)) == [
        LeaseFailed(LeaseId(1), 1, "a newer version is being loaded")
    ]
    assert machine.on(CoordinatorSaid(LEASE)) == [StartGeneration(LEASE)]


def test_a_lease_for_one_version_fails_at_the_first_token_of_another(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(HELD))
    root = a_root(1)
    machine.on(RootVerified(root), a_snapshot(root), a_refit(1))
    newer = version_label(a_key(1).version, a_key(1).digest)
    token = replace(a_token(), spans=(LabelSpan(0, 1, newer),))
    [failed, *_] = [message for message in machine.said(token) if isinstance(message, LeaseFailed)]
    assert "0 alone may write" in failed.reason


def test_a_lease_goes_on_under_its_held_version_while_newer_ones_are_loaded(
    machine: Machine,
) -> None:
    machine.on(CoordinatorSaid(hold(2, 0)))
    machine.serve(0)
    named = replace(LEASE, version=a_key(0))
    machine.on(CoordinatorSaid(named))
    root = a_root(1)
    [refit] = [
        action
        for action in machine.on(RootVerified(root), a_snapshot(root))
        if isinstance(action, RefitEngines)
    ]
    assert refit == an_order(1, kept=(0,), most=2)
    [done] = machine.said(a_refit(1, held=(0, 1)))
    assert isinstance(done, RefitDone)
    assert done.held == (a_key(1), a_key(0))
    hello = machine.state.hello(kind="worker", name="box", boot_id="b", listen=None, forms=())
    assert (hello.serving, hello.held, hello.served) == (a_key(1), done.held, (a_key(0),))
    machine.on(ControlDown(), ControlUp(replace(WELCOME, keep=(KEY,))))
    # Another lease of the held version, and one of the served version.
    for number in (2, 3):
        lease = replace(named, lease=LeaseId(number), version=a_key(number - 2))
        assert machine.on(CoordinatorSaid(lease)) == [StartGeneration(lease)]
    [result] = machine.said(a_token(finish=True))
    assert isinstance(result, SampleFinished)
    assert [span.key for span in result.spans] == [a_key(0)]
    # When nothing is served, nothing is held.
    lost = machine.said(EngineLost("out of memory"))
    assert [type(each) for each in lost] == [RefitFailed, LeaseFailed, LeaseFailed]
    [refused] = machine.said(CoordinatorSaid(replace(named, lease=LeaseId(4))))
    assert refused == LeaseFailed(LeaseId(4), 1, "no version is served")


def test_exclusive_engines_keep_writing_for_a_lease_for_one_version(machine: Machine) -> None:
    machine.on(ControlUp(replace(WELCOME, exclusive=True)))
    machine.serve(0)
    machine.on(CoordinatorSaid(HELD))
    assert HoldEngines(True) not in machine.on(RootVerified(a_root(1)))
    machine.on(a_token(finish=True))
    answered = CoordinatorSaid(SampleAnswered(LeaseId(1), 1, 4, True, ""))
    assert HoldEngines(True) in machine.on(answered)


def test_cancelled_and_failed_leases_end(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE))
    assert machine.on(CoordinatorSaid(LeaseCancelled(LeaseId(1), 1))) == [
        AbortGeneration(LeaseId(1), 1)
    ]
    machine.on(CoordinatorSaid(LEASE))
    assert machine.said(GenerationFailed(LeaseId(1), 1, "engine died")) == [
        LeaseFailed(LeaseId(1), 1, "engine died")
    ]


def test_no_message_is_sent_while_the_control_link_is_down(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE), ControlDown())
    assert machine.said(a_token(finish=True)) == []
    hello = machine.state.hello(kind="worker", name="box", boot_id="b", listen=None, forms=())
    assert (hello.leases, hello.serving, hello.holding, hello.slots) == (
        (KEY,),
        a_key(0),
        (a_key(0),),
        4,
    )
    kept = Welcome(ME, RUN, Epoch(1), PublishSeq(1), 2.0, (KEY,), ())
    assert [type(message) for message in machine.said(ControlUp(kept))] == [SampleFinished]


def test_a_version_served_after_the_hello_is_reported_with_the_welcome() -> None:
    """The hello said that nothing is served, and nothing can be said before the welcome."""
    machine = Machine()
    assert (
        machine.state.hello(kind="worker", name="box", boot_id="b", listen=None, forms=()).serving
        is None
    )
    machine.serve(0)
    refitted = RefitDone(*_of(0), 0.25, True, 0.0, 300, 1.5, (a_key(0),))
    assert machine.said(ControlUp(WELCOME)) == [refitted]
    machine.on(ControlDown())
    assert machine.state.hello(
        kind="worker", name="box", boot_id="b", listen=None, forms=()
    ).serving == a_key(0)
    assert machine.said(ControlUp(WELCOME)) == []


def test_a_revoked_version_ends_its_leases(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE), a_token())
    actions = machine.on(CoordinatorSaid(VersionsRevoked(Epoch(2), (a_key(0),))))
    assert actions == [
        SendControl(RefitFailed(*_of(0), None, "revoked")),
        DropForm(a_root(0).form),
        AbortGeneration(LeaseId(1), 1),
        SendControl(LeaseFailed(LeaseId(1), 1, "its version was revoked")),
    ]


def _of(version: int) -> tuple[Version, Digest]:
    return a_key(version).version, a_key(version).digest


def test_engines_that_serve_nothing_give_their_leases_back(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE))
    root = a_root(1)
    assert an_order(1) in machine.on(RootVerified(root), a_snapshot(root))
    failed, lease = machine.said(a_refit_failure(1))
    assert isinstance(failed, RefitFailed)
    assert lease == LeaseFailed(LeaseId(1), 1, "no version is served")


def test_tokens_written_before_the_refit_is_confirmed_wait_for_it(machine: Machine) -> None:
    root = a_root(0)
    machine.on(RootVerified(root), a_snapshot(root), a_refit(0))
    machine.on(CoordinatorSaid(LEASE), RootVerified(a_root(1)), a_snapshot(a_root(1)))
    label = version_label(a_key(1).version, a_key(1).digest)
    early = SampleProgressed(LeaseId(1), 1, 4, (7,), (-1.0,), (LabelSpan(0, 1, label),), "stop")
    assert machine.said(early) == []
    assert [type(message).__name__ for message in machine.said(a_refit(1))] == [
        "RefitDone",
        "SampleFinished",
    ]


def test_a_form_arrives_through_the_relay_and_is_applied(machine: Machine) -> None:
    root = a_root(0)
    machine.on(RootVerified(root))
    actions = machine.on(CoordinatorSaid(a_plan(root.form)))
    assert actions[0] == ApplyForm(root.form)
    assert any(isinstance(action, relay_events.ExpectPeer) for action in actions)
    opened = machine.on(relay_events.LinkUp(PARENT))
    assert told(StreamOpened, opened)
    machine.on(
        relay_events.TableHeld(root.form, SegmentId(0), (5,)),
        relay_events.FormComplete(root.form, 1),
    )
    frames = (frame_id(SegmentId(0), 0), frame_id(SegmentId(0), 1))
    machine.on(relay_events.FramesFound(root.form, frames))
    assert VersionVerified(root.form, *_of(0)) in machine.said(a_snapshot(root))


def test_a_relay_peer_reports_a_version_verified_when_it_holds_all_frames() -> None:
    machine, root = Machine(slots=0), a_root(0)
    machine.on(ControlUp(WELCOME), RootVerified(root), CoordinatorSaid(a_plan(root.form)))
    machine.on(
        relay_events.TableHeld(root.form, SegmentId(0), (5,)),
        relay_events.FormComplete(root.form, 1),
    )
    said = machine.said(relay_events.FramesFound(root.form, (frame_id(SegmentId(0), 1),)))
    assert said == [VersionVerified(root.form, *_of(0))]


def test_the_sender_of_a_bad_frame_is_accused(machine: Machine) -> None:
    root = a_root(0)
    machine.on(RootVerified(root), CoordinatorSaid(a_plan(root.form)), relay_events.LinkUp(PARENT))
    said = machine.said(relay_events.FrameRejected(PARENT, 2, root.form, FrameId(0)))
    assert said[0] == FrameAccused(root.form, FrameId(0), PARENT)


def test_a_form_that_cannot_be_kept_is_forgotten_by_the_relay(machine: Machine) -> None:
    root = a_root(0)
    machine.on(RootVerified(root), CoordinatorSaid(a_plan(root.form)))
    actions = machine.on(ArrivalFailed(root.form, "disk full"))
    assert actions[:2] == [SendControl(ApplyFailed(root.form, "disk full")), DropForm(root.form)]
    assert relay_events.ForgetPeer(PARENT) in actions


def test_a_worker_does_not_wait_for_a_form_that_was_replaced(machine: Machine) -> None:
    """Its apply would be cancelled at once, and begun again, for ever."""
    root = a_root(2)
    assert machine.on(RootVerified(root), CoordinatorSaid(a_plan(root.form)))
    assert DropForm(root.form) in machine.on(relay_events.FormForgotten(root.form))
    assert ApplyForm(root.form) not in machine.on(
        ApplyCancelled(root.form), relay_events.RelayDeadlinePassed()
    )


def test_engines_in_exclusive_mode_stop_while_a_version_arrives() -> None:
    machine = Machine()
    machine.on(ControlUp(replace(WELCOME, exclusive=True)))
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE))
    root = a_root(1)
    assert HoldEngines(True) in machine.on(RootVerified(root))
    machine.now = 10 * ENGINE_STALL_S  # which counts for nothing meanwhile
    assert machine.said(relay_events.RelayDeadlinePassed()) == [LeaseProgress(LeaseId(1), 1, ())]
    assert HoldEngines(False) not in machine.on(a_snapshot(root))
    assert HoldEngines(False) in machine.on(a_refit(1))


def test_a_refit_says_how_long_engines_were_held_for_it() -> None:
    machine = Machine()
    machine.on(ControlUp(replace(WELCOME, exclusive=True)))
    machine.serve(0)
    first, second = a_root(1), a_root(2)

    def held_s(version: int, at: float) -> float:
        machine.now = at
        [done] = [said for said in machine.said(a_refit(version)) if isinstance(said, RefitDone)]
        return done.held_s

    machine.now = 10.0
    machine.on(RootVerified(first), a_snapshot(first))
    machine.now = 12.0
    machine.on(RootVerified(second))
    assert held_s(1, at=13.0) == 3.0
    machine.on(a_snapshot(second))
    assert held_s(2, at=17.5) == 4.5, (
        "they were not released in between, and none of it counts twice"
    )
    machine.on(ControlUp(WELCOME), RootVerified(a_root(3)), a_snapshot(a_root(3)))
    assert held_s(3, at=20.0) == 0.0, "in background mode they are not held"


@pytest.mark.parametrize(
    "end",
    [
        a_refit_failure(1, LABEL),
        ApplyRejected(a_root(1).form, "disk full"),
        ArrivalFailed(a_root(1).form, "disk full"),
        CoordinatorSaid(VersionsRevoked(Epoch(2), (a_key(1),))),
        CoordinatorSaid(ForgetForm(a_root(1).form)),
    ],
)
def test_engines_go_on_if_the_version_does_not_arrive(end: WorkerEvent) -> None:
    machine, root = Machine(), a_root(1)
    machine.on(ControlUp(replace(WELCOME, exclusive=True)))
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE), RootVerified(root))
    if isinstance(end, EngineRefitFailed):
        machine.on(a_snapshot(root))
    assert HoldEngines(False) in machine.on(end)
    assert machine.state.running == 1


def test_answers_of_other_workers_are_scored_as_ordered(machine: Machine) -> None:
    order = ScoreAnswers(3, Version(0), Digest(bytes(32)), "", "torch", ())
    assert machine.on(CoordinatorSaid(order)) == [StartScoring(order)]


def test_a_drained_worker_leaves_when_all_its_results_are_answered(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE), CoordinatorSaid(Drain("maintenance")))
    assert machine.said(CoordinatorSaid(a_lease(2))) == [LeaseFailed(LeaseId(2), 1, "draining")]
    machine.on(a_token(finish=True))
    assert machine.on(CoordinatorSaid(SampleAnswered(LeaseId(1), 1, 4, True, ""))) == [
        SendControl(Goodbye("drained")),
        ShutDown("drained"),
    ]


def test_a_stopped_worker_gives_its_leases_back_and_says_goodbye(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE))
    assert machine.on(StopAsked("SIGTERM")) == [
        AbortGeneration(LeaseId(1), 1),
        SendControl(LeaseFailed(LeaseId(1), 1, "SIGTERM")),
        SendControl(Goodbye("SIGTERM")),
        ShutDown("SIGTERM"),
    ]


def test_progress_is_due_two_seconds_after_a_grant(machine: Machine) -> None:
    machine.serve(0)
    machine.on(CoordinatorSaid(LEASE))
    assert machine.state.wake_at() == 2.0
    machine.now = 2.0
    assert [
        type(message).__name__ for message in machine.said(relay_events.RelayDeadlinePassed())
    ] == ["LeaseProgress"]


# --- the check of a plan

UP, DOWN = PeerId("up"), PeerId("down")
FROM_UP = EdgePeer(UP, Address("10.0.0.1", 4000), dial=True, secret=bytes(32))
TO_DOWN = EdgePeer(DOWN, None, dial=False, secret=bytes(32))
PLACE = StripeEdge(StripeId(0), UP, (DOWN,))
GOOD = PlanEdges(FormId("f"), PlanId(1), Generation(0), (PLACE,), (FROM_UP, TO_DOWN))


def test_a_good_plan_can_be_followed() -> None:
    assert edges_fault(GOOD, ME) == ""
    assert edges_fault(replace(GOOD, sources=(UP,)), ME) == ""
    assert edges_fault(replace(GOOD, stripes=(), peers=()), ME) == ""
    assert edges_fault(replace(GOOD, stripes=(replace(PLACE, spare=1.0),)), ME) == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(GOOD, stripes=(PLACE, PLACE)), "the same"),
        (
            replace(
                GOOD,
                stripes=tuple(replace(PLACE, stripe=StripeId(n)) for n in range(STRIPES_MAX + 1)),
            ),
            "too many",
        ),
        (replace(GOOD, peers=(FROM_UP, FROM_UP, TO_DOWN)), "linked with"),
        (replace(GOOD, peers=(FROM_UP, TO_DOWN, replace(TO_DOWN, peer=ME))), "linked with"),
        (replace(GOOD, peers=(FROM_UP, replace(TO_DOWN, secret=b"short"))), "linked with"),
        (replace(GOOD, peers=(FROM_UP, replace(TO_DOWN, dial=True))), "linked with"),
        (
            replace(
                GOOD, peers=(replace(FROM_UP, address=Address("169.254.169.254", 80)), TO_DOWN)
            ),
            "linked with",
        ),
        (
            replace(GOOD, peers=(replace(FROM_UP, address=Address("10.0.0.1", 1 << 40)), TO_DOWN)),
            "linked with",
        ),
        (replace(GOOD, stripes=(PLACE, StripeEdge(StripeId(1), None, ()))), "begins here"),
        (replace(GOOD, peers=(FROM_UP,)), "impossible"),
        (replace(GOOD, sources=(PeerId("far"),)), "no peer of it"),
        (replace(GOOD, stripes=(replace(PLACE, parent=DOWN),)), "impossible"),
        *(
            (replace(GOOD, stripes=(replace(PLACE, spare=share),)), "impossible")
            for share in (-0.1, 1.1, math.nan, math.inf)
        ),
    ],
)
def test_an_impossible_plan_says_why(wrong: PlanEdges, says: str) -> None:
    assert says in edges_fault(wrong, ME)
