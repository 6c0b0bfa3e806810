import asyncio

import pytest

from echo2d.core.base.ids import RequestId
from echo2d.core.coordinator.events import CoordinatorEvent, Reply, RequestGone, SessionAsked
from echo2d.runtime.process import pending_requests
from echo2d.runtime.process.pending_requests import PendingRequests

FINE = Reply(RequestId(0), 200, {"fine": True})


@pytest.fixture
def events() -> asyncio.Queue[CoordinatorEvent]:
    return asyncio.Queue()


@pytest.fixture
def calls(events: asyncio.Queue[CoordinatorEvent]) -> PendingRequests:
    return PendingRequests(events.put)


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


async def test_an_unanswered_call_is_reported_gone(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent]
) -> None:
    assert await calls.ask(ask, timeout_s=0.0) is None
    assert await calls.ask(ask, timeout_s=0.01) is None
    heard = [events.get_nowait() for _ in range(events.qsize())]
    assert heard[-2:] == [ask(RequestId(1)), RequestGone(RequestId(1))]


async def test_a_cancelled_call_is_reported_gone(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(calls.ask(ask, timeout_s=None))
        await events.get()
        waiting.cancel()
        assert await events.get() == RequestGone(RequestId(0))
    calls.answer(FINE)


async def test_calls_are_bounded(
    calls: PendingRequests, events: asyncio.Queue[CoordinatorEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_requests, "PENDING_REQUESTS_MAX", 0)
    reply = await calls.ask(ask, timeout_s=None)
    assert reply is not None
    assert (reply.status, events.empty()) == (503, True)


async def test_closing_answers_all_now_and_later(
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
