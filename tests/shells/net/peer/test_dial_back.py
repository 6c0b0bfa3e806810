"""Dialling a peer back over real sockets, and the uplink that owners allow."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import DialBack
from echo2d.core.protocol.control_messages import (
    Address,
    DialledBack,
    EdgeBroken,
    Heartbeat,
    VersionVerified,
)
from echo2d.core.protocol.peer_handshake import DIAL_BACK, SECRET_BYTES
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import (
    HANDSHAKE_BYTES_MAX,
    HEADER_BYTES,
    TYPE_OF,
    LinkEvent,
    LinkHello,
)
from echo2d.core.topology.uplink_pace import BURST_S, HEADERS
from echo2d.net.control.client import ControlLink
from echo2d.net.peer import dial_back as dial_back_module
from echo2d.net.peer.dial_back import dial_back
from echo2d.net.peer.links import PeerLinks
from echo2d.runtime.coordinator.main import core_machine
from tests.support import tls_peers
from tests.support.control_link import HELLO, Owner, enrolled
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.live_links import (
    ALICE,
    BOB,
    CAROL,
    HOST,
    Feeder,
    Peer,
    Taker,
    a_pair,
    listening,
    within,
)
from tests.support.peer import a_seed, a_worker, spread
from tests.support.peer_link import RUN, SECRET
from tests.support.scripted_core import make_config, serving

MINE, OTHERS = b"m" * SECRET_BYTES, b"o" * SECRET_BYTES


async def dialled(peer: PeerId, address: tuple[str, int], secret: bytes = MINE) -> str:
    return await dial_back(DialBack(SessionId(1), peer, Address(*address), secret), RUN, None)


async def test_a_dialled_peer_answers_and_its_links_stay_unchanged() -> None:
    async with a_pair() as (alice, bob):
        alice.links.expect(DIAL_BACK, MINE)
        for _ in range(3):
            assert await dialled(ALICE, alice.address) == ""
        assert (alice.events.empty(), bob.events.empty()) == (True, True)
        assert alice.links.can_send(BOB)


async def test_another_peers_port_does_not_answer_for_it() -> None:
    alice, bob = Peer(ALICE), Peer(BOB)
    alice.links.expect(DIAL_BACK, MINE)
    bob.links.expect(DIAL_BACK, OTHERS)
    async with listening(alice, bob):
        assert await dialled(ALICE, bob.address) != ""  # he is asked for Alice, whom he is not
        assert await dialled(BOB, bob.address) != ""  # he does not know the secret
        assert await dialled(CAROL, alice.address) != ""


async def test_a_dialled_port_without_a_listener_is_reported() -> None:
    alice = Peer(ALICE)
    async with listening(alice):
        address = alice.address
    assert "Connect call failed" in await dialled(ALICE, address)


@asynccontextmanager
async def saying(words: bytes) -> AsyncIterator[tuple[str, int]]:
    """A port that accepts, says this, and then nothing more."""

    over = asyncio.Event()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        over.set()

    async with await asyncio.start_server(accepted, HOST, 0) as server:
        address: tuple[str, int] = server.sockets[0].getsockname()
        yield address
        await within(over.wait())


async def test_a_port_that_sends_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back_module, "DIAL_BACK_S", 0.1)
    async with saying(b"") as address:
        assert await dialled(ALICE, address) == f"{HOST}:{address[1]}: no answer"


async def test_a_port_that_sends_a_wrong_answer_is_not_believed() -> None:
    async with saying(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9) as address:
        assert await dialled(ALICE, address) != ""


HELLO_OF_ITS_SIZE = bytes.fromhex("01000000 00000000 00000000 00040000")  # of HANDSHAKE_BYTES_MAX


@pytest.mark.parametrize(
    "words",
    [
        bytes([TYPE_OF[LinkHello]]) + b"\xff" * (8 << 20),
        HELLO_OF_ITS_SIZE + b"\x91" * (8 << 20),
        HELLO_OF_ITS_SIZE + b"\xdd\xff\xff\xff\xff" * (1 << 20),
    ],
    ids=["longer than is allowed", "nested", "lists of billions"],
)
async def test_a_port_that_sends_too_much_costs_little(
    words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    receive = PeerLink.bytes_received

    def counted(link: PeerLink, count: int) -> LinkEvent | None:
        parsed.append(count)
        return receive(link, count)

    monkeypatch.setattr(PeerLink, "bytes_received", counted)
    async with saying(words) as address:
        assert await dialled(ALICE, address) != ""
    assert 0 < sum(parsed) <= HEADER_BYTES + HANDSHAKE_BYTES_MAX


@pytest.mark.parametrize("tls", ["off", "on"])
async def test_a_coordinator_dials_back_each_peer_and_shows_the_result(
    tls: str, tmp_path: Path
) -> None:
    config = make_config(tmp_path, **{"coordinator.tls": tls})
    async with serving(config, core_machine) as opened, asyncio.TaskGroup() as tasks:
        identity = await enrolled(config.run.run_dir, opened.url)
        links = PeerLinks(
            run_id=identity.run_id, me=identity.peer, on_event=fail, on_ready=fail, tls=identity.tls
        )
        links.expect(DIAL_BACK, MINE)
        hello = replace(HELLO, listen=Address(*await links.listen(HOST, 0)), dial_back_secret=MINE)
        owner = Owner(hello)
        running = tasks.create_task(
            ControlLink(opened.url, identity, owner, rng=random.Random(1)).run()
        )
        assert await owner.hears(DialledBack) == DialledBack("")
        assert [worker["reachable"] for worker in opened.coordinator.status()["workers"]] == [True]
        running.cancel()
        await links.close("test over")


async def test_a_peer_dialled_under_tls_also_shows_its_certificate() -> None:
    coordinator = await asyncio.to_thread(tls_peers.RUN.coordinator)
    for tls, fault in (
        (tls_peers.ALICE_TLS, ""),
        (tls_peers.BOB_TLS, "certificate"),
        (None, "TLS"),
    ):
        links = PeerLinks(run_id=RUN, me=tls_peers.ALICE, on_event=fail, on_ready=fail, tls=tls)
        links.expect(DIAL_BACK, MINE)
        address = await links.listen(HOST, 0)
        order = DialBack(SessionId(1), tls_peers.ALICE, Address(*address), MINE)
        assert fault in await dial_back(order, RUN, coordinator)
        await links.close("test over")


def fail(*words: object) -> None:
    raise AssertionError(words)


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[CoordinatorDouble]:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        yield double


async def test_a_worker_answers_only_dials_to_itself_and_tells_its_owner_once(
    double: CoordinatorDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        a_worker(double, tmp_path / "one"),
        a_worker(double, tmp_path / "two", advertise="127.0.0.9:7"),
    ):
        names = await double.peers(2)
        one, two = (double.hellos[names[name]] for name in ("one", "two"))
        assert two.listen == Address("127.0.0.9", 7)
        assert one.listen is not None
        order = DialBack(SessionId(1), names["one"], one.listen, one.dial_back_secret)
        assert await dial_back(order, double.run.run_id, None) == ""
        for wrong in (
            replace(order, peer=names["two"], secret=two.dial_back_secret),
            replace(order, address=two.listen),
        ):
            assert await dial_back(wrong, double.run.run_id, None) != ""
        for _ in range(2):
            double.send(names["two"], DialledBack("127.0.0.9:7: no answer"))
        heartbeats = len(double.said(Heartbeat, names["two"]))
        await double.until_said(Heartbeat, names["two"], count=heartbeats + 2)
    lines = [line for line in caplog.messages if line.startswith("others cannot dial this peer")]
    assert len(lines) == 1
    assert lines[0].endswith("127.0.0.9:7: no answer")


async def test_a_peer_that_only_receives_sends_nothing_under_any_plan(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"receive_only": True, "uplink_limit": "100mbit"}
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one", **options),
        a_worker(double, tmp_path / "two"),
    ):
        names = await double.peers(3)
        hello = double.hellos[names["one"]]
        assert (hello.receive_only, hello.uplink_limit) == (True, 12_500_000)
        await spread(double, 0, names["seed"], names["one"], names["two"])
        await double.until_said(VersionVerified, names["one"])
        broken = await double.until_said(EdgeBroken, names["two"])
        assert (broken.peer, broken.reason) == (names["one"], "receives only")
        assert not double.said(VersionVerified, names["two"])


async def test_all_links_together_send_no_more_than_the_owner_allows() -> None:
    rate, payloads = 4e6, [bytes(64 << 10)] * 16
    alice, bob, carol = Peer(ALICE), Peer(BOB, ALICE), Peer(CAROL, ALICE)
    links: dict[PeerId, Feeder] = {}

    def ready(peer: PeerId) -> None:
        links[peer].pump()

    alice.links = PeerLinks(
        run_id=RUN, me=ALICE, on_event=alice._on_event, on_ready=ready, uplink_limit=rate
    )
    for other in (BOB, CAROL):
        alice.links.expect(other, SECRET)
        links[other] = Feeder(alice, other, payloads)
    alice.react = lambda peer, event: links[peer].on_event(peer, event)
    takers = [Taker(child, ALICE, len(payloads)) for child in (bob, carol)]
    async with listening(alice, bob, carol):
        began_at = time.monotonic()
        for child in (bob, carol):
            await child.links.dial(ALICE, *alice.address)
        for taker in takers:
            await within(taker.done.wait())
        took_s = time.monotonic() - began_at
    sent = HEADERS * 2 * sum(map(len, payloads))
    assert took_s >= (sent - 2 * HEADERS * len(payloads[0])) / rate - BURST_S
    assert [len(taker.digests) for taker in takers] == [len(payloads)] * 2
