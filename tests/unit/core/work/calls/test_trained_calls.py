"""Calls whose tokens are trained on are audited: a choice ends only when the audit believes it."""

from itertools import count
from typing import Any

from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.protocol.control_messages import HeldLease, LeaseFailed
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.work.calls.events import CallGone, CallId, CallRefused, ChoiceGrew, ChoiceStopped
from tests.support.audited_world import LIE, started
from tests.support.gateway import call, key_of, of_calls

TRUE = (3, 5, 1)


class CallsWorld:
    """An audited run with one worker, and what callers were told."""

    def __init__(self, worker: str, *, auditor: bool = True, **changes: Any) -> None:
        self.world = started(worker, auditor=auditor, calls=True, **changes)
        self.peer = self.world.peers[worker]
        self.numbers = count(1)
        self.told: list[tuple[list[int], str | None]] = []
        self.refused: list[str] = []

    def do(self, event: CoordinatorEvent) -> None:
        self.take(self.world.handle(event))

    def take(self, actions: list[Any]) -> None:
        for each in actions:
            if isinstance(each, ChoiceGrew):
                self.told.append((unpack_tokens(each.tokens).tolist(), each.finish))
            elif isinstance(each, CallRefused):
                self.refused.append(each.detail)

    def ask(self, *, trained: bool = True) -> HeldLease:
        self.do(call(next(self.numbers), trained=trained))
        return key_of(of_calls(self.peer)[-1])

    def answer(self, key: HeldLease, tokens: tuple[int, ...]) -> None:
        self.take(self.world.say(self.peer, self.peer.finish(key, 0, tokens=tokens)))

    def let_audit(self) -> None:
        if "auditor" not in self.world.peers:
            self.world.connect("auditor", kind="auditor", slots=0)
        while self.world.pending:
            self.world.deliver()
            self.take(self.world.actions)


def test_a_new_workers_choice_ends_when_the_auditor_believes_it() -> None:
    calls = CallsWorld("a", auditor=False)
    calls.answer(calls.ask(), TRUE)
    assert calls.told == [(list(TRUE), None)], "its tokens may not be used yet"
    calls.let_audit()
    assert calls.told[1:] == [([], "stop")]
    (scored,) = calls.world.scored
    assert scored.seed == 3, "the seed of the call"


def test_a_choice_that_the_auditor_does_not_believe_ends_its_call() -> None:
    calls = CallsWorld("a")
    calls.answer(calls.ask(), LIE)
    calls.let_audit()
    assert calls.refused == ["the audit does not believe it"]
    assert calls.world.standing("a") == "flagged"


def test_a_sample_that_is_asked_for_again_goes_to_another_worker() -> None:
    calls = CallsWorld("a")
    calls.do(call(1, trained=True, session="sample"))
    calls.answer(key_of(of_calls(calls.peer)[-1]), LIE)
    calls.let_audit()
    other = calls.world.connect("mine", trusted=True)
    while calls.world.pending or calls.world.refit(other):
        calls.world.drain()
    calls.do(call(2, trained=True, session="sample"))
    assert [len(of_calls(peer)) for peer in (calls.peer, other)] == [1, 1]


def test_a_trusted_workers_choice_and_a_call_that_is_not_trained_on_end_at_once() -> None:
    calls = CallsWorld("mine")
    calls.answer(calls.ask(), TRUE)
    assert calls.told == [(list(TRUE), "stop")]
    calls = CallsWorld("a", auditor=False)
    calls.answer(calls.ask(trained=False), TRUE)
    assert calls.told == [(list(TRUE), "stop")]


def test_a_choice_that_its_caller_stops_is_audited_too() -> None:
    calls = CallsWorld("a", auditor=False)
    calls.take(calls.world.say(calls.peer, calls.peer.wrote(calls.ask(), 0, 3, 5)))
    calls.do(ChoiceStopped(CallId(1), 0))
    assert calls.told == [([3, 5], None)]
    calls.let_audit()
    assert calls.told[1:] == [([], "stop")]


def test_a_caller_that_goes_leaves_nothing_that_waits() -> None:
    calls = CallsWorld("a", auditor=False)
    calls.answer(calls.ask(), TRUE)
    calls.do(CallGone(CallId(1)))
    assert len(calls.world.audits.waiting) == 0
    calls.let_audit()
    assert calls.told == [(list(TRUE), None)]


def test_calls_with_tokens_of_a_convicted_worker_end() -> None:
    calls = CallsWorld("liar", newcomer=40)
    calls.take(calls.world.say(calls.peer, calls.peer.wrote(calls.ask(), 0, 3, 5)))
    for _ in range(80):
        if calls.world.convicts:
            break
        calls.answer(calls.ask(), LIE)
        calls.let_audit()
    assert calls.world.convicts
    assert "a worker of it was convicted" in calls.refused


def test_a_whole_choice_of_a_worker_that_fails_at_the_end_is_audited_too() -> None:
    calls = CallsWorld("a", auditor=False)
    key = calls.ask()
    calls.take(calls.world.say(calls.peer, calls.peer.wrote(key, 0, 3, 5, 9, 9, 9, 9, 9, 9)))
    calls.take(calls.world.say(calls.peer, LeaseFailed(key.lease, key.attempt, "full")))
    assert [finish for _, finish in calls.told] == [None]
    calls.let_audit()
    assert [finish for _, finish in calls.told] == [None, "length"]
