"""Peers whose links run over real sockets on loopback, and programs that send frames over them."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import FrameId, PeerId
from echo2d.core.protocol.peer_messages import (
    FrameReceived,
    LinkEnded,
    LinkEvent,
    LinkOpened,
    StreamOpened,
)
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.auth import peer_id_of, public_bytes
from tests.support.peer_link import RUN, SECRET, STRIPE
from tests.support.polling import HANG_S
from tests.support.tls_peers import make_tls

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(4)]
KEY_OF = {peer_id_of(public_bytes(key)): key for key in KEYS}
ALICE, BROTHER, BOB, CAROL = sorted(KEY_OF)  # the smaller of two opens odd streams
TLS_OF = {peer: make_tls(key) for peer, key in KEY_OF.items()}
HOST = "127.0.0.1"
FRAME_BYTES = 256 << 10
E_ = TypeVar("E_", bound=LinkEvent)


class Peer:
    """PeerLinks whose events go to `react`; unless a test replaces it, they are queued."""

    with_tls = False

    def __init__(self, me: PeerId, *others: PeerId) -> None:
        self.links = PeerLinks(
            run_id=RUN,
            me=me,
            on_event=self._on_event,
            on_ready=lambda _: self.pump(),
            tls=TLS_OF[me] if self.with_tls else None,
        )
        self.events: asyncio.Queue[tuple[PeerId, LinkEvent]] = asyncio.Queue()
        self.react: Callable[[PeerId, LinkEvent], None] = lambda peer, event: (
            self.events.put_nowait((peer, event))
        )
        self.pump: Callable[[], None] = lambda: None
        self.address = (HOST, 0)
        for other in others:
            self.links.expect(other, SECRET)

    def _on_event(self, peer: PeerId, event: LinkEvent) -> None:
        self.react(peer, event)

    async def next(self, kind: type[E_]) -> E_:
        """The next event, which must be of this kind."""
        async with asyncio.timeout(HANG_S):
            _, event = await self.events.get()
        assert isinstance(event, kind), event
        return event


@asynccontextmanager
async def listening(*members: Peer) -> AsyncIterator[None]:
    for member in members:
        member.address = await member.links.listen(HOST, 0)
    try:
        yield
    finally:
        for member in members:
            await member.links.close("test over")


@asynccontextmanager
async def a_pair() -> AsyncIterator[tuple[Peer, Peer]]:
    """Alice and Bob with an open link; Bob has dialled."""
    alice, bob = Peer(ALICE, BOB), Peer(BOB, ALICE)
    async with listening(alice, bob):
        await bob.links.dial(ALICE, *alice.address)
        assert await bob.next(LinkOpened) == LinkOpened(ALICE)
        assert await alice.next(LinkOpened) == LinkOpened(BOB)
        yield alice, bob


async def within(awaitable: Awaitable[object]) -> None:
    async with asyncio.timeout(HANG_S):
        await awaitable


class Feeder:
    """Sends payloads down the stripe that its child opens, as fast as the link takes them."""

    def __init__(self, peer: Peer, child: PeerId, payloads: list[bytes]) -> None:
        self.links, self.child, self.payloads = peer.links, child, payloads
        self.stream, self.next = 0, 0
        self.asked = asyncio.Event()
        peer.react, peer.pump = self.on_event, self.pump

    def on_event(self, _: PeerId, event: LinkEvent) -> None:
        if isinstance(event, StreamOpened):
            self.stream, self.next = event.stream, event.from_sequence
            self.pump()
            self.asked.set()

    def pump(self) -> None:
        while self.next < len(self.payloads) and self.links.can_send(self.child):
            payload = memoryview(self.payloads[self.next])
            assert self.links.send_frame(
                self.child, self.stream, FrameId(self.next), self.next, payload
            )
            self.next += 1


class Taker:
    """Whenever its link opens, it takes the stripe from the next frame on, and passes it on to its child.

    `digests` has the hash of each frame.
    """

    def __init__(self, peer: Peer, parent: PeerId, count: int, child: PeerId | None = None) -> None:
        self.links, self.parent, self.count, self.child = peer.links, parent, count, child
        self.digests: list[bytes] = []
        self.queue: list[FrameReceived] = []
        self.stream = 0
        self.ended: str | None = None
        self.done = asyncio.Event()
        peer.react, peer.pump = self.on_event, self.pump

    def on_event(self, peer: PeerId, event: LinkEvent) -> None:
        match event:
            case LinkOpened() if peer == self.parent:
                self.links.tell(peer, StreamOpened(2, *STRIPE, len(self.digests)))
            case StreamOpened(stream):
                self.stream = stream
                self.pump()
            case FrameReceived(sequence=sequence, payload=payload):
                assert payload is not None
                assert sequence == len(self.digests)
                self.digests.append(blake3(payload).digest())
                self.queue.append(event)
                self.pump()
            case LinkEnded(reason):
                self.ended = reason
        if len(self.digests) == self.count or self.ended is not None:
            self.done.set()

    def pump(self) -> None:
        if self.child is None:
            self.queue.clear()
            return
        while self.queue and self.stream and self.links.can_send(self.child):
            frame = self.queue.pop(0)
            assert self.links.send_frame(
                self.child, self.stream, frame.frame, frame.sequence, frame.payload
            )


def random_payloads(count: int) -> tuple[list[bytes], list[bytes]]:
    """Payloads, all different, and their digests."""
    data = os.urandom(FRAME_BYTES)
    payloads = [number.to_bytes(4, "little") + data[number:] for number in range(count)]
    return payloads, [blake3(payload).digest() for payload in payloads]
