"""A peer's end of the control link: it enrols once, then stays connected to the coordinator.

    away --dial, prove, hello--> welcomed --closed, reset, silent--> away (backoff with jitter)
      |                             |
      +--- permanently refused -----+--> OperatorFault: a retry with this credential is useless
      +--- refused for a while -----+--> away, for the time that the coordinator asks for

The backoff starts again at its shortest wait only after a link that has lasted. A link that opens and
breaks at once counts as a failure, for example between two builds that misunderstand each other.
One ControlLink belongs to one daemon. Not here: what messages mean.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import aiohttp
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.codec import MESSAGE_BYTES_MAX, Codec
from echo2d.core.base.ids import PeerId, RunId
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    TO_PEER,
    Heartbeat,
    Hello,
    Refused,
    ToCoordinator,
    ToPeer,
    Welcome,
)
from echo2d.errors import IntegrityFault, OperatorFault, PeerFault
from echo2d.net.backoff import BACKOFF_S_MAX, CONNECT_TIMEOUT_S, NO_COORDINATOR, Backoff
from echo2d.net.control.send_buffer import CLOSE_TIMEOUT_S, SendBuffer
from echo2d.net.security.auth import (
    ANSWER,
    AUTH_NONCE_BYTES,
    CONTROL_LINK_PATH,
    ENROL_PATH,
    NONCE_HEADER,
    PEER_HEADER,
    Challenge,
    Succession,
    TokenFile,
    answer,
    enrol_proof,
    last_of,
    peer_id_of,
    public_bytes,
    run_id_of,
)
from echo2d.net.security.tls import Tls, in_words, is_for_good, to_coordinator
from echo2d.net.security.urls import CoordinatorUrls
from echo2d.this_build import THIS_BUILD

# The longest wait that a coordinator can ask of a peer. The peer adds up to a tenth of the wait, at random.
SENT_AWAY_S_MAX = 1800.0

_OPENING = Codec({"Challenge": Challenge, "Refused": Refused}, bytes_max=16 << 10)

log = logging.getLogger("echo2d.control")


@dataclass(slots=True)
class Identity:
    """A peer's key and the public key of its run."""

    key: Ed25519PrivateKey
    run_key: bytes
    # For all connections of the peer. None: they have no TLS.
    tls: Tls | None = None
    # The run's id. Empty: the id that follows from run_key.
    run: str = ""
    # How often the run's authority was changed.
    number: int = 0
    # Called when the old run key has named a new one, before the peer obeys the new one.
    on_follow: Callable[[Succession], Awaitable[None]] | None = None

    @staticmethod
    def of(
        url: str, token: TokenFile, key: Ed25519PrivateKey, followed: Succession | None = None
    ) -> "Identity":
        """followed: the authority that this peer obeys, if it is newer than the token's.

        OperatorFault: the URL and the token file disagree about TLS.
        """
        now = followed or Succession(bytes.fromhex(token.run_key), token.authority, token.number)
        tls = Tls.of(url, now.authority, promised=token.url)
        return Identity(key, now.run_key, tls, token.run_id, now.number)

    @property
    def peer(self) -> PeerId:
        return peer_id_of(public_bytes(self.key))

    @property
    def run_id(self) -> RunId:
        return RunId(self.run) if self.run else run_id_of(self.run_key)

    async def follow(self, successions: Sequence[Succession]) -> None:
        """Obey the newest authority to which these successions lead from the present one, if any."""
        found = last_of(self.run_key, self.number, successions)
        if found is None:
            return
        if self.on_follow is not None:
            await self.on_follow(found)
        if self.tls is not None:
            self.tls.trust(found.authority)
        self.run_key, self.number = found.run_key, found.number
        log.warning("the authority of this run was changed number=%d", found.number)


class LinkOwner(Protocol):
    """The daemon that owns a control link.

    Calls come in this order, again and again: connected, any number of received, disconnected.
    """

    def hello(self) -> Hello:
        """The daemon's current hello; called at every connection."""

    def heartbeat(self) -> Heartbeat: ...

    async def connected(self, welcome: Welcome) -> None: ...

    async def received(self, message: ToPeer) -> None:
        """Handle a message after the welcome. The link reads no further until this returns."""

    async def disconnected(self, reason: str) -> None: ...


