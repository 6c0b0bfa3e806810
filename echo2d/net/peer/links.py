"""Keeps peer links over TCP: it listens, dials, and has at most one live link to each peer.

Not here: the protocol (`core/protocol/peer_link.py`), and all decisions (which peers to expect or
dial, what to send, when to retry).

The loop calls `on_event(peer, event)` in the order of arrival: LinkOpened, the messages of that
link, then exactly one LinkEnded, whichever end closed it (also from within `end`, `forget` and
`close`). It calls `on_ready(peer)` when a link that had no room for a frame has room again. Both
callbacks must return quickly, because they run between two reads of a socket.

Two ends may dial each other at once. Then the link dialled by the smaller peer id stays, and the
other link ends with REPLACED. A link older than SETTLED_S gives way to any new link: the other end
dials only if it has no link, so the old link must be dead.

Messages go to the link that is live when they are sent. Stream numbers start again with each link,
so a caller that queues events must send nothing to a peer while a LinkEnded of that peer is queued.

Works on asyncio and on uvloop, which sends memoryviews without copying. Memory per live link: at most
UNSENT_BYTES_MAX to send, and one arriving payload with AHEAD_BYTES_MAX. Payloads handed over belong to
the receiver, which calls `pause` in time.
"""

import asyncio
import logging
import secrets as chance
from collections.abc import Callable

from echo2d.core.base.ids import FrameId, PeerId, RunId
from echo2d.core.protocol.peer_handshake import NONCE_BYTES, SECRET_BYTES
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import (
    LinkEnded,
    LinkEvent,
    LinkOpened,
    RelayMessage,
    StreamId,
)
from echo2d.errors import PeerFault
from echo2d.net.http.admission import ConnectionAdmission, StrangerLimits, address_of
from echo2d.net.peer.connection import PeerConnection
from echo2d.net.peer.tcp_info import TcpInfo
from echo2d.net.peer.uplink_limit import UplinkLimit
from echo2d.net.security.sealing import KeyExchange
from echo2d.net.security.tls import Tls, belongs_to, in_words

# The time from dialling to LinkOpened: three or four round trips, even if a full queue makes one take 5 s.
HANDSHAKE_S = 20.0
# At most this many accepted connections may not have proved their peer yet, TLS handshakes included. One
# more closes the oldest one of its own address if that address has too many, otherwise the oldest of all.
LINK_STRANGERS_MAX = 128
LINK_STRANGERS_PER_ADDRESS_MAX = 64
# Any dial that began before the link opened has ended by then.
SETTLED_S = 2 * HANDSHAKE_S
REPLACED = "another link of these two peers stays"

log = logging.getLogger("echo2d.peers")


