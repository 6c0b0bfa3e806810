"""Limits connections that have not shown a credential yet: their number, and how long each may stay.

    accepted --a control link or a call shows a credential--> admitted: no longer counted or limited
       | its time is over, whatever was sent; or it is the oldest of too many
       v
    closed

Under TLS a connection counts from before its handshake (`tls_accept`). The HTTP port has the limits
below; `net/peer/links.py` has its own.

When there are too many such connections, from one address or in total, the oldest is closed. A
caller with a credential needs only a moment to show it, and a caller without a credential cannot keep
others out by staying connected. Not here: what a credential is.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

HTTP_STRANGERS_MAX = 4096  # 15 KiB each, half a header included
# This is enough for all workers of a run (PEERS_MAX) that return at once from behind one NAT.
HTTP_STRANGERS_PER_ADDRESS_MAX = 2048
# The time from accepting a connection until its credential is read. HELLO_TIMEOUT_S and a busy start fit into it.
STRANGER_S_MAX = 30.0

DOOR: web.AppKey["ConnectionAdmission"] = web.AppKey("door")

log = logging.getLogger("echo2d.api")


@dataclass(frozen=True, slots=True)
class StrangerLimits:
    """Limits on connections without a credential."""

    strangers_max: int
    per_address_max: int
    seconds_max: float  # for each connection


@dataclass(slots=True)
class _Stranger:
    address: str
    close: Callable[[str], None]
    timer: asyncio.TimerHandle


class ConnectionAdmission:
    """The strangers of one server. limits: None for those of the HTTP port, above.

    A connection may be any object. `close(reason)` closes it.
    """

    def __init__(self, limits: StrangerLimits | None = None) -> None:
        self._limits = limits or StrangerLimits(
            HTTP_STRANGERS_MAX, HTTP_STRANGERS_PER_ADDRESS_MAX, STRANGER_S_MAX
        )
        self._strangers: dict[object, _Stranger] = {}  # oldest first
        self._of: dict[str, dict[object, None]] = {}  # the same by address

    def __len__(self) -> int:
        return len(self._strangers)

    def watch(self, server: web.Server) -> None:
        """Count the strangers of this server from now on."""
        made, lost = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            self.came(handler, address_of(transport), lambda _: transport.abort())

        def connection_lost(handler: RequestHandler, exc: BaseException | None = None) -> None:
            self.admit(handler)
            lost(handler, exc)

        server.connection_made = connection_made  # type: ignore[method-assign]
        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def came(self, connection: object, address: str, close: Callable[[str], None]) -> None:
        """Count this connection. If it is counted already, only its `close` is replaced."""
        if connection in self._strangers:
            self._strangers[connection].close = close
            return
        neighbours = self._of.get(address, {})
        if len(neighbours) >= self._limits.per_address_max:
            self._close(next(iter(neighbours)), "too many of its address show no credential")
        elif len(self) >= self._limits.strangers_max:
            self._close(next(iter(self._strangers)), "too many show no credential")
        timer = asyncio.get_running_loop().call_later(
            self._limits.seconds_max, self._close, connection, "showed no credential in time"
        )
        self._strangers[connection] = _Stranger(address, close, timer)
        self._of.setdefault(address, {})[connection] = None

    def _close(self, connection: object, reason: str) -> None:
        stranger = self._strangers[connection]
        self.admit(connection)
        log.info("stranger closed remote=%s reason=%s", stranger.address, reason)
        stranger.close(reason)

    def admit(self, connection: object) -> None:
        """Stop counting this connection."""
        stranger = self._strangers.pop(connection, None)
        if stranger is not None:
            stranger.timer.cancel()
            del self._of[stranger.address][connection]
            if not self._of[stranger.address]:
                del self._of[stranger.address]


def address_of(transport: asyncio.BaseTransport) -> str:
    """The other end's IP address; "gone" if it has hung up already."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else "gone"


def admit(request: web.Request) -> None:
    """Admit the request's connection, as its caller has shown a credential. An app without DOOR has no limits."""
    door = request.app.get(DOOR)
    if door is not None:
        door.admit(request.protocol)
