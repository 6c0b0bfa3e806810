"""Peer links over TCP: a listener, a dialler, and the one live link to each peer.

Not here: the protocol (`core/protocol/peer_link.py`), and every decision: whom to expect or dial, what to send, when
to try again.

`on_event(peer, event)` is called from the loop, in the order of arrival: LinkOpened, then what comes over that link,
then exactly one LinkEnded, whoever ended it (also from within `end`, `forget` and `close`). `on_ready(peer)` says that
a link which had no room for a frame has it again. Both return quickly: they run between two reads of a socket.

Two ends may dial each other at once. Then the link dialled by the smaller peer id stays and the other is ended with
REPLACED; but a link older than SETTLED_S gives way to any new one, because the other end dials only without a link.

What is said goes to the link that is live at that moment. Stream numbers start anew with each link, so a caller that
handles events later than they come says nothing to a peer whose LinkEnded is still waiting to be handled.

Works on plain asyncio and on uvloop, which sends memoryviews without copying them. Memory: for each live link at most
UNSENT_BYTES_MAX to send, one payload arriving with AHEAD_BYTES_MAX, and what TLS works in (256 KiB); payloads handed
over are the receiver's, who calls `pause` in time.
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
from echo2d.core.topology.pacing import share_out
from echo2d.errors import PeerFault
from echo2d.net.peer.connection import PeerConnection
from echo2d.net.peer.uplink_limit import UplinkLimit
from echo2d.net.security.tls import Tls, in_words, shows

HANDSHAKE_S = 10.0  # from dialling to LinkOpened: a few round trips, also on a bad line
# Accepted connections that have not yet proved who they are; then the oldest gives way.
STRANGERS_MAX = 64
SETTLED_S = 2 * HANDSHAKE_S  # no dial is left by then that began before the link was open
REPLACED = "another link of these two peers stays"
SHARE_S = 0.3  # between two looks at which links send: longer than the gaps of a link that does

log = logging.getLogger("echo2d.peers")


class PeerLinks:
    """The links of one peer. tls: of all of them; None is plain TCP.

    uplink_limit: bytes/s that all links together send at most; whoever waits gets `on_ready` in turn.
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
        self._strangers: dict[PeerConnection, asyncio.TimerHandle] = {}  # accepted, oldest first
        self._live: dict[PeerId, PeerConnection] = {}
        self._paces: dict[PeerId, float] = {}
        self._sending: set[PeerId] = set()  # who was found to send at the last look
        self._share_at = 0.0  # when it is looked next
        self._can_pace = True
        self._uplink = None if uplink_limit is None else UplinkLimit(uplink_limit, self._allowed)
        self._server: asyncio.Server | None = None
        self._closing = False
        self._all_lost = asyncio.Event()

    # whom to link with

    def expect(self, peer: PeerId, secret: bytes) -> None:
        """From now on this peer may link, proving that it knows `secret` (SECRET_BYTES)."""
        assert len(secret) == SECRET_BYTES
        self._secrets[peer] = secret

    def forget(self, peer: PeerId) -> None:
        """The end of `expect`, and of a live link."""
        self._secrets.pop(peer, None)
        self._paces.pop(peer, None)
        self.end(peer, "no longer expected")

    def pace(self, peer: PeerId, bytes_per_s: float | None) -> None:
        """Send to this peer no faster, over the live link and any later one; None: as fast as it can."""
        before = self._paces.pop(peer, None)
        if bytes_per_s is not None:
            self._paces[peer] = bytes_per_s
        if peer in self._live and before != bytes_per_s:
            self._set_pace(self._live[peer], bytes_per_s)

    def _share_out(self, now: float) -> None:
        """What links that are quiet do not need is for the others, until they send again."""
        self._share_at = now + SHARE_S
        self._sending = {
            peer
            for peer in self._paces
            if peer in self._live and self._live[peer].is_sending(now - SHARE_S)
        }
        for peer, pace in share_out(self._paces, self._sending).items():
            if peer in self._live:
                self._set_pace(self._live[peer], pace)

    def _set_pace(self, connection: PeerConnection, bytes_per_s: float | None) -> None:
        try:
            connection.pace(bytes_per_s)
        except OSError as error:
            if self._can_pace:
                log.warning("links are not paced: %s", error)
            self._can_pace = False

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accepts links from now on, at the address it returns. OSError when the address cannot be had."""
        assert self._server is None
        loop, tls = asyncio.get_running_loop(), self._tls
        self._server = await loop.create_server(
            lambda: self._connection(None),
            host,
            port,
            ssl=None if tls is None else tls.listener,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
        )
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def dial(self, peer: PeerId, host: str, port: int) -> None:
        """Opens a link, unless there is one; it returns when that is open at this end.

        PeerFault when the peer cannot be reached, does not prove itself or refuses.
        """
        if peer in self._live:
            return
        connection, made = self._connection(peer), False
        context, name = (None, None) if self._tls is None else (self._tls.dialler, peer)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, host, port, ssl=context, server_hostname=name
                )
                made = True
                await connection.settled.wait()
        except (
            OSError,
            ValueError,
            OverflowError,
        ) as error:  # a time-out is one; others come of impossible addresses
            raise PeerFault(f"cannot reach {host}:{port}: {in_words(error)}") from error
        finally:
            if not made:  # whatever there was is closed, which uvloop does not tell the connection
                connection.connection_lost(None)
            elif connection.peer is None:
                connection.end("the handshake was given up")
        if connection.peer is None:
            raise PeerFault(f"{host}:{port}: {connection.reason}")

    async def close(self, reason: str) -> None:
        """Stops listening and ends all links; returns when every connection is gone."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.end(reason)
        self._all_lost.clear()
        if self._connections:
            await self._all_lost.wait()

    # what to say

    def can_send(self, peer: PeerId) -> bool:
        """Whether `send_frame` has room."""
        connection = self._live.get(peer)
        if connection is None or not connection.has_room:
            return False
        return self._uplink is None or self._uplink.may_send(peer)

    def take_backlog(self, peer: PeerId) -> float:
        """For how many seconds since last asked this peer's live link had more to send than it could."""
        connection = self._live.get(peer)
        return 0.0 if connection is None else connection.take_backlog()

    def send_frame(
        self,
        peer: PeerId,
        stream: StreamId,
        frame: FrameId,
        sequence: int,
        payload: memoryview | None,
    ) -> bool:
        """False if nothing was sent: no room (`on_ready` will come), or stream or link have ended (as an event said).

        The payload is kept, not copied, until it is sent: it must not change any more. None: without payload.
        """
        connection = self._live.get(peer)
        if connection is None or not connection.has_room or not connection.link.serves(stream):
            return False
        buffers = connection.link.send_frame(stream, frame, sequence, payload)
        if self._uplink is not None:
            self._uplink.sent(sum(map(len, buffers)))
        now = connection.write_frame(buffers)
        if peer in self._paces and (now >= self._share_at or peer not in self._sending):
            self._share_out(now)
        return True

    def tell(self, peer: PeerId, message: RelayMessage) -> None:
        """Says this as `PeerLink` does, over the live link; nothing without one."""
        connection = self._live.get(peer)
        if connection is None:
            return
        try:
            data = connection.link.tell(message)
        except PeerFault as fault:
            connection.end(str(fault))
        else:
            connection.write(data)
            if self._uplink is not None:
                self._uplink.sent(len(data))

    def end(self, peer: PeerId, reason: str) -> None:
        """Ends the live link, if there is one; the other end reads the reason."""
        if peer in self._live:
            self._live[peer].end(reason)

    # flow

    def pause(self, peer: PeerId) -> None:
        """No more is read from this link until `resume`; after SILENCE_S the peer's kernel gives the link up.

        What was read already (`AHEAD_BYTES_MAX`) still comes.
        """
        if peer in self._live:
            self._live[peer].pause()

    def resume(self, peer: PeerId) -> None:
        """The end of `pause`."""
        if peer in self._live:
            self._live[peer].resume()

    # what connections tell

    def _connection(self, dialled: PeerId | None) -> PeerConnection:
        nonce = chance.token_bytes(NONCE_BYTES)
        link = PeerLink(
            run_id=self._run_id, me=self._me, secrets=self._secrets, nonce=nonce, dialled=dialled
        )
        return PeerConnection(self, link, dialled=dialled is not None)

    def made(self, connection: PeerConnection) -> None:
        """TCP, and TLS, are up."""
        self._connections.add(connection)
        if self._closing:
            connection.end("closing")
        elif not connection.dialled:
            timer = connection.loop.call_later(
                HANDSHAKE_S, connection.end, "the handshake took too long"
            )
            self._strangers[connection] = timer
            if len(self._strangers) > STRANGERS_MAX:
                next(iter(self._strangers)).end("too many connections without a handshake")

    def received(self, connection: PeerConnection, event: LinkEvent) -> None:
        """The link of this connection has an event."""
        match event:
            case LinkOpened(peer):
                self._opened(connection, peer)
            case LinkEnded(reason):
                connection.closed(reason)
            case _:
                assert connection.peer is not None
                self._on_event(connection.peer, event)

    def ready(self, connection: PeerConnection) -> None:
        """It has room for a frame again."""
        if connection.peer is not None and self._live.get(connection.peer) is connection:
            self._on_ready(connection.peer)

    def _allowed(self, peer: PeerId) -> None:
        if peer in self._live:
            self.ready(self._live[peer])

    def ended(self, connection: PeerConnection, reason: str) -> None:
        """Nothing more comes from it or goes to it."""
        self._no_stranger(connection)
        peer = connection.peer
        if peer is not None and self._live.get(peer) is connection:
            del self._live[peer]
            log.info("link_ended peer=%s reason=%r", peer, reason)
            self._on_event(peer, LinkEnded(reason))

    def lost(self, connection: PeerConnection) -> None:
        """Its socket is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_lost.set()

    def _opened(self, connection: PeerConnection, peer: PeerId) -> None:
        self._no_stranger(connection)
        if not shows(connection.transport, peer):
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
        if peer in self._paces:
            self._set_pace(connection, self._paces[peer])
        log.info("link_opened peer=%s dialled=%s", peer, connection.dialled)
        self._on_event(peer, LinkOpened(peer))

    def _stays(self, new: PeerConnection, old: PeerConnection, peer: PeerId) -> bool:
        if new.dialled == old.dialled or new.opened_at - old.opened_at > SETTLED_S:
            return True
        return new.dialled == (self._me < peer)

    def _no_stranger(self, connection: PeerConnection) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
