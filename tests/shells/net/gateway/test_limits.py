"""The gateway's limits: requests, work on prompts, and data that waits for a caller who does not read."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.work.calls.events import CallGone, CallId, CallRefused, ChoiceGrew
from echo2d.net.gateway import limits
from echo2d.net.gateway.errors import CallRefusal, error_response
from echo2d.net.gateway.limits import RENDERING_MAX, Desk, OpenRequests
from echo2d.runtime.coordinator.gateway import UNREAD_BYTES_MAX, _Call
from tests.support.polling import HANG_S


def test_open_requests_are_limited_for_each_caller_and_for_all_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "REQUESTS_OF_CALLER_MAX", 3)
    monkeypatch.setattr(limits, "GATEWAY_REQUESTS_MAX", 5)
    requests = OpenRequests()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(requests.one_of("a"))
        with (
            pytest.raises(CallRefusal, match="3 requests of yours are open; try again"),
            requests.one_of("a"),
        ):
            pass
        for _ in range(2):
            stack.enter_context(requests.one_of("b"))
        with (
            pytest.raises(CallRefusal, match="5 requests are open") as refused,
            requests.one_of("c"),
        ):
            pass
        answer = error_response(refused.value.status, refused.value.code, refused.value.detail)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    with requests.one_of("a"):
        assert requests._open == {"a": 1}


class Work:
    """Blocking, until it is let go."""

    def __init__(self) -> None:
        self.begun, self.most = 0, 0
        self._lock, self._go = threading.Lock(), threading.Event()

    def __call__(self) -> int:
        with self._lock:
            self.begun += 1
        assert self._go.wait(30)
        return self.begun

    def let_go(self) -> None:
        self._go.set()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def test_few_prompts_are_rendered_at_a_time_and_few_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RENDER_QUEUE_MAX", 3)
    desk, work = Desk(), Work()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(desk.do(work)) for _ in range(RENDERING_MAX + 3)]
        await until(lambda: work.begun == RENDERING_MAX)
        with pytest.raises(CallRefusal, match="3 prompts wait to be rendered") as refused:
            await desk.do(work)
        assert refused.value.status == 429
        assert work.begun == RENDERING_MAX
        work.let_go()
    assert all(task.result() for task in running)


async def test_a_caller_that_hangs_up_frees_its_place_when_its_thread_ends() -> None:
    desk, work = Desk(), Work()
    async with asyncio.TaskGroup() as tasks:
        gone = [tasks.create_task(desk.do(work)) for _ in range(RENDERING_MAX)]
        await until(lambda: work.begun == RENDERING_MAX)
        for task in gone:
            task.cancel()
        late = tasks.create_task(desk.do(work))
        await until(lambda: all(task.done() for task in gone))
        assert (work.begun, desk._places.locked()) == (RENDERING_MAX, True)
        work.let_go()
        assert await late


def grew(tokens: int) -> ChoiceGrew:
    return ChoiceGrew(CallId(1), 0, bytes(4 * tokens), bytes(4 * tokens), ())


async def test_a_call_ends_when_too_much_data_waits_for_its_caller() -> None:
    events: list[CoordinatorEvent] = []

    async def emit(event: CoordinatorEvent) -> None:
        events.append(event)

    with pytest.raises(TimeoutError):  # noqa: PT012
        async with asyncio.timeout(None) as unread:
            call = _Call(CallId(1), emit, unread)
            for _ in range(10):  # who reads may be told as much as there is
                call.put(grew(UNREAD_BYTES_MAX // 32))
                await call.next()
            while call._queue.qsize() < 1000 and unread.when() is None:
                call.put(grew(100))
            held = call._queue.qsize()
            call.put(grew(100))
            assert call._queue.qsize() == held <= UNREAD_BYTES_MAX // 800
            await asyncio.Event().wait()
    call.put(CallRefused(CallId(1), "stopping", "", None))
    assert events == []
    assert CallGone(CallId(1), "slow").how == "slow"
