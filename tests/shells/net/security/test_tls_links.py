"""A run with TLS on loopback, and peers that try to get in."""

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from echo2d.client import AsyncCoordinator
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.control_messages import (
    RefitDone,
    VersionVerified,
)
from echo2d.core.protocol.peer_messages import LinkEnded, LinkEvent, LinkOpened
from echo2d.errors import OperatorFault, PeerFault
from echo2d.net.control import client as control_client
from echo2d.net.control.client import ControlLink, Identity, enrol
from echo2d.net.peer import links as peer_links
from echo2d.net.peer.connection import PeerConnection
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.auth import TokenFile, public_bytes
from echo2d.net.security.tls import GIVEN_UP, Tls
from echo2d.net.security.urls import CoordinatorUrls
from echo2d.runtime.coordinator import access_watch
from echo2d.runtime.coordinator.main import Opened, core_machine, open_coordinator
from echo2d.runtime.run_dir.tokens import revoke_token
from echo2d_lab.standins.snapshots import write_model
from tests.support.control_link import Owner, worker_token
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.free_port import free_port
from tests.support.peer import a_seed, a_worker, spread
from tests.support.peer_link import RUN as RUN_ID
from tests.support.peer_link import SECRET
from tests.support.polling import HANG_S
from tests.support.tls_peers import (
    ALICE,
    ALICE_TLS,
    BARE_TLS,
    BOB,
    BOB_KEY,
    BOB_TLS,
    CAROL_KEY,
    CAROL_TLS,
    FOREIGN_TLS,
    OTHER_RUN,
)

HOST = "127.0.0.1"


