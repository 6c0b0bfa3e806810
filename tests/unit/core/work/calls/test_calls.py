"""The gateway's calls, through the whole machine, from the side of callers and workers."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Persist, Send
from echo2d.core.coordinator.events import CommitAsked
from echo2d.core.protocol.control_messages import (
    Finish,
    Goodbye,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    SampleAnswered,
    VersionSpan,
)
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.core.rules.tasks import GatewayRules
from echo2d.core.status.schema import GatewayStatus
from echo2d.core.work.calls import call_work
from echo2d.core.work.calls.call_choice import CALL_AVOID_S
from echo2d.core.work.calls.call_work import CALL_PATIENCE_S, CALLS, REPORT_S
from echo2d.core.work.calls.calls import CALL_FAILURES_MAX
from echo2d.core.work.calls.events import (
    CallGone,
    CallId,
    CallRefused,
    ChoiceGrew,
    ChoiceStopped,
)
from echo2d.core.work.calls.open_calls import CHOICES_OF_CALLER_MAX, CHOICES_OPEN_MAX
from echo2d.core.work.leases import group_of, kind_of
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, rules, version_key
from tests.support.gateway import WAIT_S, call, exactly, gateway_world, key_of, of_calls
from tests.support.rollouts import answers


def told(world: World) -> list[tuple[list[int], str | None]]:
    """By the last event."""
    return [
        (unpack_tokens(a.tokens).tolist(), a.finish)
        for a in world.actions
        if isinstance(a, ChoiceGrew)
    ]


def refused(world: World) -> list[tuple[str, int | None]]:
    return [(a.code, a.version) for a in world.actions if isinstance(a, CallRefused)]


def test_a_call_is_served_by_a_lease_outside_of_the_run() -> None:
    world, (worker,) = gateway_world(4)
    queued = world.state.status().groups
    world.handle(call(1))
    [lease] = of_calls(worker)
    assert (lease.prompt, lease.samples, lease.max_new_tokens, lease.oldest) == (
        pack_tokens([5, 6]),
        (0,),
        8,
        0,
    )
    assert (lease.sampling, lease.stop_token_ids, lease.rng_seeds) == (
        Sampling(0.7, 0.9),
        (1,),
        (3,),
    )
    assert lease.report_s == REPORT_S
    world.say(worker, worker.wrote(key_of(lease), 0, 7, 8))
    assert told(world) == [([7, 8], None)]
    world.say(worker, worker.finish(key_of(lease), 0, tokens=(7, 8, 9, 1)))
    assert told(world) == []  # other logprobs than it reported before
    world.handle(call(2))
    lease = of_calls(worker)[-1]
    world.say(worker, worker.finish(key_of(lease), 0, tokens=(7, 1)))
    assert told(world) == [([7, 1], "stop")]
    assert answers(worker)[-1] == (True, "")
    assert not any(isinstance(action, Persist) for action in world.actions)
    status = world.state.status()
    assert status.groups == queued
    assert status.tokens_accepted == status.workers[0].accepted == 0


def test_the_run_is_served_first_and_calls_keep_to_their_share() -> None:
    world, (worker,) = gateway_world(8, share=0.25)
    for number in range(4):
        world.handle(call(number))
    assert len(of_calls(worker)) == 2
    assert world.state.status().gateway.waiting == 2
    world.handle(CallGone(CallId(0)))
    assert len(of_calls(worker)) == 3
    assert [m.lease for m in worker.inbox if isinstance(m, LeaseCancelled)] == [
        of_calls(worker)[0].lease
    ]


def test_a_call_that_has_waited_long_is_served_before_the_run() -> None:
    world, (worker,) = gateway_world(
        1, staleness_max=8
    )  # one slot, and the run takes it whenever it is free
    world.handle(call(1))
    for _ in range(3):
        world.say(worker, worker.finish(*worker.open[0]))
        world.drain()
    assert of_calls(worker) == []
    world.now += CALL_PATIENCE_S
    world.say(worker, worker.finish(*worker.open[0]))
    assert len(of_calls(worker)) == 1
    world.drain()
    assert len(worker.leases) == 1


def test_slots_that_a_call_holds_are_not_free_for_the_run() -> None:
    """Groups that are larger than all workers together would wait for empty ones for ever."""
    world, (worker,) = gateway_world(
        2, share=0.5, group_size=4, trajectories_per_step=4, staleness_max=8
    )
    world.handle(call(1))
    world.now += CALL_PATIENCE_S
    while not of_calls(worker):
        world.say(worker, worker.finish(*worker.open[0]))
        world.drain()
    mine = key_of(of_calls(worker)[0])
    for _ in range(12):  # three groups
        world.say(worker, worker.finish(*next(each for each in worker.open if each[0] != mine)))
        world.drain()
    assert mine in worker.leases


def test_calls_of_a_session_stay_with_their_worker_while_it_has_room() -> None:
    world, peers = gateway_world(3, 3)
    world.handle(call(1, session="x"))
    [usual] = [peer for peer in peers if of_calls(peer)]
    lease = of_calls(usual)[0]
    world.say(usual, usual.finish(key_of(lease), 0, tokens=(7, 1)))
    world.handle(call(2, session="x"))
    assert len(of_calls(usual)) == 2
    for number in range(3, 6):
        world.handle(call(number, session="x"))
    assert sum(len(of_calls(peer)) for peer in peers) == 5


def test_a_call_of_a_lost_worker_continues_with_its_tokens() -> None:
    world, peers = gateway_world(2, 2)
    world.handle(call(1))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    world.say(one, one.wrote(key_of(of_calls(one)[0]), 0, 7, 8))
    world.say(one, Goodbye("SIGTERM"))
    [again] = of_calls(two)
    assert unpack_tokens(again.prompt).tolist() == [5, 6, 7, 8]
    assert again.max_new_tokens == 6
    world.say(two, two.finish(key_of(again), 0, tokens=(9, 1)))
    [grew] = [action for action in world.actions if isinstance(action, ChoiceGrew)]
    assert (unpack_tokens(grew.tokens).tolist(), grew.finish) == ([9, 1], "stop")
    assert [(span.start, span.end) for span in grew.spans] == [(0, 4)]
    assert world.state.status().gateway.handed_over == 1


def test_a_leaving_worker_does_not_get_its_returned_choices_again() -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1))
    world.say(worker, LeaseFailed(of_calls(worker)[0].lease, 0, "stopping"))
    assert len(of_calls(worker)) == 1
    world.pass_time(CALL_AVOID_S)
    assert len(of_calls(worker)) == 2


def test_a_silent_worker_loses_the_call() -> None:
    world, peers = gateway_world(2, 2)
    world.handle(call(1))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    world.now += 14.0
    world.say(
        two, LeaseFailed(of_calls(one)[0].lease, 0, "a lie")
    )  # nobody gives back another's lease
    assert of_calls(two) == []
    world.pass_time(2.0)
    assert len(of_calls(two)) == 1


def test_a_worker_that_returns_reports_its_tokens_again() -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1))
    lease = key_of(of_calls(worker)[0])
    world.say(worker, worker.wrote(lease, 0, 7, 8))
    world.connect(worker.name, slots=2)
    assert lease in worker.leases
    world.say(worker, worker.wrote(lease, 0, 7, 8, 9))
    assert told(world) == [([9], None)]
    world.say(worker, worker.wrote(lease, 0, 4, 4, 4, 4))
    assert told(world) == []
    assert [fault.kind for fault in world.state.status().faults] == ["gateway"]


def test_samples_that_a_worker_forgot_are_given_to_another() -> None:
    world, peers = gateway_world(2, 2)
    world.handle(call(1))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    one.forget(key_of(of_calls(one)[0]))
    world.connect(one.name, slots=2, boot_id="c")
    assert len(of_calls(two)) == 1


@pytest.mark.parametrize("tokens", [(99,), (7,) * 9, ()])
def test_bad_output_of_workers_never_reaches_a_caller(tokens: tuple[int, ...]) -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1))
    for _ in range(CALL_FAILURES_MAX):
        assert told(world) == []
        world.say(worker, worker.finish(key_of(of_calls(worker)[-1]), 0, tokens=tokens))
        assert not answers(worker)[-1][0]
        ended = refused(world)
        world.pass_time(CALL_AVOID_S)
    assert ended == [("failed", 0)]
    assert world.state.status().gateway.ended == {"failed": 1}


def test_a_call_for_an_unknown_version_is_refused_and_one_for_a_coming_version_waits() -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1, min_version=Version(1)))
    assert refused(world) == [("version", 0)]
    world.say(worker, worker.finish(*worker.open[0]))
    world.drain()
    request = world.ask_batch(1)
    world.drain()
    digest = world.replies[request].digest
    assert digest is not None
    world.ask(lambda number: CommitAsked(number, world.ledger.epoch, 1, digest, 1.0))
    world.publish(1)
    world.handle(call(2, min_version=Version(1)))
    assert (refused(world), of_calls(worker)) == ([], [])
    world.pass_time(WAIT_S + 1.0)
    assert world.state.status().gateway.ended == {"version": 2}
    world.handle(call(3, min_version=Version(1)))
    world.drain()
    world.connect(worker.name, slots=2)
    world.drain()
    world.refit(worker)
    assert [lease.oldest for lease in of_calls(worker)] == [1]


def two_versions(*slots: int) -> tuple[World, FakePeer, FakePeer]:
    """Version 1 is published; the first worker serves it, the second one still version 0."""
    world, (new, old) = gateway_world(*slots)
    # The run's own work must not be in the way.
    while new.open or old.open:
        worker = new if new.open else old
        world.say(worker, worker.finish(*worker.open[0]))
        world.drain()
    request = world.ask_batch(1)
    world.drain()
    digest = world.replies[request].digest
    assert digest is not None
    world.ask(lambda number: CommitAsked(number, world.ledger.epoch, 1, digest, 1.0))
    world.publish(1)
    world.drain()
    world.refit(new)
    return world, new, old


def test_an_exact_call_is_served_only_by_workers_of_its_version() -> None:
    world, new, old = two_versions(4, 4)
    world.handle(exactly(1, 0, session="x"))
    world.handle(exactly(2, 1, session="x"))  # its session's usual worker serves another version
    world.handle(exactly(3, 0, session="x"))
    world.handle(exactly(4, 2))
    assert refused(world) == [("version", 1)]
    assert [len(of_calls(peer)) for peer in (old, new)] == [2, 1]


def test_an_exact_call_for_a_version_that_is_gone_is_refused_at_once() -> None:
    world, _, old = two_versions(4, 1)
    world.handle(exactly(1, 0))
    world.handle(exactly(2, 0))  # it waits for the old worker's only slot
    assert world.state.status().gateway.waiting == 1
    world.refit(old)
    assert refused(world) == [("version", 1)]
    world.handle(exactly(3, 0))
    assert refused(world) == [("version", 1)]
    assert world.state.status().gateway.calls == 1  # the first one may still end in its version


@pytest.mark.parametrize("finished", [False, True])
def test_a_refit_in_the_middle_ends_an_exact_call(finished: bool) -> None:
    world, _, old = two_versions(4, 4)
    world.handle(exactly(1, 0, choices=2))
    [lease] = of_calls(old)
    world.say(old, old.wrote(key_of(lease), 0, 7, 8))
    assert told(world) == [([7, 8], None)]
    world.refit(old)
    assert refused(world) == []
    if finished:
        said = old.finish(
            key_of(lease), 0, tokens=(7, 8, 9, 1), logprobs=(-0.25, -0.25, -0.5, -0.5)
        )
        spans = [
            VersionSpan(start, start + 2, key.version, key.digest)
            for start, key in ((0, version_key(0)), (2, version_key(1)))
        ]
        world.say(old, replace(said, spans=tuple(spans)))
        assert answers(old)[-1] == (True, "")
    else:
        world.say(old, old.wrote(key_of(lease), 0, 9, start=2))
    assert (told(world), refused(world)) == ([], [("version", 1)])
    assert world.state.status().gateway.ended == {"version": 1}


def test_an_exact_call_goes_on_at_another_worker_of_its_version() -> None:
    world, peers = gateway_world(2, 2)
    world.handle(exactly(1, 0))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    world.say(one, one.wrote(key_of(of_calls(one)[0]), 0, 7))
    world.say(one, Goodbye("SIGTERM"))
    world.say(two, two.finish(key_of(of_calls(two)[0]), 0, tokens=(9, 1)))
    assert told(world) == [([9, 1], "stop")]


def test_a_call_for_a_revoked_version_gets_the_reason() -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1))
    world.say(worker, worker.wrote(key_of(of_calls(worker)[0]), 0, 7))
    world.open_session(0)
    world.publish(0, salt=1)
    assert refused(world) == [("revoked", None)] or world.state.status().gateway.ended == {
        "revoked": 1
    }


def test_choices_of_one_prompt_share_a_lease() -> None:
    world, (worker,) = gateway_world(4)
    world.handle(call(1, choices=3))
    [lease] = of_calls(worker)
    assert (lease.samples, lease.rng_seeds) == ((0, 1, 2), (3, 4, 5))
    world.say(worker, worker.finish(key_of(lease), 1, tokens=(7, 1)))
    world.handle(call(2, choices=3))
    assert [granted.samples for granted in of_calls(worker)] == [(0, 1, 2), (0,)]
    world.handle(CallGone(CallId(1)))
    assert [granted.samples for granted in of_calls(worker)] == [(0, 1, 2), (0,), (1, 2)]
    assert of_calls(worker)[-1].rng_seeds == (
        4,
        5,
    )  # the sample's own, whoever it shares a lease with


def test_each_choice_of_a_shared_lease_continues_from_its_own_tokens() -> None:
    world, peers = gateway_world(6, 6)
    world.handle(call(1, choices=4))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    [lease] = of_calls(one)
    world.say(one, one.wrote(key_of(lease), 1, 7, 8))
    world.say(one, Goodbye("SIGTERM"))
    again = {granted.samples: unpack_tokens(granted.prompt).tolist() for granted in of_calls(two)}
    assert again == {(1,): [5, 6, 7, 8], (0,): [5, 6], (2, 3): [5, 6]}
    assert {each.samples: (each.rng_seeds, each.written) for each in of_calls(two)} == {
        (1,): ((4,), 2),
        (0,): ((3,), 0),
        (2, 3): ((5, 6), 0),
    }


def test_a_stopped_choice_ends_and_the_others_go_on() -> None:
    world, (worker,) = gateway_world(4)
    world.handle(call(1, choices=2))
    [lease] = of_calls(worker)
    world.handle(ChoiceStopped(CallId(1), 0))
    assert [
        a for a in world.actions if isinstance(a, Send)
    ] == []  # its lease is another one's, too
    world.handle(ChoiceStopped(CallId(1), 0))  # again is nothing
    world.say(worker, worker.finish(key_of(lease), 1, tokens=(7, 1)))
    assert LeaseCancelled(lease.lease, lease.attempt) in [
        a.message for a in world.actions if isinstance(a, Send)
    ]
    assert world.state.status().gateway == GatewayStatus(
        calls=0, waiting=0, running=0, ended={"done": 1}, tokens=2, handed_over=0
    )


def test_a_slot_is_free_when_its_sample_is_written_wanted_or_not() -> None:
    world, (worker,) = gateway_world(3, share=0.67)
    world.handle(call(1, choices=2))
    world.handle(call(2))
    [lease] = of_calls(worker)
    world.handle(ChoiceStopped(CallId(1), 0))
    assert len(of_calls(worker)) == 1
    world.say(worker, worker.finish(key_of(lease), 0, tokens=(7, 1)))
    assert answers(worker)[-1] == (False, "no caller waits for it")
    assert len(of_calls(worker)) == 2


def test_one_bad_sample_ends_the_lease_and_the_others_are_not_to_blame() -> None:
    world, peers = gateway_world(2, 2)
    world.handle(call(1, choices=2))
    for _ in range(CALL_FAILURES_MAX):
        assert refused(world) == []
        worker, lease = next((peer, key) for peer in peers for key in peer.leases if 0 in peer.leases[key].samples
                             and kind_of(peer.leases[key].group) == CALLS)  # fmt: skip
        world.say(worker, worker.finish(lease, 0, tokens=(99,)))
        ended = refused(world)
        world.pass_time(CALL_AVOID_S)
    assert ended == [("failed", 0)]


def test_a_report_with_two_bad_choices_ends_their_lease_once() -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1, choices=2))
    [lease] = of_calls(worker)
    key = key_of(lease)
    one, two = worker.wrote(key, 0, 99), worker.wrote(key, 1, 99)
    world.say(worker, LeaseProgress(*key, (*one.samples, *two.samples)))
    assert key not in worker.leases
    world.pass_time(CALL_AVOID_S)
    assert of_calls(worker)[-1].lease != lease.lease


def test_the_number_of_choices_is_limited() -> None:
    world, _ = gateway_world(2)
    for number in range(CHOICES_OF_CALLER_MAX // 32):
        world.handle(call(number, choices=32))
        assert refused(world) == []
    world.handle(call(100))
    assert refused(world) == [("busy", 0)]
    world.handle(CallGone(CallId(0)))
    world.handle(call(101, choices=32))
    assert refused(world) == []
    for number in range(200, 200 + (CHOICES_OPEN_MAX - CHOICES_OF_CALLER_MAX) // 32):
        world.handle(call(number, choices=32, caller=f"other {number}"))
        assert refused(world) == []
    world.handle(call(300, caller="late"))
    assert refused(world) == [("busy", 0)]


def test_prompts_of_calls_never_fill_a_workers_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outbox has a limit, past which the whole link is given up."""
    monkeypatch.setattr(call_work, "PROMPT_BYTES_MAX", 100)
    world, peers = gateway_world(8, 8)
    for number in range(5):
        world.handle(call(number, prompt=pack_tokens([5] * 12)))  # 48 bytes
    assert [len(of_calls(peer)) for peer in peers] == [2, 2]
    [held] = [peer for peer in peers if of_calls(peer)[0].group == group_of(CALLS, 0)]
    world.handle(CallGone(CallId(0)))
    assert len(of_calls(held)) == 3


