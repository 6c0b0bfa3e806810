"""A box's uplink, measured by the bytes that the coordinator receives from it."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from echo2d.net.api import boxes
from echo2d.net.api.boxes import UPLINK_EVERY_S, UplinkTrials
from echo2d.net.http.json_fields import HttpRefusal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(clock: Clock) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    trials = UplinkTrials(clock)

    async def handle(request: web.Request) -> web.Response:
        try:
            return await trials.take(request, request.query["token"])
        except HttpRefusal as refusal:
            return web.json_response({"error": refusal.code}, status=refusal.status)

    app = web.Application()
    app.router.add_post("/v1/uplink", handle)
    async with TestClient(TestServer(app)) as made:
        yield made


async def test_a_trial_counts_bytes_and_seconds_after_the_first_part(clock: Clock) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for clock.now in (3.0, 4.0, 5.0):
            yield bytes(1000)

    request = SimpleNamespace(content=SimpleNamespace(iter_any=parts))
    answer = await UplinkTrials(clock).take(cast("web.Request", request), "a")
    assert json.loads(answer.text or "") == {"bytes": 2000, "seconds": 2.0}


async def test_each_token_may_start_a_trial_now_and_then(
    client: TestClient[web.Request, web.Application], clock: Clock
) -> None:
    async def status(token: str) -> int:
        async with client.post(f"/v1/uplink?token={token}", data=b"x") as response:
            return response.status

    assert [await status("a"), await status("a"), await status("b")] == [200, 503, 200]
    clock.now = UPLINK_EVERY_S
    assert await status("a") == 200


async def test_only_one_trial_runs_at_a_time(
    client: TestClient[web.Request, web.Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "UPLINK_EVERY_S", 0.0)
    begun, go = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"x"
        begun.set()
        await go.wait()

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post("/v1/uplink?token=a", data=parts()))
        await begun.wait()
        while (await client.post("/v1/uplink?token=b", data=b"x")).status == 200:
            pass  # the first one's headers were still on their way
        go.set()
    assert first.result().status == 200


async def test_bytes_that_a_slow_uplink_sent_by_the_end_of_the_trial_count(
    client: TestClient[web.Request, web.Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "UPLINK_S_MAX", 0.02)
    monkeypatch.setattr(boxes, "UPLINK_EVERY_S", 0.0)

    async def parts() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    answer = await client.post("/v1/uplink?token=a", data=parts())
    assert (answer.status, await answer.json()) == (200, {"bytes": 0, "seconds": 0.0})
    assert (await client.post("/v1/uplink?token=a", data=b"x")).status == 200


async def test_more_bytes_than_a_trial_takes_are_refused(
    client: TestClient[web.Request, web.Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "UPLINK_BYTES_MAX", 10_000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(5000)

    answer = await client.post("/v1/uplink?token=a", data=parts())
    assert (answer.status, await answer.json()) == (413, {"error": "too_large"})