async def test_a_version_is_sent_over_tls_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enrolment, sessions, and a broadcast from the seed over one worker to the other."""
    caplog.set_level(logging.INFO)
    plain: list[LinkEvent] = []
    received = PeerLinks.received

    def noticed(links: PeerLinks, connection: PeerConnection, event: LinkEvent) -> None:
        if connection.link._seal is None or connection.certificate is None:
            plain.append(event)
        received(links, connection, event)

    monkeypatch.setattr(PeerLinks, "received", noticed)
    async with (
        CoordinatorDouble.serving(tmp_path / "run", tls=True) as double,
        a_seed(double),
        a_worker(double, tmp_path / "one"),
        a_worker(double, tmp_path / "two"),
    ):
        assert double.url.startswith("https://")
        names = await double.peers(3)
        facts, digest = await spread(double, 0, names["seed"], names["one"], names["two"])
        for name in ("one", "two"):
            done = await double.until_said(RefitDone, names[name])
            assert (done.version, done.digest) == (0, digest)
            assert double.said(VersionVerified, names[name]) == [
                VersionVerified(facts.form, facts.version, digest)
            ]
    assert plain == []
    assert sum(message.startswith("link_opened ") for message in caplog.messages) == 4


# --- a real coordinator ---------------------------------------------------------------------------------------------


def config_of(tmp_path: Path, **keys: str) -> CoordinatorConfig:
    document = {
        "run": {"run_dir": str(tmp_path / "run"), "snapshot_root": str(tmp_path / "out")},
        "coordinator": {"port": 0, **keys},
        # Bound on loopback, and taken for an address that others reach, as every name is.
        "link": {"host": "127.1" if "host" in keys else ""},
        "sampling": {"vocab_size": 17},
        "task": {"kind": "sort_digits", "processes": 1},
    }
    return CoordinatorConfig.read(document)


@pytest.mark.parametrize(
    ("keys", "scheme"),
    [
        ({}, "http"),
        ({"tls": "on"}, "https"),
        ({"host": "0.0.0.0"}, "https"),
        ({"host": "0.0.0.0", "tls": "off"}, "http"),
    ],
)
async def test_tls_is_on_off_loopback_unless_it_is_switched_off(
    keys: dict[str, str], scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_coordinator(config_of(tmp_path, **keys), make_machine=core_machine) as opened:
        assert opened.url.startswith(f"{scheme}://127.0.0.1:")
    given_up = [message for message in caplog.messages if message.endswith(GIVEN_UP)]
    assert len(given_up) == ("off" in keys.values())


@pytest.fixture
async def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opened]:
    monkeypatch.setattr(access_watch, "ACCESS_RELOAD_S", 0.05)
    async with (
        open_coordinator(config_of(tmp_path, tls="on"), make_machine=core_machine) as opened,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(opened.coordinator.serve())
        yield opened
        opened.coordinator.stop("the test ends")


@pytest.fixture
async def token(opened: Opened, tmp_path: Path) -> TokenFile:
    return await asyncio.to_thread(worker_token, tmp_path / "run", opened.url)


async def refusal(meeting: Awaitable[object]) -> str:
    """The one line that it ends with."""
    with pytest.raises((OperatorFault, PeerFault)) as caught:
        async with asyncio.timeout(HANG_S):
            await meeting
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_learner_and_a_worker_are_served_but_a_revoked_worker_is_not(
    opened: Opened, token: TokenFile, tmp_path: Path
) -> None:
    assert opened.url.startswith("https://")
    snapshot = tmp_path / "out" / "0"
    await asyncio.to_thread(write_model, snapshot, [bytes(4000)])
    async with AsyncCoordinator(
        opened.url, token_file=tmp_path / "run" / "tokens" / "learner.token"
    ) as learner:
        await learner.open_session(0)
        assert (await learner.publish(0, snapshot)).version == 0
    identity = Identity.of(opened.url, token, CAROL_KEY)
    await enrol(opened.url, token, identity, rng=random.Random(1), patience_s=1.0)
    owner = Owner()
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(
            refusal(ControlLink(opened.url, identity, owner, rng=random.Random(1)).run())
        )
        await owner.heard.get()
        await asyncio.to_thread(revoke_token, tmp_path / "run", "box")
        assert "revoked" in await ending
    again = ControlLink(opened.url, identity, Owner(), rng=random.Random(1))
    assert "revoked" in await refusal(again.run()), "its certificate is still one of this run"


async def test_a_coordinator_that_has_moved_is_found_at_another_url_of_the_token(
    opened: Opened, token: TokenFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dead = f"https://127.0.0.1:{free_port()}"
    urls = f"{dead},{opened.url}"
    identity = Identity.of(urls, token, CAROL_KEY)
    await enrol(urls, token, identity, rng=random.Random(1), patience_s=HANG_S)
    owner = Owner()
    link = ControlLink(urls, identity, owner, rng=random.Random(1))
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        await owner.heard.get()
        link.leave()
    assert sum(f"unreachable url={dead}" in each for each in caplog.messages) == 1
    assert not [each for each in caplog.messages if "no coordinator answers" in each]
    assert sum(f"disconnected url={dead}" in each for each in caplog.messages) == 1
    file = tmp_path / "run" / "tokens" / "learner.token"
    async with AsyncCoordinator(urls, token_file=file) as learner:
        await learner.open_session(0)
    with pytest.raises(OperatorFault, match="expected https:// in all of these URLs, or in none"):
        CoordinatorUrls(f"http://10.0.0.1:1,{urls}")


async def test_a_control_link_needs_its_peers_certificate(opened: Opened, token: TokenFile) -> None:
    for key in (CAROL_KEY, None):
        mine = Identity.of(opened.url, token, BOB_KEY)
        await enrol(opened.url, token, mine, rng=random.Random(1), patience_s=1.0)
        tls = Tls(token.authority)
        if key is not None:  # of a peer too, but of another one
            await asyncio.to_thread(
                tls.present, key, opened.coordinator._run.authority.certify_peer(public_bytes(key))
            )
        link = ControlLink(
            opened.url, Identity(BOB_KEY, mine.run_key, tls), Owner(), rng=random.Random(1)
        )
        assert "does not show the peer's certificate" in await refusal(link.run())


async def test_a_peer_that_dials_the_wrong_coordinator_gets_one_line(
    opened: Opened, token: TokenFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stranger = TokenFile(
        "box", "worker", token.secret, token.run_key, authority=OTHER_RUN.certificate
    )
    for url, given, words in [
        (opened.url, stranger, "its certificate is not for the expected member in this run"),
        (
            opened.url.replace("https:", "http:"),
            replace(token, url=""),
            "if it speaks TLS, its URL is https://",
        ),
    ]:
        identity = Identity.of(url, given, BOB_KEY)
        assert words in await refusal(
            enrol(url, given, identity, rng=random.Random(1), patience_s=0.0)
        )
    assert "handshake refused: it speaks HTTP without TLS" in caplog.messages
    async with CoordinatorDouble.serving(tmp_path / "plain") as double:
        url = double.url.replace("http:", "https:")
        identity = Identity.of(url, token, BOB_KEY)
        assert "does not speak TLS" in await refusal(
            enrol(url, token, identity, rng=random.Random(1), patience_s=9.0)
        )
        link = ControlLink(url, identity, Owner(), rng=random.Random(1))
        async with aiohttp.ClientSession() as http:
            with pytest.raises(
                control_client._Lost, match="does not speak TLS"
            ):  # it may have been said by anybody
                await link._once(http)
        async with AsyncCoordinator(
            url, token_file=tmp_path / "run" / "tokens" / "learner.token"
        ) as learner:
            assert "does not speak TLS" in await refusal(learner.open_session(0))


async def test_a_port_without_http_is_reported_at_once(token: TokenFile) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x03\x00unknown message type 80\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, HOST, 0) as links:
        url = f"http://{HOST}:{links.sockets[0].getsockname()[1]}"
        given = replace(token, url="")
        identity = Identity.of(url, given, BOB_KEY)
        said = await refusal(enrol(url, given, identity, rng=random.Random(1), patience_s=HANG_S))
    assert "does not speak HTTP" in said


async def test_a_certificate_of_another_run_is_refused_at_once(
    opened: Opened, caplog: pytest.LogCaptureFixture, token: TokenFile
) -> None:
    caplog.set_level(logging.INFO)
    tls = Tls(token.authority)
    await asyncio.to_thread(tls.present, BOB_KEY, OTHER_RUN.certify_peer(public_bytes(BOB_KEY)))
    link = ControlLink(opened.url, Identity(BOB_KEY, bytes(32), tls), Owner(), rng=random.Random(1))
    async with aiohttp.ClientSession() as http, asyncio.timeout(HANG_S):
        with pytest.raises(control_client._Lost):
            await link._once(http)
    assert any(
        "handshake refused: its certificate is not" in message for message in caplog.messages
    )


# --- peer links -----------------------------------------------------------------------------------------------------


def links(
    me: PeerId, other: PeerId, tls: Tls | None, opened: Callable[[LinkEvent], None] = lambda _: None
) -> PeerLinks:
    found = PeerLinks(
        run_id=RUN_ID,
        me=me,
        on_event=lambda _, event: opened(event),
        on_ready=lambda _: None,
        tls=tls,
    )
    found.expect(other, SECRET)
    return found


@pytest.mark.parametrize(
    ("alice_tls", "bob_tls", "words", "logged"),
    [
        (
            ALICE_TLS,
            BARE_TLS,
            "it wants a certificate, and this end shows none",
            "handshake refused: it shows no certificate",
        ),
        (
            ALICE_TLS,
            FOREIGN_TLS,
            "it does not trust this end's certificate",
            "handshake refused: its certificate is not",
        ),
        (CAROL_TLS, BOB_TLS, "its certificate is not for the expected member in this run", ""),
        (ALICE_TLS, None, "connection lost", "handshake refused: it does not speak TLS"),
        (None, BOB_TLS, "it does not speak TLS", ""),
    ],
    ids=["no certificate", "another run's", "another peer's", "plain", "to plain"],
)
async def test_a_peer_outside_the_edge_opens_no_link(
    alice_tls: Tls | None,
    bob_tls: Tls | None,
    words: str,
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bob knows the secret and dials Alice."""
    caplog.set_level(logging.INFO)
    events: list[LinkEvent] = []
    alice, bob = (
        links(ALICE, BOB, alice_tls, events.append),
        links(BOB, ALICE, bob_tls, events.append),
    )
    address = await alice.listen(HOST, 0)
    try:
        assert words in await refusal(bob.dial(ALICE, *address))
        assert events == []
        assert any(message.startswith(logged) for message in caplog.messages) or not logged
    finally:
        await close(alice, bob)


