"""Both ends of the control link over a real socket."""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import msgpack
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import Epoch, PeerId, PublishSeq, RunId, SessionId
from echo2d.core.cluster.events import PeerConnected, PeerDisconnected, PeerSaid
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.protocol.builds import OURS, Build, to_install
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    TO_PEER,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    ToPeer,
    Welcome,
)
from echo2d.errors import OperatorFault
from echo2d.net import backoff
from echo2d.net.control import send_buffer
from echo2d.net.control import server as control_server
from echo2d.net.control.client import ControlLink, Identity
from echo2d.net.control.refusals import PROTOCOL_FAULTS_MAX, RETRY_S_MIN
from echo2d.net.control.server import Sessions
from echo2d.net.security.auth import (
    ANSWER,
    CHALLENGE,
    NONCE_HEADER,
    PEER_HEADER,
    ChallengeAnswer,
    Denied,
    KnownPeer,
    answer,
    peer_id_of,
    public_bytes,
)
from echo2d.this_build import THIS_BUILD
from tests.support.control_link import HELLO, Owner
from tests.support.polling import HANG_S

RUN, PEER, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(3))
IDENTITY = Identity(PEER, public_bytes(RUN))
WELCOME = Welcome(
    IDENTITY.peer, IDENTITY.run_id, Epoch(1), PublishSeq(0), 60.0, (), (), build=THIS_BUILD
)


def known_peer(peer: PeerId) -> KnownPeer:
    if peer != IDENTITY.peer:
        raise Denied(401, "credential", "this peer is not enrolled in this run")
    return KnownPeer(peer, public_bytes(PEER), "worker")


class Coordinator:
    """A server whose events the test takes one by one."""

    def __init__(self, known: Callable[[PeerId], KnownPeer] = known_peer) -> None:
        self.events: asyncio.Queue[CoordinatorEvent] = asyncio.Queue()
        self.sessions = Sessions(RUN, known_peer=known, emit=self.events.put)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Coordinator"]:
        app = web.Application()
        app.router.add_get("/v1/worker", self.sessions.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def welcome(self, message: ToPeer = WELCOME) -> SessionId:
        connected = await self.events.get()
        assert isinstance(connected, PeerConnected)
        self.sessions.send(message, connected.session)
        return connected.session


@pytest.fixture
async def server() -> AsyncIterator[Coordinator]:
    async with Coordinator().serving() as coordinator:
        yield coordinator


@asynccontextmanager
async def linked(
    url: str, owner: Owner, identity: Identity = IDENTITY
) -> AsyncIterator[ControlLink]:
    link = ControlLink(url, identity, owner, rng=random.Random(1))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run())
        yield link
        running.cancel()