class _Lost(Exception):  # noqa: N818 - a connection's ordinary end
    """The connection failed or was lost; another attempt may help.

    retry_s: the wait in seconds that the coordinator asked for; 0: it asked for none.
    """

    def __init__(self, text: str, *, retry_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_s = retry_s


async def enrol(
    url: str, token: TokenFile, identity: Identity, *, rng: random.Random, patience_s: float
) -> None:
    """Bind the peer's key to its token. Afterwards `identity.tls` presents the certificate that
    the coordinator sent.

    OperatorFault: the coordinator refused, or none answered within `patience_s`.
    """
    urls, key, tls = CoordinatorUrls(url), identity.key, identity.tls
    body = {"key": public_bytes(key).hex(), "proof": enrol_proof(key, token.secret).hex()}
    backoff, loop = Backoff(rng), asyncio.get_running_loop()
    deadline, tries = loop.time() + patience_s, 0
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    ) as http:
        while True:
            try:
                certificate = await _enrol_once(http, urls, token, body, tls)
                return (
                    None if tls is None else await asyncio.to_thread(tls.present, key, certificate)
                )
            except _Lost as lost:
                delay_s = backoff.next_s()
                if loop.time() + delay_s > deadline:
                    raise OperatorFault(f"cannot reach the coordinator at {urls}: {lost}") from lost
                tries += 1
                if tries == len(urls.all):
                    log.warning(NO_COORDINATOR, urls)
                log.info("unreachable url=%s reason=%s", urls.url, lost)
                urls.try_next()
                await asyncio.sleep(delay_s)


async def _enrol_once(
    http: aiohttp.ClientSession,
    urls: CoordinatorUrls,
    token: TokenFile,
    body: dict[str, str],
    tls: Tls | None,
) -> str:
    url = urls.url
    headers = {"Authorization": f"Bearer {token.secret}"}
    try:
        async with http.post(
            url + ENROL_PATH, json=body, headers=headers, **to_coordinator(tls)
        ) as response:
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise _Lost(f"HTTP {response.status}")
            reply: Any = await response.json(content_type=None)
            found = reply.get("run_id") if response.ok else reply.get("detail")
            certificate = str(reply.get("certificate"))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if is_for_good(error) and len(urls.all) == 1:
            raise OperatorFault(f"{url}: {in_words(error)}") from error
        raise _Lost(in_words(error) + _hint(url, error)) from error
    except (ValueError, AttributeError) as error:
        raise OperatorFault(f"{url} is not an echo2d coordinator") from error
    if not response.ok:
        raise OperatorFault(f"the coordinator at {url} refused to enrol this worker: {found}")
    if found != token.run_id:
        raise OperatorFault(
            f"the token file belongs to run {token.run_id}, but {url} serves run {found}"
        )
    return certificate


def _hint(url: str, error: Exception) -> str:
    closed = isinstance(error, aiohttp.ServerDisconnectedError) and urlsplit(url).scheme == "http"
    return "; if it speaks TLS, its URL is https://" if closed else ""


