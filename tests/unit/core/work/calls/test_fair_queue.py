"""The order of callers that wait for a slot; by hand, without workers."""

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.trajectory import Partial
from echo2d.core.work.calls.call_choice import CALL_AVOID_S, CallChoice
from echo2d.core.work.calls.fair_queue import CallQueue
from tests.support.gateway import call

BOB = PeerId("b" * 32)


def queued(
    queue: CallQueue, caller: str, number: int, choices: int = 1, now: float = 0.0
) -> list[CallChoice]:
    waiting = [
        CallChoice(call(number, caller=caller, choices=choices), index) for index in range(choices)
    ]
    for choice in waiting:
        queue.put(choice, now=now)
    queue.check()
    return waiting


def order(queue: CallQueue) -> list[tuple[str, int]]:
    return [(choice.call.caller, choice.index) for choice in queue.in_turn()]


def test_the_caller_with_the_fewest_slots_is_next_and_moves_back_once_it_has_some() -> None:
    queue = CallQueue()
    first, *_ = queued(queue, "a", 1, choices=2)
    queued(queue, "b", 2)
    assert order(queue) == [("a", 0), ("a", 1), ("b", 0)]
    queue.discard(first)
    queue.hold("a", 1)
    assert order(queue) == [("b", 0), ("a", 1)]
    queue.hold("a", -1)
    assert (order(queue), queue.callers) == ([("b", 0), ("a", 1)], 2)
    queue.check()


def test_a_choice_with_tokens_is_served_before_one_without() -> None:
    queue = CallQueue()
    queued(queue, "a", 1)
    begun = CallChoice(call(2, caller="a"), 0, told=Partial(b"\1\0\0\0", b"\0\0\0\0"))
    queue.put(begun, now=1.0)
    assert next(queue.in_turn()) is begun
    assert queue.run_of(begun, 8) == [begun]


def test_choices_of_one_call_are_served_together_up_to_the_requested_number() -> None:
    queue = CallQueue()
    choices = queued(queue, "a", 1, choices=4)
    choices[2].avoid = BOB
    assert queue.run_of(choices[0], 8) == choices[:2]
    assert queue.run_of(choices[0], 1) == choices[:1]


def test_a_choice_that_waits_too_long_is_late() -> None:
    queue = CallQueue()
    (choice,) = queued(queue, "a", 1)
    queue.discard(choice)
    assert (len(queue), queue.wake_at(5.0)) == (0, None)
    choice.avoid = BOB
    queue.put(choice, now=2.0)
    before = queue.changes
    assert queue.wake_at(5.0) == 2.0 + CALL_AVOID_S
    assert queue.late(5.0, now=2.0 + CALL_AVOID_S) == []
    assert (queue.changes, queue.wake_at(5.0)) == (before + 1, 7.0)
    assert queue.late(5.0, now=7.0) == [choice]
    queue.check()
