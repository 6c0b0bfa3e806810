"""Accepts TCP connections, makes their TLS handshakes, and counts each connection from its first moment.

    accepted --counted as a stranger--> handshake --> the protocol's connection_made; still counted
                                           | it fails, takes too long, or is the oldest of too many
                                           v
                                        closed

With an SSL context, an event loop reports a connection only after its handshake, so strangers that
never finish the handshake could not be counted. Here the loop listens without TLS, and the handshake
runs on a duplicate of the accepted socket. Not here: the limits (`admission`).
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from aiohttp import web

from echo2d.net.http.admission import DOOR, ConnectionAdmission, address_of

# For handshakes at the coordinator's port: a few round trips, and a turn of a busy loop.
TLS_HANDSHAKE_S_MAX = 10.0

log = logging.getLogger("echo2d.tls")


class TlsAcceptor:
    """A protocol factory for `create_server`, which must not get an SSL context itself.

    make_protocol: makes the protocol of a connection; its `connection_made` is called after the handshake.
    admission: counts the connection, under its protocol, from before the handshake. When the connection
    is lost, the maker of the protocol removes it from the admission.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        admission: ConnectionAdmission,
        *,
        handshake_s_max: float,
    ) -> None:
        self._context, self._make_protocol, self._admission = context, make_protocol, admission
        self._handshake_s_max = handshake_s_max
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}

    def __call__(self) -> asyncio.Protocol:
        return _Accepted(self._take_over)

    async def close(self) -> None:
        """Cut off the handshakes that have not ended, and wait until they end."""
        for sock in self._handshakes.values():
            _hang_up(sock)
        await asyncio.gather(*self._handshakes)

    def _take_over(self, transport: asyncio.Transport) -> None:
        address, accepted = address_of(transport), transport.get_extra_info("socket")
        try:
            sock = socket.socket(fileno=os.dup(accepted.fileno()))
        # The process has no file descriptor left for the duplicate.
        except OSError as error:
            log.warning("cannot accept remote=%s: %s", address, error)
            return
        finally:
            # This closes the transport's own descriptor; the connection stays open with the duplicate.
            transport.abort()
        sock.setblocking(False)
        protocol = self._make_protocol()
        self._admission.came(protocol, address, lambda _: _hang_up(sock))
        task = asyncio.get_running_loop().create_task(self._handshake(protocol, sock))
        self._handshakes[task] = sock
        task.add_done_callback(self._handshakes.pop)

    async def _handshake(self, protocol: asyncio.BaseProtocol, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s_max,
            )
        except BaseException as error:
            self._admission.admit(protocol)
            # A refusal of TLS is logged where it is made (`security/tls.py`).
            if not isinstance(error, OSError):
                raise


class _Accepted(asyncio.Protocol):
    """The protocol of an accepted connection until `take_over` gets its transport."""

    def __init__(self, take_over: Callable[[asyncio.Transport], None]) -> None:
        self._take_over = take_over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._take_over(cast("asyncio.Transport", transport))


def _hang_up(sock: socket.socket) -> None:
    """End the handshake on this socket, as if the other end had hung up."""
    # The other end may really have hung up.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class TlsSite(web.BaseSite):
    """A TCPSite whose TLS handshakes are counted by the application's admission."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext
    ) -> None:
        super().__init__(runner)
        assert runner.server is not None
        self._host, self._port = host, port
        self._acceptor = TlsAcceptor(
            context, runner.server, runner.app[DOOR], handshake_s_max=TLS_HANDSHAKE_S_MAX
        )

    @property
    def name(self) -> str:
        return f"https://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        self._server = await asyncio.get_running_loop().create_server(
            self._acceptor, self._host, self._port, backlog=self._backlog
        )

    async def stop(self) -> None:
        await super().stop()
        await self._acceptor.close()
