"""Limits HTTP connections that have not shown a credential yet: how many there are, and how long.

    accepted --a control link or a call shows a credential--> admitted: no longer counted or limited
       | STRANGER_S_MAX have passed, whatever was sent; or it is the oldest of too many
       v
    closed

When there are too many such connections, from one address or in total, the oldest is closed. A
caller with a credential needs only a moment to show it, and one without cannot keep others out by
staying. Not here: what a credential is.
"""

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

STRANGERS_MAX = 2048  # 15 KiB each, half a header included
# All workers of a run (PEERS_MAX) may return at once from behind one NAT.
STRANGERS_PER_ADDRESS_MAX = 1024
# For the first header and all that follows; HELLO_TIMEOUT_S and a busy start fit into it.
STRANGER_S_MAX = 30.0

DOOR: web.AppKey["ConnectionAdmission"] = web.AppKey("door")

log = logging.getLogger("echo2d.api")


@dataclass(frozen=True, slots=True)
class _Stranger:
    address: str
    transport: asyncio.Transport
    timer: asyncio.TimerHandle


class ConnectionAdmission:
    """The strangers of one server."""

    def __init__(self) -> None:
        self._strangers: dict[RequestHandler, _Stranger] = {}  # oldest first
        self._of: dict[str, dict[RequestHandler, None]] = {}  # the same by address

    def __len__(self) -> int:
        return len(self._strangers)

    def watch(self, server: web.Server) -> None:
        """From now on, whoever comes to this server and goes."""
        made, lost = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            self._came(handler, transport)

        def connection_lost(handler: RequestHandler, exc: BaseException | None = None) -> None:
            self.admit(handler)
            lost(handler, exc)

        server.connection_made = connection_made  # type: ignore[method-assign]
        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def _came(self, connection: RequestHandler, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else "gone"
        neighbours = self._of.get(address, {})
        if len(neighbours) >= STRANGERS_PER_ADDRESS_MAX:
            self._close(next(iter(neighbours)), "too many of its address")
        elif len(self) >= STRANGERS_MAX:
            self._close(next(iter(self._strangers)), "too many")
        timer = asyncio.get_running_loop().call_later(
            STRANGER_S_MAX, self._close, connection, "showed no credential"
        )
        self._strangers[connection] = _Stranger(address, transport, timer)
        self._of.setdefault(address, {})[connection] = None

    def _close(self, connection: RequestHandler, reason: str) -> None:
        stranger = self._strangers[connection]
        self.admit(connection)
        log.info("stranger closed remote=%s reason=%s", stranger.address, reason)
        stranger.transport.abort()

    def admit(self, connection: RequestHandler) -> None:
        """It is no stranger any more."""
        stranger = self._strangers.pop(connection, None)
        if stranger is not None:
            stranger.timer.cancel()
            del self._of[stranger.address][connection]
            if not self._of[stranger.address]:
                del self._of[stranger.address]


def admit(request: web.Request) -> None:
    """Its caller has shown a credential; where there is no door, anybody may stay."""
    door = request.app.get(DOOR)
    if door is not None:
        door.admit(request.protocol)
