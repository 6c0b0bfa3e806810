"""Strangers at the coordinator's port: few, brief, and never in the way of holders of a credential."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType

import pytest
import uvloop
from aiohttp import web

from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.net.control.client import ControlLink
from echo2d.net.control.server import HELLO_TIMEOUT_S
from echo2d.net.http import admission as door_module
from echo2d.net.http import tls_accept
from echo2d.net.http.admission import (
    DOOR,
    HTTP_STRANGERS_MAX,
    HTTP_STRANGERS_PER_ADDRESS_MAX,
    STRANGER_S_MAX,
    ConnectionAdmission,
    admit,
)
from echo2d.net.http.serving import make_runner, make_site
from echo2d.net.security.tls import COORDINATOR
from echo2d.runtime.coordinator.main import core_machine
from tests.support.control_link import Owner, enrolled
from tests.support.polling import HANG_S
from tests.support.scripted_core import learner, make_config, serving
from tests.support.tls_peers import BARE_TLS, RUN

FEW = 16  # strangers of one address
SILENT = b""
HALF_A_HEADER = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_A_BODY = (
    b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\nContent-Length: 99\r\n\r\n{"
)
HALF_A_TLS_HELLO = bytes.fromhex("1603010200010001fc0303")
A_PAGE = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
A_CALL = b"GET /call HTTP/1.1\r\nHost: x\r\n\r\n"


class Stranger:
    """A connection that said something once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @staticmethod
    async def come(
        stack: AsyncExitStack, port: int, said: bytes = SILENT, address: str = "127.0.0.1"
    ) -> "Stranger":
        stranger = Stranger(
            *await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        )
        stack.callback(stranger._writer.close)
        stranger._writer.write(said)
        return stranger

    async def closed(self) -> None:
        async with asyncio.timeout(HANG_S):
            with suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass

    async def answered(self) -> None:
        async with asyncio.timeout(HANG_S):
            await self.reader.readuntil(b"fine")

    async def is_open(self) -> bool:
        """Of a connection whose last answer was read."""
        self._writer.write(A_CALL)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.answered()
            return True
        return False


