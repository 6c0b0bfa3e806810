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
from echo2d.net.security.tls import Tls, in_words


async def dial_back(order: DialBack, run_id: RunId, tls: Tls | None) -> str:
    """Dial the address; returns why the peer cannot be reached there, or "" if it can.

    With TLS, the peer must also show its certificate.
    """
    host, port = order.address.host, order.address.port
    try:
        async with asyncio.timeout(DIAL_BACK_S):
            context, name = (None, None) if tls is None else (tls.dialler, order.peer)
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=name
            )
            try:
                await _ask(order, run_id, reader, writer)
            finally:
                writer.transport.abort()
    # TimeoutError is an OSError.
    except (OSError, PeerFault) as error:
        return f"{host}:{port}: {in_words(error)}"
    return ""


async def _ask(
    order: DialBack, run_id: RunId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Returns once the other end has proved itself. PeerFault: it is not that peer."""
    expected, nonce = {order.peer: order.secret}, secrets.token_bytes(NONCE_BYTES)
    link = PeerLink(run_id=run_id, me=DIAL_BACK, secrets=expected, nonce=nonce, dialled=order.peer)
    writer.write(link.start())
    while data := await reader.read(len(link.get_buffer())):
        link.get_buffer()[: len(data)] = data
        match link.bytes_received(len(data)):
            case LinkOpened():
                return
            case LinkEnded(reason):
                raise PeerFault(reason)
    raise PeerFault("it hung up before it proved itself")