@asynccontextmanager
async def raw_socket(server: Coordinator) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A proven connection on which the test says what it likes."""
    headers = {PEER_HEADER: IDENTITY.peer, NONCE_HEADER: "00" * 32}
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{server.url}/v1/worker", headers=headers, max_msg_size=0) as socket,
    ):
        asked = CHALLENGE.decode(await socket.receive_bytes())
        given = answer(PEER, IDENTITY.run_key, bytes(32), asked)
        await socket.send_bytes(ANSWER.encode(given))
        yield socket


async def test_both_ends_exchange_hello_welcome_and_messages(server: Coordinator) -> None:
    owner = Owner()
    async with linked(server.url, owner) as link:
        connected = await server.events.get()
        assert connected == PeerConnected(SessionId(0), IDENTITY.peer, HELLO)
        server.sessions.send(WELCOME, SessionId(0))
        assert await owner.heard.get() == WELCOME
        assert await server.events.get() == PeerSaid(SessionId(0), Heartbeat(3))
        assert server.sessions.peers() == {IDENTITY.peer}
        server.sessions.send(Drain("done"), SessionId(0), SessionId(7))
        assert await owner.heard.get() == Drain("done")
        link.send(Goodbye("leaving"))
        assert await server.events.get() == PeerSaid(SessionId(0), Goodbye("leaving"))
    assert await server.events.get() == PeerDisconnected(SessionId(0), "closed")
    assert server.sessions.peers() == frozenset()


async def test_the_log_names_the_peer_that_is_gone_and_the_reason(
    server: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused = Refused("revoked", "the credential was revoked", permanent=True)

    async def gone() -> str:
        while not isinstance(await server.events.get(), PeerDisconnected):
            pass
        return caplog.messages[-1].partition("reason=")[2]

    owner = Owner()
    async with linked(server.url, owner) as link:
        await server.welcome()
        await owner.heard.get()
        link.send(Goodbye("SIGTERM"))
        link.leave()
        assert await gone() == "it said goodbye (SIGTERM)"
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        await server.welcome()
        transport = socket.get_extra_info("socket")
        transport.shutdown(2)
        assert await gone() == "the connection was lost"
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        session = await server.welcome()
        server.sessions.send(refused, session)
        server.sessions.close(session)
        while (await socket.receive()).type != aiohttp.WSMsgType.CLOSE:
            pass
        await socket.close()
        assert await gone() == "refused (revoked): the credential was revoked"
    lines = [line for line in caplog.messages if line.startswith("disconnected peer=")]
    assert all(f" name={HELLO.name} " in line for line in lines)


async def test_a_peer_that_leaves_sends_its_queued_messages_first(server: Coordinator) -> None:
    owner = Owner()
    async with asyncio.TaskGroup() as tasks:
        link = ControlLink(server.url, IDENTITY, owner, rng=random.Random(1))
        tasks.create_task(link.run())
        session = await server.welcome()
        await owner.heard.get()
        assert await server.events.get() == PeerSaid(session, Heartbeat(3))
        link.send(Goodbye("leaving"))
        link.leave()
    assert await server.events.get() == PeerSaid(session, Goodbye("leaving"))
    assert isinstance(await server.events.get(), PeerDisconnected)
    link.send(Goodbye("nobody hears this"))


async def test_the_coordinator_closes_after_its_last_words_and_the_peer_comes_back(
    server: Coordinator,
) -> None:
    owner = Owner()
    async with linked(server.url, owner):
        session = await server.welcome()
        server.sessions.send(Drain("first"), session)
        server.sessions.close(session)
        assert [await owner.heard.get() for _ in range(2)] == [WELCOME, Drain("first")]
        assert await owner.ended.get() == "closed by the coordinator"
        while not isinstance(event := await server.events.get(), PeerConnected):
            pass
        assert event.session == session + 1


async def test_a_peer_finds_a_restarted_coordinator_again() -> None:
    server, owner = Coordinator(), Owner()
    async with server.serving():
        link = linked(server.url, owner)
        await link.__aenter__()
        await server.welcome()
        assert await owner.heard.get() == WELCOME
    assert await owner.ended.get()
    server.events = asyncio.Queue()
    server.sessions = Sessions(RUN, known_peer=known_peer, emit=server.events.put)
    async with server.serving():
        await server.welcome()
        assert await owner.heard.get() == WELCOME
        await link.__aexit__(None, None, None)


async def run_to_its_end(url: str, identity: Identity = IDENTITY) -> str:
    with pytest.raises(OperatorFault) as caught:
        await ControlLink(url, identity, Owner(), rng=random.Random(1)).run()
    return str(caught.value)


async def test_a_peer_that_is_not_enrolled_gets_the_reason_and_does_not_try_again(
    server: Coordinator,
) -> None:
    assert "not enrolled" in await run_to_its_end(server.url, replace(IDENTITY, key=STRANGER))


async def test_a_cordon_set_during_a_handshake_is_kept() -> None:
    cordoned = False

    def known(peer: PeerId) -> KnownPeer:
        return KnownPeer(peer, public_bytes(PEER), "worker", cordoned=cordoned)

    async with Coordinator(known).serving() as server, raw_socket(server) as socket:
        cordoned = True
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        connected = await server.events.get()
        assert isinstance(connected, PeerConnected)
        assert connected.cordoned


async def test_a_revoked_peer_gets_the_reason() -> None:
    def revoked(peer: PeerId) -> KnownPeer:
        raise Denied(403, "revoked", "token box was revoked")

    async with Coordinator(revoked).serving() as server:
        assert "(revoked): token box was revoked" in await run_to_its_end(server.url)


async def test_a_peer_does_not_answer_the_coordinator_of_another_run(server: Coordinator) -> None:
    stranger = public_bytes(STRANGER)
    assert "another run" in await run_to_its_end(server.url, replace(IDENTITY, run_key=stranger))


async def test_a_server_that_is_no_coordinator_is_reported(server: Coordinator) -> None:
    assert "not an echo2d coordinator" in await run_to_its_end(f"{server.url}/elsewhere")


async def test_a_permanent_refusal_after_the_hello_ends_the_link(server: Coordinator) -> None:
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(run_to_its_end(server.url))
        await server.welcome(Refused("protocol", "speak version 2", permanent=True))
    assert "speak version 2" in ended.result()


async def test_a_wrong_signature_is_refused(server: Coordinator) -> None:
    headers = {PEER_HEADER: peer_id_of(public_bytes(PEER)), NONCE_HEADER: "00" * 32}
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{server.url}/v1/worker", headers=headers) as socket,
    ):
        await socket.receive_bytes()
        await socket.send_bytes(ANSWER.encode(ChallengeAnswer(bytes(64))))
        refused = TO_PEER.decode(await socket.receive_bytes())
    assert refused == Refused("credential", "the signature is not this peer's", permanent=True)
    assert server.events.empty()


async def test_a_hello_without_a_nonce_is_refused(server: Coordinator) -> None:
    headers = {PEER_HEADER: peer_id_of(public_bytes(PEER)), NONCE_HEADER: "xyz"}
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{server.url}/v1/worker", headers=headers) as socket,
    ):
        assert TO_PEER.decode(await socket.receive_bytes()).reason == "protocol"


@pytest.mark.parametrize(
    ("first", "reason"),
    [(Heartbeat(0), "protocol"), (replace(HELLO, kind="seed"), "credential")],
)
async def test_a_first_message_that_is_not_this_peers_hello_is_refused(
    server: Coordinator, first: Hello | Heartbeat, reason: str
) -> None:
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(first))
        assert TO_PEER.decode(await socket.receive_bytes()).reason == reason
    assert server.events.empty()


async def test_a_silent_handshake_is_closed(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "HELLO_TIMEOUT_S", 0.05)
    async with raw_socket(server) as socket:
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_a_peer_that_goes_silent_is_closed(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "SILENCE_S_MAX", 0.2)
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        await server.events.get()
        assert await server.events.get() == PeerDisconnected(SessionId(0), "silent for 0.2 s")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xc1", "malformed"),
        (b"\x91\xa3Nix", "unknown message"),
        ("text", "binary"),
        (bytes((4 << 20) + 1), "1009"),
    ],
)
async def test_a_breach_of_the_protocol_is_reported_and_counted_and_closes_the_link(
    server: Coordinator, data: bytes | str, words: str
) -> None:
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        await server.events.get()
        with suppress(ConnectionError):
            await (socket.send_bytes(data) if isinstance(data, bytes) else socket.send_str(data))
        disconnected = await server.events.get()
        assert isinstance(disconnected, PeerDisconnected)
        assert disconnected.reason.startswith("protocol: ")
        message = await socket.receive()
    said = (
        str(TO_PEER.decode(message.data))
        if message.type is aiohttp.WSMsgType.BINARY
        else str(message.data)
    )
    assert words in said
    assert server.sessions.faults.total == 1


async def test_a_peer_that_breaks_the_protocol_again_and_again_is_refused_by_its_key(
    server: Coordinator,
) -> None:
    for _ in range(PROTOCOL_FAULTS_MAX):
        async with raw_socket(server) as socket:
            await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
            await server.events.get()
            await socket.send_bytes(b"\xc1")
            await server.events.get()
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        refused = TO_PEER.decode((await socket.receive()).data)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.permanent) == ("protocol", False)
    assert f"broke the protocol {PROTOCOL_FAULTS_MAX} times" in refused.detail
    [peer] = server.sessions.faults.refused(time.monotonic())
    assert peer.peer == IDENTITY.peer
    assert server.sessions.faults.refused_s(PeerId("another"), time.monotonic()) == 0.0


@pytest.mark.parametrize("ours", [True, False], ids=["this build", "another build"])
async def test_a_hello_that_cannot_be_read_counts_unless_it_is_of_another_build(
    server: Coordinator, *, ours: bool
) -> None:
    number = OURS.protocol + (0 if ours else 1)
    head = [[number, number, "0.9.1"], None, "worker", "gpu-7"]
    async with raw_socket(server) as socket:
        await socket.send_bytes(msgpack.packb(["Hello", *head, "fields of another build"]))
        refused = TO_PEER.decode((await socket.receive()).data)
    assert isinstance(refused, Refused)
    assert refused.reason == ("protocol" if ours else "build")
    assert server.sessions.faults.total == int(ours)


async def test_a_peer_of_another_build_learns_what_to_install_and_when_to_retry(
    server: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "echo2d.control")
    other = replace(HELLO, name="gpu-7", build=Build(OURS.protocol + 3, OURS.protocol + 1, "0.9.1"))
    for _ in range(2):
        async with raw_socket(server) as socket:
            await socket.send_bytes(TO_COORDINATOR.encode(other))
            refused = TO_PEER.decode((await socket.receive()).data)
        assert isinstance(refused, Refused)
        assert refused.detail == (
            f"this worker is echo2d 0.9.1 (control protocol {OURS.protocol + 3}); the coordinator is "
            f"echo2d {THIS_BUILD.name} (control protocol {OURS.protocol}): "
            f"install {to_install(THIS_BUILD, on_a_box=True)}"
        )
        assert not refused.permanent
        assert RETRY_S_MIN - 1.0 < refused.retry_s <= RETRY_S_MIN
    assert server.events.empty(), "the core hears nothing of it"
    assert caplog.text.count("reason=build") == 1, "it came twice"
    [seen] = server.sessions.other_builds.here(time.monotonic())
    assert (seen.peer, seen.name, seen.build) == (IDENTITY.peer, "gpu-7", other.build)


async def test_a_peer_that_is_upgraded_is_no_longer_named(server: Coordinator) -> None:
    for build in (Build(1, 1), OURS):
        async with raw_socket(server) as socket:
            await socket.send_bytes(TO_COORDINATOR.encode(replace(HELLO, build=build)))
            await socket.receive() if build is not OURS else await server.events.get()
    assert server.sessions.other_builds.here(time.monotonic()) == ()


async def test_both_ends_name_their_build(server: Coordinator) -> None:
    owner = Owner(replace(HELLO, build=OURS))
    async with linked(server.url, owner):
        connected = await server.events.get()
        assert isinstance(connected, PeerConnected)
        assert connected.hello.build == THIS_BUILD
        server.sessions.send(replace(WELCOME, build=OURS), connected.session)
        assert (await owner.hears(Welcome)).build == THIS_BUILD


async def test_a_link_that_opens_and_breaks_does_not_reset_the_backoff(
    server: Coordinator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that says what this build does not know is dialled ever more slowly."""
    caplog.set_level(logging.INFO, "echo2d.control")
    monkeypatch.setattr(backoff, "BACKOFF_S_MIN", 1e-3)
    async with linked(server.url, Owner()):
        for _ in range(5):
            session = await server.welcome()
            server.sessions._open[session].send_buffer.put(msgpack.packb(["Unknown"]))
            while not isinstance(await server.events.get(), PeerDisconnected):
                pass
    waits = [float(each) for each in re.findall(r"retry_s=([0-9.]+)", caplog.text)]
    assert waits[3] > 4 * waits[0]


