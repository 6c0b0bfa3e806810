import asyncio
from itertools import count

import pytest

from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import Reply
from echo2d.core.coordinator.events import CoordinatorEvent, RequestGone, SessionAsked
from echo2d.runtime.process.mailbox import EVENTS_MAX, EVENTS_PER_TURN_MAX, Mailbox, PendingRequests


async def test_events_are_taken_in_order_and_many_at_a_time() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(EVENTS_PER_TURN_MAX + 1):
        await mailbox.put(number)
    assert await mailbox.take(timeout_s=None) == list(range(EVENTS_PER_TURN_MAX))
    assert await mailbox.take(timeout_s=None) == [EVENTS_PER_TURN_MAX]
    assert await mailbox.take(timeout_s=0.0) == []


async def test_a_sender_with_too_much_waits_until_some_is_taken() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(EVENTS_MAX):
        await mailbox.put(number)
    async with asyncio.TaskGroup() as tasks:
        late = tasks.create_task(mailbox.put(-1))
        await asyncio.sleep(0)
        assert not late.done()
        await mailbox.take(timeout_s=None)


async def test_closing_ends_the_wait_of_all_senders() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(EVENTS_MAX):
        await mailbox.put(number)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(mailbox.put(-1))
        await asyncio.sleep(0)
        mailbox.close()
    for number in range(2 * EVENTS_MAX):
        await mailbox.put(number)


async def test_a_wake_up_adds_no_event_and_loses_none() -> None:
    mailbox: Mailbox[int] = Mailbox()
    await mailbox.put(1)
    mailbox.wake()
    await mailbox.put(2)
    assert await mailbox.take(timeout_s=None) == [1, 2]
    mailbox.wake()
    assert await mailbox.take(timeout_s=None) == []
    assert mailbox.waiting() == []
    for number in range(EVENTS_MAX):
        await mailbox.put(number)
    mailbox.wake()  # it is full: `take` does not wait
    assert len(mailbox.waiting()) == EVENTS_PER_TURN_MAX


# --- calls that wait for an answer

FINE = Reply(RequestId(0), 200, {"fine": True})


@pytest.fixture
def events() -> asyncio.Queue[CoordinatorEvent]:
    return asyncio.Queue()


@pytest.fixture
def calls(events: asyncio.Queue[CoordinatorEvent]) -> PendingRequests:
    return PendingRequests(events.put, count())


def ask(number: RequestId) -> CoordinatorEvent:
    return SessionAsked(number, 0)


async def test_a_call_gets_the_reply_with_its_number(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(calls.ask(ask, timeout_s=None)) for _ in range(2))
        assert [await events.get() for _ in range(2)] == [ask(RequestId(0)), ask(RequestId(1))]
        other = Reply(RequestId(1), 409, {})
        calls.answer(other)
        calls.answer(FINE)
        calls.answer(FINE)
        calls.answer(Reply(RequestId(9), 200, {}))
    assert (first.result(), second.result()) == (FINE, other)
    assert events.empty()


async def test_an_unanswered_call_is_reported_as_gone(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent]
) -> None:
    assert await calls.ask(ask, timeout_s=0.0) is None
    assert await calls.ask(ask, timeout_s=0.01) is None
    heard = [events.get_nowait() for _ in range(events.qsize())]
    assert heard[-2:] == [ask(RequestId(1)), RequestGone(RequestId(1))]


async def test_a_cancelled_call_is_reported_as_gone(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(calls.ask(ask, timeout_s=None))
        await events.get()
        waiting.cancel()
        assert await events.get() == RequestGone(RequestId(0))
    calls.answer(FINE)


async def test_the_number_of_open_calls_is_limited(
    events: asyncio.Queue[CoordinatorEvent],
) -> None:
    reply = await PendingRequests(events.put, count(), 0).ask(ask, timeout_s=None)
    assert reply is not None
    assert (reply.status, events.empty()) == (503, True)


async def test_closing_answers_all_present_and_later_calls(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(calls.ask(ask, timeout_s=None))
        await events.get()
        calls.close()
    for reply in (waiting.result(), await calls.ask(ask, timeout_s=None)):
        assert reply is not None
        assert reply.status == 503
    assert events.empty()