@asynccontextmanager
async def guarded(
    *,
    tls: bool = False,
) -> AsyncIterator[tuple[int, ConnectionAdmission, AsyncExitStack]]:
    """A server where /page needs no credential, /call shows one, and /v1/enrol reads what it is sent; its port."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="fine")

    async def call(request: web.Request) -> web.Response:
        admit(request)
        return web.Response(text="fine")

    async def enrol(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app[DOOR] = ConnectionAdmission()
    app.router.add_get("/page", page)
    app.router.add_get("/call", call)
    app.router.add_post("/v1/enrol", enrol)
    runner = make_runner(app, shutdown_timeout_s=0.1)
    await runner.setup()
    shown = await asyncio.to_thread(RUN.coordinator) if tls else None
    await make_site(runner, "127.0.0.1", 0, shown).start()
    async with AsyncExitStack() as stack:
        yield runner.addresses[0][1], app[DOOR], stack
    await runner.cleanup()
    assert len(app[DOOR]) == 0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "HTTP_STRANGERS_PER_ADDRESS_MAX", FEW)
    monkeypatch.setattr(door_module, "HTTP_STRANGERS_MAX", 2 * FEW)


def test_a_whole_fleet_may_come_back_at_once_from_one_address() -> None:
    assert PEERS_MAX <= HTTP_STRANGERS_PER_ADDRESS_MAX < HTTP_STRANGERS_MAX
    assert STRANGER_S_MAX > HELLO_TIMEOUT_S


@pytest.mark.usefixtures("few")
async def test_strangers_keep_no_enrolled_peer_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = config.run.run_dir
    async with serving(config, core_machine) as opened, AsyncExitStack() as stack:
        port = int(opened.url.rpartition(":")[2])
        identity, owner = await enrolled(run_dir, opened.url), Owner()
        strangers = [await Stranger.come(stack, port) for _ in range(2 * FEW)]
        async with asyncio.TaskGroup() as tasks, learner(run_dir, opened) as client:
            linked = tasks.create_task(
                ControlLink(opened.url, identity, owner, rng=random.Random(1)).run()
            )
            await asyncio.wait_for(owner.heard.get(), HANG_S)
            assert (await client.open_session(0)).epoch == 1
            strangers += [await Stranger.come(stack, port) for _ in range(2 * FEW)]
            await asyncio.gather(*(each.closed() for each in strangers[: 3 * FEW]))
            assert len((await client.status())["workers"]) == 1
            assert list(opened.coordinator.sessions._open) == [0], (
                "the first link is the only one ever"
            )
            assert not linked.done()
            linked.cancel()


@pytest.mark.usefixtures("few")
async def test_the_oldest_of_too_many_strangers_is_closed_whatever_it_sent() -> None:
    async with guarded() as (port, door, stack):
        admitted = await Stranger.come(stack, port, A_CALL)
        await admitted.answered()
        said = (SILENT, HALF_A_HEADER, HALF_A_BODY, A_PAGE)
        strangers = [await Stranger.come(stack, port, said[number % 4]) for number in range(FEW)]
        for number in range(FEW):
            await Stranger.come(stack, port)
            await strangers[number].closed()
            assert len(door) == FEW
        assert await admitted.is_open()


@pytest.mark.usefixtures("few")
async def test_the_oldest_of_too_many_addresses_is_closed() -> None:
    async with guarded() as (port, door, stack):
        first, *_ = [
            await Stranger.come(stack, port, address=f"127.0.1.{number}")
            for number in range(1, 2 * FEW + 1)
        ]
        await Stranger.come(stack, port, address="127.0.2.1")
        await first.closed()
        assert len(door) == 2 * FEW


@pytest.mark.parametrize("said", [SILENT, HALF_A_HEADER, HALF_A_BODY, A_PAGE])
async def test_a_stranger_is_closed_after_its_time(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "STRANGER_S_MAX", 0.2)
    async with guarded() as (port, door, stack):
        admitted = await Stranger.come(stack, port, A_CALL)
        await admitted.answered()
        await (await Stranger.come(stack, port, said)).closed()
        assert len(door) == 0
        assert await admitted.is_open()


# --- before the end of a TLS handshake


async def met(stack: AsyncExitStack, port: int) -> Stranger:
    """A connection with TLS that is served."""
    stranger = Stranger(
        *await asyncio.open_connection(
            "127.0.0.1", port, ssl=BARE_TLS.dialler, server_hostname=COORDINATOR
        )
    )
    stack.callback(stranger._writer.close)
    assert await stranger.is_open()
    return stranger


async def of_too_many_handshakes_the_oldest_goes() -> None:
    async with guarded(tls=True) as (port, door, stack):
        admitted = await met(stack, port)
        strangers = [
            await Stranger.come(stack, port, (SILENT, HALF_A_TLS_HELLO)[number % 2])
            for number in range(FEW)
        ]
        for number in range(FEW):
            await Stranger.come(stack, port)
            await strangers[number].closed()
            assert len(door) == FEW
        # Neither those who were there before nor a newcomer is kept out.
        assert await admitted.is_open()
        await met(stack, port)


async def of_too_many_addresses_the_oldest_handshake_goes() -> None:
    async with guarded(tls=True) as (port, door, stack):
        first, *_ = [
            await Stranger.come(stack, port, address=f"127.0.1.{number}")
            for number in range(1, 2 * FEW + 1)
        ]
        await Stranger.come(stack, port, address="127.0.2.1")
        await first.closed()
        assert len(door) == 2 * FEW


async def handshakes_have_so_much_time() -> None:
    async with guarded(tls=True) as (port, door, stack):
        admitted = await met(stack, port)
        for said in (SILENT, HALF_A_TLS_HELLO, A_PAGE):
            await (await Stranger.come(stack, port, said)).closed()
        assert len(door) == 0
        assert await admitted.is_open()


async def a_handshake_and_its_first_call_are_one_stranger() -> None:
    async with guarded(tls=True) as (port, door, stack):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=BARE_TLS.dialler, server_hostname=COORDINATOR
        )
        stack.callback(writer.close)
        stranger = Stranger(reader, writer)
        writer.write(A_PAGE)
        await stranger.answered()
        assert len(door) == 1
        assert await stranger.is_open()
        assert len(door) == 0


LOOPS = pytest.mark.parametrize("loop", [asyncio, uvloop])


@LOOPS
@pytest.mark.parametrize(
    "scenario",
    [
        of_too_many_handshakes_the_oldest_goes,
        of_too_many_addresses_the_oldest_handshake_goes,
        a_handshake_and_its_first_call_are_one_stranger,
    ],
)
@pytest.mark.usefixtures("few")
def test_tls_handshakes_count_as_strangers(
    scenario: Callable[[], Coroutine[None, None, None]], loop: ModuleType
) -> None:
    loop.run(scenario())


@LOOPS
def test_a_tls_handshake_is_closed_after_its_time(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_accept, "TLS_HANDSHAKE_S_MAX", 0.1)
    loop.run(handshakes_have_so_much_time())
