"""One TCP connection of a peer link: moves bytes between socket and `core/protocol/peer_link.py`.

It decides nothing, and reports what happens to its `ConnectionOwner` (`links.py`). Bytes arrive directly
in the link's own buffers. It also sets the socket's options, and makes the TLS handshake whose keys seal
the link (`security/sealing.py`).
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol, cast

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import LinkEvent
from echo2d.errors import PeerFault
from echo2d.net.peer.congestion import Congestion
from echo2d.net.peer.tcp_info import TcpInfo, tcp_info
from echo2d.net.security.sealing import HANDSHAKE_READ_BYTES, KeyExchange
from echo2d.net.security.tls import in_words

# The most bytes of frames and messages that wait to be sent. A peer that makes us answer but does not read is dropped.
UNSENT_BYTES_MAX = 8 << 20
# The kernel may wait for several packets only after this many bytes were received: earlier, the waiting
# bytes would fill the kernel's receive window, which starts small.
WARM_BYTES = 1 << 20
# A connection is dead after this long without an acknowledgement, a probe's answer or an open window.
LINK_SILENCE_S = 15
# Seconds between the kernel's probes of an idle connection.
PROBE_S = 5
# Time to send the reason of the end before the connection is cut.
_CLOSE_S = 1.0


class ConnectionOwner(Protocol):
    """Receives the events of a connection, in this order: made, received ..., ended, lost.

    `ready` may come at any time between made and ended: the connection has room for a frame again.
    """

    def made(self, connection: "PeerConnection") -> None: ...
    def received(self, connection: "PeerConnection", event: LinkEvent) -> None: ...
    def ready(self, connection: "PeerConnection") -> None: ...
    def ended(self, connection: "PeerConnection", reason: str) -> None: ...
    def lost(self, connection: "PeerConnection") -> None: ...


class PeerConnection(asyncio.BufferedProtocol):
    """One connection, dialled or accepted.

    exchange: the handshake whose keys seal the link; None: the link is not sealed.
    """

    def __init__(
        self, owner: ConnectionOwner, link: PeerLink, *, dialled: bool, exchange: KeyExchange | None
    ) -> None:
        self._owner = owner
        self._exchange = exchange
        self._handshake = memoryview(bytearray(HANDSHAKE_READ_BYTES if exchange else 0))
        # The certificate that the other end has shown in the handshake.
        self.certificate: bytes | None = None
        self.link, self.dialled = link, dialled
        self.loop = asyncio.get_running_loop()
        # None until the owner has received LinkOpened.
        self.peer: PeerId | None = None
        self.opened_at = 0.0
        # Set once the link has opened, or the connection has ended for the `reason`.
        self.settled = asyncio.Event()
        self.reason: str | None = None
        self.transport: asyncio.Transport | None = None
        self.has_room = True  # for one more frame
        self._received = 0  # bytes
        # The kernel reports data only once this many bytes have arrived.
        self._wanted = 1
        # A duplicate of the transport's socket, to set options on.
        self._socket: socket.socket | None = None
        self._congestion: Congestion | None = None

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=0)
        sock = self.transport.get_extra_info("socket")
        _tune(sock)
        # uvloop creates a new object at every access to its socket, so keep one of our own.
        self._socket = socket.socket(fileno=os.dup(sock.fileno()))
        self._congestion = Congestion(self._socket)
        if self.dialled and self._exchange is None:
            self.write(self.link.start())
        elif self.dialled:
            self._exchange_keys(b"")
        self._owner.made(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the link knows better
        return self.link.get_buffer() if self._exchange is None else self._handshake

    def buffer_updated(self, nbytes: int) -> None:
        if self.reason is not None:
            return
        if self._exchange is not None:
            self._exchange_keys(self._handshake[:nbytes])
            return
        self._received += nbytes
        event = self._read_event(nbytes)
        while event is not None:
            self._owner.received(self, event)
            # One read may hold several events.
            event = self._read_event(0)
        self._wake_for(self.link.missing)

    def _exchange_keys(self, data: bytes | memoryview) -> None:
        """Handle a part of the handshake. Once the handshake is over, the link begins."""
        exchange = self._exchange
        assert exchange is not None
        try:
            exchange.received(data)
        except (ssl.SSLError, PeerFault) as error:
            self.write(exchange.to_send())
            self.closed(in_words(error))
            return
        self.write(exchange.to_send())
        if exchange.seal is None:
            return
        self._exchange, self.certificate = None, exchange.certificate
        self.link.seal(exchange.seal)
        if self.dialled:
            self.write(self.link.start())
        rest = memoryview(exchange.rest)
        while rest and self.reason is None:
            buffer = self.get_buffer(0)
            count = min(len(rest), len(buffer))
            buffer[:count], rest = rest[:count], rest[count:]
            self.buffer_updated(count)

    def _read_event(self, nbytes: int) -> LinkEvent | None:
        """The link's next event, given this many new bytes; None if it needs more bytes."""
        if self.reason is not None:
            return None
        try:
            event = self.link.bytes_received(nbytes)
        except PeerFault as fault:
            self.end(str(fault))
            return None
        self.write(self.link.take_replies())
        return event if self.reason is None else None

    def pause_writing(self) -> None:
        self.has_room = False

    def resume_writing(self) -> None:
        self.has_room = True
        self._owner.ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed(f"connection lost: {exc or 'closed by the other end'}")
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._owner.lost(self)

    def _wake_for(self, wanted: int) -> None:
        """Make the kernel wait for this many bytes before it reports data.

        Never ask for more bytes than are certain to come, or the last ones would never be reported.
        """
        if self._received < WARM_BYTES or self._socket is None:
            return
        # While a payload arrives slowly, wake up once for up to 64 KiB instead of for every packet.
        wanted = max(1, min(wanted, 64 << 10))
        if wanted != self._wanted and self.reason is None:
            self._wanted = wanted
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    # called by the owner

    def write(self, data: bytes) -> None:
        """Send messages. A peer that does not read them loses the connection."""
        if not data or self.transport is None:
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.closed("does not read")
            self.transport.abort()

    def write_frame(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send a frame; its buffers are kept, not copied, until they are sent."""
        assert self.transport is not None
        assert self._congestion is not None
        self._congestion.sending(self.loop.time())
        self.transport.writelines(buffers)

    def tcp_info(self) -> TcpInfo | None:
        """What the kernel knows of the connection. None: it is closed, or the kernel does not report it."""
        return None if self._socket is None else tcp_info(self._socket)

    def end(self, reason: str) -> None:
        """Tell the other end the reason and close, unless the connection has ended already."""
        if self.reason is None and self._exchange is None:
            self.write(self.link.end(reason))
        self.closed(reason)

    def closed(self, reason: str) -> None:
        """Close without telling the other end why."""
        if self.reason is not None:
            return
        self.reason = reason
        self.settled.set()
        if self.transport is not None:
            self.transport.close()
            self.loop.call_later(_CLOSE_S, self.transport.abort)
        self._owner.ended(self, reason)

    def pause(self) -> None:
        """Read nothing until `resume`; after LINK_SILENCE_S the other end's kernel gives up."""
        assert self.transport is not None
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read again after `pause`."""
        assert self.transport is not None
        self.transport.resume_reading()


def _tune(sock: socket.socket) -> None:
    # The kernel takes at most 32 KiB that it has not sent (TCP_NOTSENT_LOWAT). If one more byte waits
    # in this process, the connection takes no frames, so that the next frame is chosen as late as
    # possible.
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 32 << 10),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_SILENCE_S * 1000),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LINK_SILENCE_S // PROBE_S - 1),
    ):
        sock.setsockopt(level, option, value)