class ControlLink:
    """Keeps one control link connected."""

    def __init__(
        self, url: str, identity: Identity, owner: LinkOwner, *, rng: random.Random
    ) -> None:
        self._urls = CoordinatorUrls(url)
        self._identity = identity
        self._owner = owner
        self._rng, self._backoff = rng, Backoff(rng)
        self._send_buffer: SendBuffer | None = None
        self._leaving = asyncio.Event()
        self._welcomed = False  # by the coordinator that was dialled last

    def leave(self) -> None:
        """Send what is queued, close, and let `run` return."""
        self._leaving.set()
        if self._send_buffer is not None:
            self._send_buffer.finish()

    def send(self, message: ToCoordinator) -> None:
        """Queue a message. It is dropped while the link is down, as `disconnected` has reported."""
        if self._send_buffer is not None:
            self._send_buffer.put(TO_COORDINATOR.encode(message))

    async def run(self) -> None:
        """Stay connected until `leave`. OperatorFault: permanently refused, or no coordinator."""
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_S)
        ) as http:
            while not self._leaving.is_set():
                try:
                    await self._once(http)
                except _Lost as lost:
                    await self._wait(str(lost), retry_s=lost.retry_s)
                    if not self._welcomed:
                        self._urls.try_next()

    async def _wait(self, reason: str, *, retry_s: float = 0.0) -> None:
        """Wait before the next attempt. retry_s: the wait that the coordinator asked for; 0: none."""
        if self._leaving.is_set():
            return
        delay_s = self._backoff.next_s()
        level = logging.INFO
        if retry_s > 0:
            level = logging.WARNING
            delay_s = max(delay_s, min(retry_s, SENT_AWAY_S_MAX) * self._rng.uniform(1.0, 1.1))
        log.log(
            level, "disconnected url=%s reason=%s retry_s=%.2f", self._urls.url, reason, delay_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._leaving.wait()

    async def _once(self, http: aiohttp.ClientSession) -> NoReturn:
        """Keep one connection until it ends, which always raises _Lost or OperatorFault."""
        nonce, loop = secrets.token_bytes(AUTH_NONCE_BYTES), asyncio.get_running_loop()
        url, self._welcomed = self._urls.url, False
        try:
            async with await self._dial(http, nonce) as socket:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    welcome = await self._open(socket, nonce)
                opened_at, self._welcomed = loop.time(), True
                try:
                    await self._converse(socket, welcome)
                finally:
                    if loop.time() - opened_at >= BACKOFF_S_MAX:
                        self._backoff.reset()
        except aiohttp.WSServerHandshakeError as error:
            if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise _Lost(f"HTTP {error.status}") from error
            raise OperatorFault(
                f"{url} is not an echo2d coordinator (HTTP {error.status})"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Lost(in_words(error)) from error
        except IntegrityFault as fault:
            raise OperatorFault(
                f"{url}: {fault}; does the token file belong to another run?"
            ) from fault
        except PeerFault as fault:
            raise _Lost(str(fault)) from fault

    async def _dial(
        self, http: aiohttp.ClientSession, nonce: bytes
    ) -> aiohttp.ClientWebSocketResponse:
        headers = {PEER_HEADER: self._identity.peer, NONCE_HEADER: nonce.hex()}
        # A coordinator that does not answer a WebSocket ping within half of this time is gone.
        return await http.ws_connect(
            self._urls.url + CONTROL_LINK_PATH,
            headers=headers,
            max_msg_size=MESSAGE_BYTES_MAX,
            heartbeat=30.0,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
            **to_coordinator(self._identity.tls),
        )

    async def _open(self, socket: aiohttp.ClientWebSocketResponse, nonce: bytes) -> Welcome:
        asked = _OPENING.decode(await _binary(socket))
        if isinstance(asked, Refused):
            raise _refused(asked)
        await self._identity.follow(asked.successions)
        given = answer(self._identity.key, self._identity.run_key, nonce, asked)
        await socket.send_bytes(ANSWER.encode(given))
        await socket.send_bytes(TO_COORDINATOR.encode(_named(self._owner.hello())))
        first = TO_PEER.decode(await _binary(socket))
        if isinstance(first, Refused):
            raise _refused(first)
        if not isinstance(first, Welcome):
            raise PeerFault("expected Welcome or Refused as the coordinator's first message")
        return first

    async def _converse(
        self, socket: aiohttp.ClientWebSocketResponse, welcome: Welcome
    ) -> NoReturn:
        self._send_buffer = send_buffer = SendBuffer(socket)
        await self._owner.connected(welcome)
        ended: Exception = _Lost("cancelled")
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(send_buffer.run()),
                    tasks.create_task(self._beat(welcome.heartbeat_s)),
                ]
                try:
                    await self._read(socket)
                except (OperatorFault, PeerFault, _Lost) as error:
                    ended = error
                finally:
                    for helper in helpers:
                        helper.cancel()
        finally:
            self._send_buffer = None
            await self._owner.disconnected(str(ended))
        raise ended

    async def _beat(self, every_s: float) -> None:
        while True:
            self.send(self._owner.heartbeat())
            await asyncio.sleep(every_s)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> NoReturn:
        while True:
            message = TO_PEER.decode(await _binary(socket))
            if isinstance(message, Refused):
                raise _refused(message)
            await self._owner.received(message)


async def _binary(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    message = await socket.receive()
    if message.type is aiohttp.WSMsgType.BINARY:
        data: bytes = message.data
        return data
    if message.type is aiohttp.WSMsgType.TEXT:
        raise PeerFault("expected a binary frame")
    raise _Lost(str(socket.exception() or "closed by the coordinator"))


def _refused(refused: Refused) -> Exception:
    text = f"the coordinator refused this peer ({refused.reason}): {refused.detail}"
    return OperatorFault(text) if refused.permanent else _Lost(text, retry_s=refused.retry_s)


def _named(hello: Hello) -> Hello:
    """The hello with this build's name, unless it has one."""
    build = hello.build
    return hello if build.name else replace(hello, build=replace(build, name=THIS_BUILD.name))
