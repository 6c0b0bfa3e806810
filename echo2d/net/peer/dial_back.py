"""Dials a peer to check that it can be reached, using the first half of a peer link's handshake.

The accepting end is the first to prove that it knows the secret, over a fresh nonce. This end then
hangs up, so no link opens and the peer's work is not disturbed.
Not here: the choice of the peer and its address.
"""

import asyncio
import secrets

from echo2d.core.base.ids import RunId
from echo2d.core.cluster.events import DialBack
from echo2d.core.cluster.reachability import DIAL_BACK_S
from echo2d.core.protocol.peer_handshake import DIAL_BACK, NONCE_BYTES
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import LinkEnded, LinkOpened
from echo2d.errors import PeerFault
from echo2d.net.security.sealing import HANDSHAKE_READ_BYTES, KeyExchange
from echo2d.net.security.tls import Tls, in_words


async def dial_back(order: DialBack, run_id: RunId, tls: Tls | None) -> str:
    """Dial the address; returns why the peer cannot be reached there, or "" if it can.

    With TLS, the peer must also show its certificate.
    """
    host, port = order.address.host, order.address.port
    try:
        async with asyncio.timeout(DIAL_BACK_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await _ask(order, run_id, tls, reader, writer)
            finally:
                writer.transport.abort()
    # TimeoutError is an OSError.
    except (OSError, PeerFault) as error:
        return f"{host}:{port}: {in_words(error)}"
    return ""


async def _ask(
    order: DialBack,
    run_id: RunId,
    tls: Tls | None,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Return once the other end has proved that it is the peer. PeerFault: it is not that peer."""
    expected, nonce = {order.peer: order.secret}, secrets.token_bytes(NONCE_BYTES)
    link = PeerLink(run_id=run_id, me=DIAL_BACK, secrets=expected, nonce=nonce, dialled=order.peer)
    data = b""
    if tls is not None:
        exchange = KeyExchange(tls.dialler, expected=order.peer)
        while exchange.seal is None:
            exchange.received(data)
            writer.write(exchange.to_send())
            data = exchange.rest if exchange.seal else await _read(reader, HANDSHAKE_READ_BYTES)
        link.seal(exchange.seal)
    writer.write(link.start())
    while True:
        buffer = link.get_buffer()
        data = data or await _read(reader, len(buffer))
        count = min(len(data), len(buffer))
        buffer[:count], data = data[:count], data[count:]
        match link.bytes_received(count):
            case LinkOpened():
                return
            case LinkEnded(reason):
                raise PeerFault(reason)


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    data = await reader.read(most)
    if not data:
        raise PeerFault("it hung up before it proved itself")
    return data
