"""One TCP connection of a peer link: moves bytes between the socket and `core/protocol/peer_link`, and keeps time.

It decides nothing: what happens goes to its `ConnectionOwner` (`links`). Bytes arrive in the link's own buffers.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import LinkEvent
from echo2d.core.topology.uplink_rates import BacklogMeter
from echo2d.errors import PeerFault
from echo2d.net.peer.congestion import Congestion

SEND_BUFFER_BYTES = (
    512 << 10
)  # a connection with more unsent takes no more frames: late binding wants it small
UNSENT_BYTES_MAX = (
    8 << 20
)  # with messages too: a peer that makes us answer but does not read is dropped
KERNEL_UNSENT_BYTES = (
    128 << 10
)  # of what the kernel holds, so much may wait to be sent: the rest counts as unsent here
WAKE_BYTES_MAX = (
    64 << 10
)  # of a payload that arrives slowly: one wake-up instead of one for every packet
RECORD_BYTES_MAX = (
    16 << 10
)  # of payload in one TLS record: while that is not whole, so much is here and not seen
WARM_BYTES = (
    1 << 20
)  # from then on: before, what waits here would fill the small window that the kernel begins with
SILENCE_S = 15  # so long without an acknowledgement, an answer to a probe or an open window: the connection is dead
PROBE_S = 5  # between the kernel's probes of an idle connection
SO_MAX_PACING_RATE = 47  # Linux; Python names it from 3.14 on
UNPACED = (1 << 64) - 1
CLOSE_S = 1.0  # for the last words to get out


class ConnectionOwner(Protocol):
    """Who is told what happens to a connection, in this order: made, received ..., ended, lost."""

    def made(self, connection: "PeerConnection") -> None: ...
    def received(self, connection: "PeerConnection", event: LinkEvent) -> None: ...
    def ready(self, connection: "PeerConnection") -> None: ...
    def ended(self, connection: "PeerConnection", reason: str) -> None: ...
    def lost(self, connection: "PeerConnection") -> None: ...


class PeerConnection(asyncio.BufferedProtocol):
    """`peer`: None until its owner saw LinkOpened. `settled`: opened, or ended for the `reason`."""

    def __init__(self, owner: ConnectionOwner, link: PeerLink, *, dialled: bool) -> None:
        self._owner = owner
        self.link, self.dialled = link, dialled
        self.loop = asyncio.get_running_loop()
        self.peer: PeerId | None = None
        self.opened_at = 0.0
        self.settled = asyncio.Event()
        self.reason: str | None = None
        self.transport: asyncio.Transport | None = None
        self.has_room = True  # for one more frame
        self._received = 0  # bytes
        self._wanted = 1  # bytes that the kernel waits for
        self._unseen_max = 0  # bytes that the kernel handed over and the link cannot see yet
        self._socket: socket.socket | None = None  # to set options of
        self._congestion: Congestion | None = None
        self._pace = UNPACED
        self._backlog = BacklogMeter()

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES, low=SEND_BUFFER_BYTES // 2)
        sock = self.transport.get_extra_info("socket")
        _tune(sock)
        self._socket = socket.socket(
            fileno=os.dup(sock.fileno())
        )  # uvloop's own is made anew for every option
        self._congestion = Congestion(self._socket)
        if transport.get_extra_info("ssl_object") is not None:
            self._unseen_max = RECORD_BYTES_MAX
        if self.dialled:
            self.write(self.link.start())
        self._owner.made(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the link knows better
        return self.link.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self.reason is not None:  # TLS may hand over what it had read before the end
            return
        self._received += nbytes
        event = self._hear(nbytes)
        while event is not None:
            self._owner.received(self, event)
            event = self._hear(0)
        self._wake_for(self.link.missing - self._unseen_max)

    def _hear(self, nbytes: int) -> LinkEvent | None:
        """What the link makes of so many more bytes, or of those before them."""
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
        """The kernel says nothing of the next bytes before so many are there: never more than are certain to come."""
        if self._received < WARM_BYTES or self._socket is None:
            return
        wanted = max(1, min(wanted, WAKE_BYTES_MAX))
        if wanted != self._wanted and self.reason is None:
            self._wanted = wanted
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    # what its owner calls

    def write(self, data: bytes) -> None:
        """Messages. A peer that does not read them loses the connection."""
        if not data or self.transport is None:
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.closed("does not read")
            self.transport.abort()

    def write_frame(self, buffers: Sequence[bytes | memoryview]) -> float:
        """A frame; its buffers are kept, not copied, until they are sent. The time."""
        assert self.transport is not None
        assert self._congestion is not None
        now = self._look()
        self._congestion.sending(now)
        self.transport.writelines(buffers)
        return now

    def is_sending(self, since: float) -> bool:
        """Whether it was given a frame since then, or has something left to send."""
        if self.transport is None or self._congestion is None:
            return False
        return self._congestion.sent_at >= since or self.transport.get_write_buffer_size() > 0

    def take_backlog(self) -> float:
        """For how many seconds since last asked the kernel took less than there was to send."""
        self._look()
        return self._backlog.take()

    def _look(self) -> float:
        now = self.loop.time()
        waits = self.transport is not None and self.transport.get_write_buffer_size() > 0
        self._backlog.look(now, waits=waits)
        return now

    def pace(self, bytes_per_s: float | None) -> None:
        """Send no faster from now on. OSError where the system cannot."""
        value = UNPACED if bytes_per_s is None else int(bytes_per_s)
        if self._socket is not None and value != self._pace:
            assert self._congestion is not None
            self._congestion.paced, self._pace = bytes_per_s is not None, value
            self._socket.setsockopt(
                socket.SOL_SOCKET, SO_MAX_PACING_RATE, value.to_bytes(8, sys.byteorder)
            )

    def end(self, reason: str) -> None:
        """Says why and closes, unless that has happened already."""
        if self.reason is None:
            self.write(self.link.end(reason))
        self.closed(reason)

    def closed(self, reason: str) -> None:
        """The end without last words."""
        if self.reason is not None:
            return
        self.reason = reason
        self.settled.set()
        if self.transport is not None:
            self.transport.close()
            self.loop.call_later(CLOSE_S, self.transport.abort)
        self._owner.ended(self, reason)

    def pause(self) -> None:
        """No more is read until `resume`; longer than SILENCE_S and the other end's kernel gives up."""
        assert self.transport is not None
        self.transport.pause_reading()

    def resume(self) -> None:
        """The end of `pause`."""
        assert self.transport is not None
        self.transport.resume_reading()


def _tune(sock: socket.socket) -> None:
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_UNSENT_BYTES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S // PROBE_S - 1),
    ):
        sock.setsockopt(level, option, value)
