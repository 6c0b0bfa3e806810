"""The coordinator's end of all control links: authentication, hello, then messages both ways.

    upgraded --Refused--> closed                   unknown or revoked peer, too many sessions,
        | Challenge, Answer, Hello (HELLO_TIMEOUT_S)                              another build
        v
      open --PeerConnected--> ... PeerSaid ... --PeerDisconnected--> closed

Exactly one PeerDisconnected follows every PeerConnected. The link is closed when the peer breaks
the protocol, falls silent, or does not read; a protocol fault is counted and reported to the peer.
The build of a peer is read before anything else of its Hello.
Not here: which of two connections of one peer stays, and what messages mean.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from aiohttp import WSCloseCode, WSMsgType, web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.codec import MESSAGE_BYTES_MAX
from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import PeerConnected, PeerDisconnected, PeerSaid
from echo2d.core.coordinator.events import CoordinatorEvent
from echo2d.core.protocol.addresses import IpNetwork, dialable
from echo2d.core.protocol.builds import HelloHead, hello_head, not_understood
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    TO_PEER,
    Goodbye,
    Hello,
    RefusalReason,
    Refused,
    ToPeer,
    Welcome,
)
from echo2d.errors import PeerFault
from echo2d.net.control.refusals import (
    FAULT_RETRY_S_MIN,
    PROTOCOL_FAULTS_MAX,
    ComeAgain,
    OtherBuilds,
    ProtocolFaults,
)
from echo2d.net.control.send_buffer import CLOSE_TIMEOUT_S, SendBuffer
from echo2d.net.http.admission import admit
from echo2d.net.security.auth import (
    ANSWER,
    AUTH_NONCE_BYTES,
    CHALLENGE,
    NONCE_HEADER,
    OWN_ROLES,
    PEER_HEADER,
    Denied,
    KnownPeer,
    Succession,
    challenge,
    is_answer,
    public_bytes,
)
from echo2d.net.security.tls import shows
from echo2d.this_build import THIS_BUILD

SESSIONS_MAX = 4096  # sockets of one process, well above the largest fleet
HELLO_TIMEOUT_S = 10.0
SILENCE_S_MAX = 60.0  # heartbeats come every few seconds
# The reason that a denied peer is sent, by the code of the denial. For all other codes it is "credential".
DENIALS: Mapping[str, RefusalReason] = {"revoked": "revoked", "convicted": "convicted"}
SLOW = "slow: it does not read what it is sent"
_CLOSED = "closed"
_LOST = "the connection was lost"
# The log quotes at most this many characters of a peer's goodbye.
GOODBYE_CHARS_MAX = 200

log = logging.getLogger("echo2d.control")


class _Refusal(Exception):  # noqa: N818 - an outcome of the handshake, not an error
    """The peer is sent `refused`. is_news: the refusal is worth a line in the log."""

    def __init__(self, refused: Refused, *, is_news: bool = True) -> None:
        super().__init__(refused.detail)
        self.refused, self.is_news = refused, is_news


def _is_fault(refused: Refused) -> bool:
    """Whether a message broke the protocol."""
    return refused.reason == "protocol" and not refused.permanent


def _refusal(
    reason: RefusalReason, detail: str, *, permanent: bool, retry_s: float = 0.0
) -> _Refusal:
    return _Refusal(Refused(reason, detail, permanent, retry_s))


@dataclass(slots=True)
class _Session:
    """An open control link."""

    known: KnownPeer
    send_buffer: SendBuffer
    name: str
    # For the log: why the session ends, as given in a refusal or in the peer's goodbye. Empty: not known.
    why: str = ""


class Sessions:
    """All open control links.

    successions: how the run's key followed from the earlier ones.
    emit: takes events, and waits while too many are queued. peer_networks: networks in which peers
    may announce addresses, besides the address from which their control link comes.
    """

    def __init__(
        self,
        run_key: Ed25519PrivateKey,
        *,
        successions: tuple[Succession, ...] = (),
        known_peer: Callable[[PeerId], KnownPeer],
        emit: Callable[[CoordinatorEvent], Awaitable[None]],
        peer_networks: Sequence[IpNetwork] = (),
    ) -> None:
        self._run_key, self._successions = run_key, successions
        self._peer_networks = peer_networks
        self._known_peer = known_peer
        self._emit = emit
        self._open: dict[SessionId, _Session] = {}
        self._opening = 0
        self._ids = count()
        self.faults = ProtocolFaults()
        self._come_again = ComeAgain()
        self.other_builds = OtherBuilds(self._come_again)

    def peers(self) -> frozenset[PeerId]:
        """The peers that have an open session."""
        return frozenset(session.known.peer for session in self._open.values())

    def peer(self, session: SessionId) -> PeerId | None:
        """The peer of this session, while it is open."""
        return self._open[session].known.peer if session in self._open else None

    def send(self, message: ToPeer, *to: SessionId) -> None:
        """Queue the message for these sessions, and skip those that are closed."""
        if isinstance(message, Welcome):
            message = replace(message, build=THIS_BUILD)
        data = TO_PEER.encode(message)
        for session in (self._open[each] for each in to if each in self._open):
            if isinstance(message, Refused):
                session.why = f"refused ({message.reason}): {message.detail}"
            if isinstance(message, Refused) and _is_fault(message):
                self._tell_fault(session, message.detail)
            else:
                session.send_buffer.put(data)

    def close(self, session: SessionId) -> None:
        """Close the session after its queued messages are sent."""
        if session in self._open:
            self._open[session].send_buffer.finish()

    def close_all(self) -> None:
        for session in tuple(self._open):
            self.close(session)

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """GET /v1/worker."""
        socket = web.WebSocketResponse(
            max_msg_size=MESSAGE_BYTES_MAX, compress=False, timeout=CLOSE_TIMEOUT_S
        )
        await socket.prepare(request)
        self._opening += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                known, hello = await self._handshake(request, socket)
        except _Refusal as refusal:
            if refusal.is_news:
                log.info(
                    "refused remote=%s reason=%s detail=%s",
                    request.remote,
                    refusal.refused.reason,
                    refusal,
                )
            await _send_last(socket, TO_PEER.encode(refusal.refused))
            return socket
        except (TimeoutError, ConnectionError):
            await socket.close()
            return socket
        finally:
            self._opening -= 1
        admit(request)
        await self._serve(request, socket, known, hello)
        return socket

    async def _handshake(
        self, request: web.Request, socket: web.WebSocketResponse
    ) -> tuple[KnownPeer, Hello]:
        known = self._known(PeerId(request.headers.get(PEER_HEADER, "")))
        if not shows(request.transport, known.peer):
            raise _refusal(
                "credential", "this connection does not show the peer's certificate", permanent=True
            )
        if len(self._open) + self._opening > SESSIONS_MAX:
            raise _refusal("busy", f"{SESSIONS_MAX} peers are connected already", permanent=False)
        try:
            await self._prove(request, socket, known)
        except PeerFault as fault:
            raise _refusal("protocol", str(fault), permanent=False) from fault
        if refused_s := self.faults.refused_s(known.peer, time.monotonic()):
            raise _refusal(
                "protocol",
                f"this peer broke the protocol {PROTOCOL_FAULTS_MAX} times; "
                f"it is refused for {refused_s:.0f} s more",
                permanent=False,
                retry_s=refused_s,
            )
        data = await _next_binary(socket)
        head = hello_head(data)
        if head is not None and not THIS_BUILD.speaks_with(head.build):
            raise self._other_build(known, head)
        try:
            hello = TO_COORDINATOR.decode(data)
        except PeerFault as fault:
            raise _Refusal(self._fault(known, str(fault))) from fault
        if not isinstance(hello, Hello):
            raise _refusal("protocol", "the first message is a Hello", permanent=True)
        own = hello.kind in OWN_ROLES
        if own != (known.role in OWN_ROLES) or (own and hello.kind != known.role):
            raise _refusal(
                "credential",
                f"a {known.role}'s credential is not for a {hello.kind}",
                permanent=True,
            )
        self.other_builds.understood(known.peer)
        if not own:  # our own children listen where the operator says
            hello = replace(
                hello, listen=dialable(hello.listen, request.remote, self._peer_networks)
            )
        # The peer is looked up again: it may have been cordoned or revoked since the handshake began.
        return self._known(known.peer), hello

    def _known(self, peer: PeerId) -> KnownPeer:
        try:
            return self._known_peer(peer)
        except Denied as denied:
            raise _refusal(
                DENIALS.get(denied.code, "credential"), denied.detail, permanent=True
            ) from denied

    def _other_build(self, known: KnownPeer, head: HelloHead) -> _Refusal:
        who = "peer" if known.role in OWN_ROLES else known.role
        retry_s, is_news = self.other_builds.refuse(known.peer, known.token, head, time.monotonic())
        text = not_understood(who, head.build, THIS_BUILD)
        return _Refusal(Refused("build", text, permanent=False, retry_s=retry_s), is_news=is_news)

    def _tell_fault(self, session: _Session, detail: str) -> None:
        session.send_buffer.put(TO_PEER.encode(self._fault(session.known, detail)))

    def _fault(self, known: KnownPeer, detail: str) -> Refused:
        """Count a message that broke the protocol, and answer it."""
        # A refusal of one of our own child processes would stop the run.
        if known.role in OWN_ROLES:
            return Refused("protocol", detail, permanent=False)
        now = time.monotonic()
        self.faults.count(known.peer, now)
        retry_s = self._come_again.after_s(
            known.peer, known.token, now, at_least_s=FAULT_RETRY_S_MIN
        )
        return Refused("protocol", detail, permanent=False, retry_s=retry_s)

    async def _prove(
        self, request: web.Request, socket: web.WebSocketResponse, known: KnownPeer
    ) -> None:
        try:
            client_nonce = bytes.fromhex(request.headers.get(NONCE_HEADER, ""))
        except ValueError:
            client_nonce = b""
        if len(client_nonce) != AUTH_NONCE_BYTES:
            raise PeerFault(f"{NONCE_HEADER} is {AUTH_NONCE_BYTES} bytes in hex")
        asked = challenge(self._run_key, client_nonce, known.peer, self._successions)
        await socket.send_bytes(CHALLENGE.encode(asked))
        given = ANSWER.decode(await _next_binary(socket))
        if not is_answer(known.public_key, public_bytes(self._run_key), client_nonce, asked, given):
            raise _refusal("credential", "the signature is not this peer's", permanent=True)

    async def _serve(
        self, request: web.Request, socket: web.WebSocketResponse, known: KnownPeer, hello: Hello
    ) -> None:
        number = SessionId(next(self._ids))
        session = _Session(known, SendBuffer(socket), hello.name)
        self._open[number] = session
        log.info(
            "connected peer=%s name=%s kind=%s session=%d",
            known.peer,
            hello.name,
            hello.kind,
            number,
        )
        try:
            await self._emit(
                PeerConnected(number, known.peer, hello, known.trusted, known.cordoned, known.token)
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_send(session.send_buffer, request))
                await self._converse(socket, number, session)
        finally:
            self._open.pop(number, None)

    async def _converse(
        self, socket: web.WebSocketResponse, number: SessionId, session: _Session
    ) -> None:
        """Read until either side closes. PeerDisconnected is emitted without waiting for the peer to notice."""
        reason = _CLOSED
        try:
            async with asyncio.timeout(SILENCE_S_MAX) as silence:
                while (data := await _next(socket)) is not None:
                    _restart(silence)
                    message = TO_COORDINATOR.decode(data)
                    if isinstance(message, Goodbye):
                        session.why = f"it said goodbye ({message.reason[:GOODBYE_CHARS_MAX]})"
                    await self._emit(PeerSaid(number, message))
        except TimeoutError:
            reason = f"silent for {SILENCE_S_MAX:g} s"
        except PeerFault as fault:
            reason = f"protocol: {fault}"
            self._tell_fault(session, str(fault))
        finally:
            del self._open[number]
            session.send_buffer.finish()
            reason = SLOW if session.send_buffer.slow else reason
            log.info(
                "disconnected peer=%s name=%s session=%d reason=%s",
                session.known.peer,
                session.name,
                number,
                session.why or (_LOST if _is_lost(socket, reason) else reason),
            )
            await self._emit(PeerDisconnected(number, reason))


async def _send(send_buffer: SendBuffer, request: web.Request) -> None:
    """Send until the link ends, then cut the connection if the peer has not read everything.

    Such a peer no longer reads. A read from it could hang, because the read also answers the peer's pings.
    """
    try:
        await send_buffer.run()
    finally:
        transport = request.transport
        if transport is not None and (send_buffer.slow or transport.get_write_buffer_size()):
            transport.abort()


def _is_lost(socket: web.WebSocketResponse, reason: str) -> bool:
    """Whether the link ended without a close by the peer, as when it is killed or its network fails."""
    return reason == _CLOSED and socket.close_code in (None, WSCloseCode.ABNORMAL_CLOSURE)


def _restart(silence: asyncio.Timeout) -> None:
    """Restart the silence timer, but not at every message, because a restart costs as much as a message."""
    until, last = time.monotonic() + SILENCE_S_MAX, silence.when()
    # Restart it at most every tenth of SILENCE_S_MAX. So a session may be given up a tenth sooner.
    if last is not None and until - last > 0.1 * SILENCE_S_MAX:
        silence.reschedule(until)


async def _next(socket: web.WebSocketResponse) -> bytes | None:
    """The next binary frame; None when the link is closed. PeerFault: text, or too long."""
    try:
        message = await socket.receive()
    except ConnectionError:  # while a ping is answered
        return None
    if message.type is WSMsgType.BINARY:
        data: bytes = message.data
        return data
    if message.type is WSMsgType.TEXT:
        raise PeerFault("expected a binary frame")
    if message.type is WSMsgType.ERROR:
        raise PeerFault(f"broken frame: {socket.exception()}")
    return None


async def _next_binary(socket: web.WebSocketResponse) -> bytes:
    data = await _next(socket)
    if data is None:
        raise PeerFault("closed during the handshake")
    return data


async def _send_last(socket: web.WebSocketResponse, data: bytes) -> None:
    send_buffer = SendBuffer(socket)
    send_buffer.put(data)
    send_buffer.finish()
    await send_buffer.run()
