"""Peer links over real sockets: relays, both ends dialling, strangers, slow readers, connections that break."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import ModuleType

import pytest
import uvloop

from echo2d.core.base.ids import FrameId, PeerId
from echo2d.core.protocol.peer_messages import (
    FRAMES_MAX,
    FrameReceived,
    FramesHeld,
    FramesWanted,
    LinkEnded,
    LinkEvent,
    LinkOpened,
    StreamEnded,
    StreamOpened,
    runs_of,
)
from echo2d.errors import PeerFault
from echo2d.net.peer import connection as peer_connection
from echo2d.net.peer import links as peer_links
from echo2d.net.peer.connection import PeerConnection
from echo2d.net.peer.links import LINK_STRANGERS_PER_ADDRESS_MAX, REPLACED
from tests.support.live_links import (
    ALICE,
    BOB,
    BROTHER,
    CAROL,
    FRAME_BYTES,
    HOST,
    Feeder,
    Peer,
    Taker,
    a_pair,
    listening,
    random_payloads,
    within,
)
from tests.support.peer_link import FORM, STRIPE

# Of a frame: its own header, and those of its TLS records.
HEADERS_BYTES_MAX = 1024


async def test_frames_pass_through_a_relay_unchanged() -> None:
    payloads, digests = random_payloads(200)
    alice, bob, carol = Peer(ALICE, BOB), Peer(BOB, ALICE, CAROL), Peer(CAROL, BOB)
    Feeder(alice, BOB, payloads)
    relay, leaf = Taker(bob, ALICE, 200, child=CAROL), Taker(carol, BOB, 200)
    async with listening(alice, bob, carol):
        await bob.links.dial(
            ALICE, *alice.address
        )  # a child dials its parent, and a parent its child
        await bob.links.dial(CAROL, *carol.address)
        await within(leaf.done.wait())
    assert leaf.digests == relay.digests == digests


async def test_every_kind_of_message_arrives() -> None:
    async with a_pair() as (alice, bob):
        frames = (FrameId(1), FrameId(2))
        bob.links.tell(ALICE, FramesWanted(2, FORM, frames))
        assert await alice.next(FramesWanted) == FramesWanted(2, FORM, frames)
        assert alice.links.send_frame(BOB, 2, FrameId(2), 0, None)
        assert await bob.next(FrameReceived) == FrameReceived(2, FORM, FrameId(2), 0, None)
        bob.links.tell(ALICE, StreamEnded(2, "enough"))
        assert await alice.next(StreamEnded) == StreamEnded(2, "enough")
        assert not alice.links.send_frame(BOB, 2, FrameId(1), 0, None)
        alice.links.tell(BOB, FramesHeld(FORM, runs_of(frames)))
        assert (await bob.next(FramesHeld)).frames() == frames


async def test_small_messages_arrive_at_once_even_after_much_data() -> None:
    payloads, digests = random_payloads(2 + peer_connection.WARM_BYTES // FRAME_BYTES)
    alice, bob = Peer(ALICE, BOB), Peer(BOB, ALICE)
    Feeder(alice, BOB, payloads)
    taker = Taker(bob, ALICE, len(payloads))
    async with listening(alice, bob):
        await bob.links.dial(ALICE, *alice.address)
        await within(taker.done.wait())
        assert taker.digests == digests
        bob.react = lambda peer, event: bob.events.put_nowait((peer, event))
        for frame in (FrameId(1), FrameId(2)):
            alice.links.tell(BOB, FramesHeld(FORM, runs_of((frame,))))
            assert (await bob.next(FramesHeld)).frames() == (frame,)


def opened_less_ended(peer: Peer) -> int:
    events = [peer.events.get_nowait()[1] for _ in range(peer.events.qsize())]
    return sum(isinstance(event, LinkOpened) - isinstance(event, LinkEnded) for event in events)


async def test_two_peers_may_dial_each_other_at_once_and_one_link_stays() -> None:
    alice, bob = Peer(ALICE, BOB), Peer(BOB, ALICE)
    async with listening(alice, bob):
        heard = asyncio.Event()

        def react(peer: PeerId, event: LinkEvent) -> None:
            bob.events.put_nowait((peer, event))
            if isinstance(event, FramesHeld):
                heard.set()

        bob.react = react
        await asyncio.gather(
            bob.links.dial(ALICE, *alice.address), alice.links.dial(BOB, *bob.address)
        )
        alice.links.tell(BOB, FramesHeld(FORM, runs_of([FrameId(1)])))
        await within(heard.wait())
        assert alice.links._live[BOB].dialled
        assert not bob.links._live[ALICE].dialled
        assert opened_less_ended(alice) == opened_less_ended(bob) == 1


async def test_a_settled_link_gives_way_to_a_peer_that_dials_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_pair() as (alice, bob):
        bob.links._live.clear()  # as after a power cut that Alice has not noticed
        await bob.links.dial(ALICE, *alice.address)
        assert await alice.next(LinkEnded) == LinkEnded(REPLACED)
        assert await alice.next(LinkOpened) == LinkOpened(BOB)
    async with a_pair() as (alice, bob):
        alice.links._live.clear()
        monkeypatch.setattr(peer_links, "SETTLED_S", -1.0)
        await alice.links.dial(BOB, *bob.address)
        assert await bob.next(LinkEnded) == LinkEnded(REPLACED)


async def test_dialling_a_linked_peer_does_nothing() -> None:
    async with a_pair() as (alice, bob):
        await bob.links.dial(ALICE, HOST, 1)
        assert alice.events.empty()


async def test_a_wrong_secret_opens_nothing() -> None:
    alice, bob = Peer(ALICE), Peer(BOB, ALICE)
    alice.links.expect(BOB, b"x" * 32)
    async with listening(alice):
        with pytest.raises(PeerFault, match="wrong proof"):
            await bob.links.dial(ALICE, *alice.address)
        assert alice.events.empty()
        assert bob.events.empty()


async def test_a_refusal_says_why() -> None:
    alice, bob = Peer(ALICE, CAROL), Peer(BOB, ALICE)
    async with listening(alice):
        with pytest.raises(PeerFault, match="no link with that peer is expected"):
            await bob.links.dial(ALICE, *alice.address)


async def test_a_peer_that_cannot_be_reached_is_a_peer_fault() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerFault, match=f"cannot reach {HOST}:{port}"):
        await Peer(BOB, ALICE).links.dial(ALICE, HOST, port)


@pytest.mark.parametrize(
    ("host", "port"), [("x" * 300, 1), ("...", 1), ("a\0b", 1), (HOST, 70000), (HOST, 10**18)]
)
def test_an_impossible_address_is_a_fault_of_the_peer(host: str, port: int) -> None:
    """A peer says where it listens; whoever is to dial it lives on."""

    async def dial() -> None:
        with pytest.raises(PeerFault, match="cannot reach"):
            await Peer(BOB, ALICE).links.dial(ALICE, host, port)

    asyncio.run(dial())
    uvloop.run(dial())


async def test_a_peer_that_accepts_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_links, "HANDSHAKE_S", 0.05)
    with socket.create_server((HOST, 0)) as listener, pytest.raises(PeerFault, match="no answer"):
        await Peer(BOB, ALICE).links.dial(ALICE, HOST, listener.getsockname()[1])


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" * 4, bytes(64)]
)
async def test_a_stranger_that_sends_noise_is_cut_off_at_once(noise: bytes) -> None:
    alice = Peer(ALICE, BOB)
    async with listening(alice):
        await be_cut_off(alice, noise)
        assert alice.events.empty()


async def be_cut_off(peer: Peer, noise: bytes = b"") -> None:
    """A stranger who connects, says this, and waits until the peer has closed."""
    reader, writer = await asyncio.open_connection(*peer.address)
    writer.write(noise)
    await within(at_end(reader))
    writer.close()


async def at_end(reader: asyncio.StreamReader) -> None:
    """Returns when the other end has closed."""
    try:
        await reader.read()
    except ConnectionResetError:
        return


async def test_a_stranger_that_sends_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "HANDSHAKE_S", 0.05)
    alice = Peer(ALICE, BOB)
    async with listening(alice):
        await be_cut_off(alice)


async def test_the_oldest_of_too_many_strangers_is_cut_off() -> None:
    alice, bob = Peer(ALICE, BOB), Peer(BOB, ALICE)
    async with listening(alice):
        strangers = [
            await asyncio.open_connection(*alice.address)
            for _ in range(LINK_STRANGERS_PER_ADDRESS_MAX)
        ]
        await bob.links.dial(ALICE, *alice.address)
        await within(at_end(strangers[0][0]))
        assert len(alice.links._connections) <= LINK_STRANGERS_PER_ADDRESS_MAX + 1
        assert len(alice.links._admission) <= LINK_STRANGERS_PER_ADDRESS_MAX
        for _, writer in strangers:
            writer.close()
        await bob.links.close("enough")


async def test_a_reader_that_pauses_stops_its_sender_in_bounded_memory() -> None:
    payloads, digests = random_payloads(200)
    async with a_pair() as (alice, bob):
        feeder, taker = Feeder(alice, BOB, payloads), Taker(bob, ALICE, 200)
        bob.links.tell(ALICE, StreamOpened(2, *STRIPE, 0))
        bob.links.pause(ALICE)
        await within(feeder.asked.wait())  # and what the link takes is sent
        sent = feeder.next
        connection = alice.links._live[BOB]
        assert sent < 200
        assert not taker.digests
        assert connection.transport is not None
        unsent = connection.transport.get_write_buffer_size()
        assert unsent <= FRAME_BYTES + HEADERS_BYTES_MAX
        assert not alice.links.send_frame(BOB, 2, FrameId(sent), sent, memoryview(payloads[sent]))
        bob.links.resume(ALICE)
        await within(taker.done.wait())
    assert taker.digests == digests


async def test_a_link_that_breaks_in_a_frame_is_resumed_by_sequence() -> None:
    payloads, digests = random_payloads(100)
    async with a_pair() as (alice, bob):
        Feeder(alice, BOB, payloads)
        taker = Taker(bob, ALICE, 100)
        take = bob.react

        def cut_at_twenty(peer: PeerId, event: LinkEvent) -> None:
            take(peer, event)
            if len(taker.digests) == 20:
                transport = alice.links._live[BOB].transport
                assert transport is not None
                transport.abort()
                bob.react = take

        bob.react = cut_at_twenty
        bob.links.tell(ALICE, StreamOpened(2, *STRIPE, 0))
        await within(taker.done.wait())
        assert taker.ended is not None
        assert taker.ended.startswith("connection lost")
        held = len(taker.digests)
        assert 20 <= held < 100
        taker.ended = None
        taker.done.clear()
        await bob.links.dial(ALICE, *alice.address)
        await within(taker.done.wait())
    assert taker.digests == digests


async def test_a_peer_that_breaks_the_protocol_reads_why() -> None:
    async with a_pair() as (alice, bob):
        connection = bob.links._live[ALICE]
        connection.write(bytes(16))
        assert (
            (await alice.next(LinkEnded)).reason
            == (await bob.next(LinkEnded)).reason
            == "unknown message type 0"
        )


async def test_a_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "UNSENT_BYTES_MAX", 64 << 10)
    scattered = [FrameId(2 * number) for number in range(FRAMES_MAX)]
    async with a_pair() as (alice, bob):
        bob.links.pause(ALICE)
        while alice.events.empty():
            alice.links.tell(BOB, FramesHeld(FORM, runs_of(scattered)))
        assert await alice.next(LinkEnded) == LinkEnded("does not read")


async def test_a_peer_that_never_confirms_ended_streams_is_dropped() -> None:
    async with a_pair() as (alice, bob):
        bob.links.pause(ALICE)
        alice.links.pause(BOB)
        for number in range(1000):
            bob.links.tell(ALICE, StreamOpened(2 + 2 * number, *STRIPE, 0))
            bob.links.tell(ALICE, StreamEnded(2 + 2 * number, "changed"))
            if not bob.events.empty():
                break
        assert "not confirmed" in (await bob.next(LinkEnded)).reason


async def test_forgetting_a_peer_ends_its_link_for_good() -> None:
    async with a_pair() as (alice, bob):
        alice.links.forget(BOB)
        assert (
            await alice.next(LinkEnded)
            == await bob.next(LinkEnded)
            == LinkEnded("no longer expected")
        )
        assert not alice.links.can_send(BOB)
        with pytest.raises(PeerFault):
            await bob.links.dial(ALICE, *alice.address)


async def test_the_kernel_gets_the_limit_of_silence() -> None:
    async with a_pair() as (alice, _):
        connection = alice.links._live[BOB]
        assert connection.transport is not None
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert (
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            == peer_connection.LINK_SILENCE_S * 1000
        )


async def test_closing_tells_every_peer_and_leaves_nothing_open() -> None:
    alice, bob, brother = Peer(ALICE, BOB, BROTHER), Peer(BOB, ALICE), Peer(BROTHER, ALICE)
    async with listening(alice, bob, brother):
        await be_cut_off(alice, bytes(16))
        assert not alice.links._connections
        for peer in (bob, brother):
            await peer.links.dial(ALICE, *alice.address)
            await peer.next(LinkOpened)
        await alice.links.close("bye")
        for peer in (bob, brother):
            assert await peer.next(LinkEnded) == LinkEnded("bye")
        assert not alice.links._connections
        with pytest.raises(PeerFault, match="cannot reach"):
            await bob.links.dial(ALICE, *alice.address)


async def test_a_dial_that_is_given_up_while_connecting_leaves_nothing() -> None:
    alice, bob = Peer(ALICE, BOB), Peer(BOB, ALICE)
    made = bob.links.made

    def give_up(connection: PeerConnection) -> None:
        made(connection)
        dialling.cancel()

    bob.links.made = give_up  # type: ignore[method-assign]
    async with listening(alice):
        dialling = asyncio.create_task(bob.links.dial(ALICE, *alice.address))
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await within(bob.links.close("test over"))


SCENARIOS = [
    test_frames_pass_through_a_relay_unchanged,
    test_every_kind_of_message_arrives,
    test_small_messages_arrive_at_once_even_after_much_data,
    test_two_peers_may_dial_each_other_at_once_and_one_link_stays,
    test_a_wrong_secret_opens_nothing,
    test_a_peer_that_cannot_be_reached_is_a_peer_fault,
    test_a_reader_that_pauses_stops_its_sender_in_bounded_memory,
    test_a_link_that_breaks_in_a_frame_is_resumed_by_sequence,
    test_a_peer_that_breaks_the_protocol_reads_why,
    test_a_peer_that_never_confirms_ended_streams_is_dropped,
    test_the_kernel_gets_the_limit_of_silence,
    test_closing_tells_every_peer_and_leaves_nothing_open,
    test_a_dial_that_is_given_up_while_connecting_leaves_nothing,
]
WAYS = [(uvloop, True), (asyncio, True), (uvloop, False)]  # and (asyncio, False) above
ALL = [(scenario, *way) for scenario in SCENARIOS for way in WAYS]


@pytest.mark.parametrize(
    ("scenario", "loop", "with_tls"),
    [*ALL, *((test_the_oldest_of_too_many_strangers_is_cut_off, *way) for way in WAYS)],
)
def test_scenarios_run_on_every_loop_with_and_without_tls(
    scenario: Callable[[], Coroutine[None, None, None]],
    loop: ModuleType,
    with_tls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Peer, "with_tls", with_tls)
    loop.run(scenario())