async def test_the_link_to_a_peer_that_does_not_read_is_closed(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_buffer, "QUEUE_BYTES_MAX", 1000)
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        session = await server.welcome()
        server.sessions.send(Drain("x" * 2000), session)
        gone = await server.events.get()
        assert gone == PeerDisconnected(session, "slow: it does not read what it is sent")


async def test_the_link_to_a_peer_that_pings_and_does_not_read_is_closed_too(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator hangs in the answer to a ping; the session ends all the same."""
    monkeypatch.setattr(send_buffer, "SEND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(send_buffer, "CLOSE_TIMEOUT_S", 0.1)
    async with raw_socket(server) as socket:
        await socket.send_bytes(TO_COORDINATOR.encode(HELLO))
        session = await server.welcome()
        assert socket._conn is not None
        assert socket._conn.transport is not None
        socket._conn.transport.pause_reading()
        server.sessions.send(Drain("x" * (16 << 20)), session)
        for _ in range(1000):
            await socket.ping(b"x" * 125)
        async with asyncio.timeout(HANG_S):
            gone = await server.events.get()
        socket._conn.transport.resume_reading()
        assert gone == PeerDisconnected(session, "slow: it does not read what it is sent")


async def test_peers_beyond_the_limit_are_asked_to_come_later(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "SESSIONS_MAX", 0)
    headers = {PEER_HEADER: IDENTITY.peer, NONCE_HEADER: "00" * 32}
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{server.url}/v1/worker", headers=headers) as socket,
    ):
        assert TO_PEER.decode(await socket.receive_bytes()).reason == "busy"


def test_a_run_is_named_by_its_key() -> None:
    assert isinstance(IDENTITY.run_id, str)
    assert IDENTITY.run_id != RunId("")