async def test_a_peer_under_the_name_of_another_one_opens_no_link() -> None:
    """Carol has the secret of Alice and Bob, and no certificate but her own."""
    at_alice: list[LinkEvent] = []
    at_carol: asyncio.Queue[LinkEvent] = asyncio.Queue()
    alice, carol = (
        links(ALICE, BOB, ALICE_TLS, at_alice.append),
        links(BOB, ALICE, CAROL_TLS, at_carol.put_nowait),
    )
    try:
        await carol.dial(ALICE, *await alice.listen(HOST, 0))
        async with asyncio.timeout(HANG_S):
            assert await at_carol.get() == LinkOpened(ALICE)
            assert await at_carol.get() == LinkEnded("the certificate is not that of the peer")
        assert at_alice == []
    finally:
        await close(alice, carol)


async def test_a_silent_peer_does_not_block_the_peer_that_dials_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_links, "HANDSHAKE_S", 0.05)
    alice, bob = links(ALICE, BOB, ALICE_TLS), links(BOB, ALICE, BOB_TLS)
    with socket.create_server((HOST, 0)) as silent:
        assert "no answer" in await refusal(bob.dial(ALICE, HOST, silent.getsockname()[1]))
    try:
        reader, writer = await asyncio.open_connection(*await alice.listen(HOST, 0))
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b""
        writer.close()
    finally:
        await close(alice, bob)


async def close(*ends: PeerLinks) -> None:
    async with asyncio.timeout(HANG_S):
        for end in ends:
            await end.close("test over")