class PeerLinks:
    """The links of one peer.

    tls: None for plain TCP. uplink_limit: the most bytes/s that all links send together; peers that
    wait for it get `on_ready` in turn.
    """

    def __init__(
        self,
        *,
        run_id: RunId,
        me: PeerId,
        on_event: Callable[[PeerId, LinkEvent], None],
        on_ready: Callable[[PeerId], None],
        tls: Tls | None = None,
        uplink_limit: float | None = None,
    ) -> None:
        self._run_id, self._me, self._on_event, self._on_ready = run_id, me, on_event, on_ready
        self._tls = tls
        self._secrets: dict[PeerId, bytes] = {}
        self._connections: set[PeerConnection] = set()
        self._admission = ConnectionAdmission(
            StrangerLimits(LINK_STRANGERS_MAX, LINK_STRANGERS_PER_ADDRESS_MAX, HANDSHAKE_S)
        )
        self._live: dict[PeerId, PeerConnection] = {}
        self._uplink = UplinkLimit(uplink_limit, self._infos, self._allowed)
        self._server: asyncio.Server | None = None
        self._closing = False
        self._all_lost = asyncio.Event()

    # peers, listening and dialling

    def expect(self, peer: PeerId, secret: bytes) -> None:
        """Let this peer link from now on if it proves that it knows `secret` (SECRET_BYTES)."""
        assert len(secret) == SECRET_BYTES
        self._secrets[peer] = secret

    def forget(self, peer: PeerId) -> None:
        """Undo `expect`, and end the live link."""
        self._secrets.pop(peer, None)
        self.end(peer, "no longer expected")

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links from now on, at the returned address. OSError: cannot listen there."""
        assert self._server is None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._connection(None), host, port
        )
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def dial(self, peer: PeerId, host: str, port: int) -> None:
        """Open a link unless there is one; returns when it is open at this end.

        PeerFault: the peer cannot be reached, does not prove itself, or refuses.
        """
        if peer in self._live:
            return
        connection, made = self._connection(peer), False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
                made = True
                await connection.settled.wait()
        # TimeoutError is an OSError; invalid addresses raise the other two.
        except (OSError, ValueError, OverflowError) as error:
            raise PeerFault(f"cannot reach {host}:{port}: {in_words(error)}") from error
        finally:
            # If connecting fails, uvloop closes the socket but does not tell the connection.
            if not made:
                connection.connection_lost(None)
            elif connection.peer is None:
                connection.end("the handshake was given up")
        if connection.peer is None:
            raise PeerFault(f"{host}:{port}: {connection.reason}")

    async def close(self, reason: str) -> None:
        """Stop listening and end all links; returns when every connection is gone."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.end(reason)
        self._all_lost.clear()
        if self._connections:
            await self._all_lost.wait()

    # sending

    def can_send(self, peer: PeerId) -> bool:
        """Whether `send_frame` has room."""
        connection = self._live.get(peer)
        if connection is None or not connection.has_room:
            return False
        return self._uplink.may_send(peer)

    def send_frame(
        self,
        peer: PeerId,
        stream: StreamId,
        frame: FrameId,
        sequence: int,
        payload: memoryview | None,
    ) -> bool:
        """Send a frame; returns whether it was sent.

        It was not if the link has no room (`on_ready` will follow), or if the link or the stream
        has ended (an event has reported that). payload: None for a frame without one. It is kept, not
        copied, until it is sent, so it must not change.
        """
        connection = self._live.get(peer)
        if connection is None or not connection.has_room or not connection.link.serves(stream):
            return False
        buffers = connection.link.send_frame(stream, frame, sequence, payload)
        self._uplink.sent(sum(map(len, buffers)))
        connection.write_frame(buffers)
        return True

    def tell(self, peer: PeerId, message: RelayMessage) -> None:
        """Send this message over the live link; does nothing if there is none."""
        connection = self._live.get(peer)
        if connection is None:
            return
        try:
            data = connection.link.tell(message)
        except PeerFault as fault:
            connection.end(str(fault))
        else:
            connection.write(data)
            self._uplink.sent(len(data))

    def end(self, peer: PeerId, reason: str) -> None:
        """End the live link if there is one, and tell the other end the reason."""
        if peer in self._live:
            self._live[peer].end(reason)

    # flow

    def pause(self, peer: PeerId) -> None:
        """Read no more from this link until `resume`; after LINK_SILENCE_S the peer's kernel gives up.

        Bytes that were read already (up to `AHEAD_BYTES_MAX`) still become events.
        """
        if peer in self._live:
            self._live[peer].pause()

    def resume(self, peer: PeerId) -> None:
        """Read again after `pause`."""
        if peer in self._live:
            self._live[peer].resume()

    # called by connections

    def _connection(self, dialled: PeerId | None) -> PeerConnection:
        nonce = chance.token_bytes(NONCE_BYTES)
        link = PeerLink(
            run_id=self._run_id, me=self._me, secrets=self._secrets, nonce=nonce, dialled=dialled
        )
        exchange = None
        if self._tls is not None:
            context = self._tls.listener if dialled is None else self._tls.dialler
            exchange = KeyExchange(context, expected=dialled)
        return PeerConnection(self, link, dialled=dialled is not None, exchange=exchange)

    def made(self, connection: PeerConnection) -> None:
        """TCP is up. An accepted connection has HANDSHAKE_S to prove its peer, the TLS handshake included."""
        self._connections.add(connection)
        if self._closing:
            connection.end("closing")
        elif not connection.dialled:
            assert connection.transport is not None
            self._admission.came(connection, address_of(connection.transport), connection.end)

    def received(self, connection: PeerConnection, event: LinkEvent) -> None:
        """Handle the opening and the end of the link here, and pass the other events to `on_event`."""
        match event:
            case LinkOpened(peer):
                self._opened(connection, peer)
            case LinkEnded(reason):
                connection.closed(reason)
            case _:
                assert connection.peer is not None
                self._on_event(connection.peer, event)

    def ready(self, connection: PeerConnection) -> None:
        """The connection has room for a frame again."""
        if connection.peer is not None and self._live.get(connection.peer) is connection:
            self._on_ready(connection.peer)

    def _infos(self) -> list[TcpInfo]:
        infos = [connection.tcp_info() for connection in self._live.values()]
        return [info for info in infos if info is not None]

    def _allowed(self, peer: PeerId) -> None:
        if peer in self._live:
            self.ready(self._live[peer])

    def ended(self, connection: PeerConnection, reason: str) -> None:
        """Nothing more will arrive on the connection or be sent on it."""
        self._admission.admit(connection)
        peer = connection.peer
        if peer is not None and self._live.get(peer) is connection:
            del self._live[peer]
            log.info("link_ended peer=%s reason=%r", peer, reason)
            self._on_event(peer, LinkEnded(reason))

    def lost(self, connection: PeerConnection) -> None:
        """The connection's socket is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_lost.set()

    def _opened(self, connection: PeerConnection, peer: PeerId) -> None:
        self._admission.admit(connection)
        # The listener accepts any member's certificate, so check that it is this peer's.
        if self._tls is not None and not belongs_to(connection.certificate, peer):
            connection.end("the certificate is not that of the peer")
            return
        connection.peer, connection.opened_at = peer, connection.loop.time()
        connection.settled.set()
        other = self._live.get(peer)
        if other is not None and not self._stays(connection, other, peer):
            connection.end(REPLACED)
            return
        if other is not None:
            other.end(REPLACED)
        self._live[peer] = connection
        log.info("link_opened peer=%s dialled=%s", peer, connection.dialled)
        self._on_event(peer, LinkOpened(peer))

    def _stays(self, new: PeerConnection, old: PeerConnection, peer: PeerId) -> bool:
        # If the same end dialled twice, it did so because its first link is lost.
        if new.dialled == old.dialled or new.opened_at - old.opened_at > SETTLED_S:
            return True
        return new.dialled == (self._me < peer)