def test_calls_and_their_leases_end_with_the_process() -> None:
    world, (worker,) = gateway_world(2)
    world.handle(call(1))
    lease = key_of(of_calls(worker)[0])
    world.crash()
    assert lease not in worker.leases
    world.say(worker, worker.wrote(lease, 0, 7))
    assert LeaseCancelled(lease.lease, lease.attempt) in [
        a.message for a in world.actions if isinstance(a, Send)
    ]


def test_a_call_before_the_first_version_is_refused() -> None:
    world = World(rules(gateway=GatewayRules(0.5, WAIT_S)))
    world.handle(call(1))
    assert refused(world) == [("late", None)]
    assert not any(isinstance(action, SampleAnswered) for action in world.actions)


@pytest.mark.parametrize(
    ("written", "finish"), [((7,), "stop"), ((7, 8), "length"), ((1, 7, 1), "stop")]
)
def test_a_truncated_answer_continues_at_another_worker(
    written: tuple[int, ...], finish: Finish
) -> None:
    """A worker that sends a short, wrong result does not end the answer of the caller."""
    world, peers = gateway_world(4, 4)
    world.handle(call(1))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    [lease] = of_calls(one)
    world.say(one, one.finish(key_of(lease), 0, tokens=written, finish=finish))
    answers = [message for message in one.inbox if isinstance(message, SampleAnswered)]
    assert not answers[-1].accepted
    assert len(of_calls(two)) == 1


@pytest.mark.parametrize("said", [(7, 1), (7, 1, 8)])
def test_a_stop_token_is_believed_only_in_a_result(said: tuple[int, ...]) -> None:
    """Nobody could go on behind it if its worker fails before."""
    world, peers = gateway_world(4, 4)
    world.handle(call(1))
    one, two = sorted(peers, key=lambda peer: not of_calls(peer))
    [lease] = of_calls(one)
    world.say(one, one.wrote(key_of(lease), 0, *said))
    world.say(one, Goodbye("SIGTERM"))
    [again] = of_calls(two)
    assert unpack_tokens(again.prompt).tolist() == [5, 6, 7]
    world.say(two, two.finish(key_of(again), 0, tokens=(8, 1)))
    assert told(world)[-1] == ([8, 1], "stop")
