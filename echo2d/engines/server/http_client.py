"""Calls and streams over HTTP to an inference server. An error says whether a failed call may have had
its effect.

An administrator's calls have connections of their own, because otherwise a pause would wait behind hundreds of
streams. A server's subclass adds its paths. Nothing is decided here.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from echo2d.engines.server.admission import ServerLoad
from echo2d.errors import EngineFault

# For a call that waits only for a busy scheduler, which answers between two batches.
CALL_S_MAX = 30.0
_CONNECT_S_MAX = 10.0  # the server is on this machine
# The longest time between two chunks of a request. It is below the 120 s without a token after which a worker
# gives a lease back.
STREAM_S_MAX = 100.0
# The longest body of an answer. Checksums of thousands of tensors take less than a megabyte.
_BODY_BYTES_MAX = 64 << 20


class ServerRefused(EngineFault):
    """The server answered and refused."""


class Lost(EngineFault):
    """There was no answer; the call may or may not have had its effect."""


class ServerClient(ABC):
    """One server at `url`: http://HOST:PORT, or unix:PATH of a socket. Keys are secret, so they go into headers and
    nowhere else.
    """

    NAME: ClassVar[str]  # name of the server's kind, for errors
    ADAPTERS: ClassVar[str] = "/"  # the path under which they are loaded
    CONTEXT_FLAG: ClassVar[str]  # decides how long a prompt with its answer may be
    # These are known once the server was probed.
    quantization = ""  # of the weights in memory, such as "fp8"; empty: none
    tells_experts = False  # at the end of a request, if it is asked to
    kv_dtype = ""  # of the KV cache
    context_max: int | None = None  # tokens of prompt and output; None: those of the model
    adapters_max: int | None = None  # adapters beside each other; None: no limit is known
    keeps_admin: ClassVar[bool] = True  # whether an administrator's connection serves several calls

    def __init__(self, url: str, api_key: str = "", admin_key: str = "") -> None:
        socket = url.removeprefix("unix:")
        self.url = url.rstrip("/") if socket == url else "http://localhost"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S_MAX)

        def session(key: str, *, closes: bool = False) -> aiohttp.ClientSession:
            connector = (
                aiohttp.TCPConnector(limit=0, force_close=closes)
                if socket == url
                else aiohttp.UnixConnector(socket, limit=0, force_close=closes)
            )
            return aiohttp.ClientSession(
                connector=connector, headers=_bearer(key), timeout=timeout, trust_env=False
            )

        self._work = session(api_key)
        self._admin = session(admin_key or api_key, closes=not self.keeps_admin)

    async def require_refit(self, _tensors: Collection[str], _base: Path | None) -> None:
        """EngineFault: it cannot load a model with these tensors after another one.

        base: the model's directory, if it is the base of adapters.
        """
        return

    @abstractmethod
    async def ready(self) -> bool:
        """Whether a starting server takes requests."""

    @abstractmethod
    async def probe(self) -> None:
        """Find out what the server can do. EngineFault: echo2d cannot use it."""

    @abstractmethod
    async def weights(self) -> str:
        """The label of its weights."""

    @abstractmethod
    async def load(self) -> ServerLoad:
        """EngineFault: there is no answer, or it lacks these numbers."""

    @abstractmethod
    def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Stream the chunks of one request."""

    @abstractmethod
    async def abort(self, rid: str) -> None: ...

    @abstractmethod
    async def abort_all(self) -> None: ...

    async def close(self) -> None:
        await self._work.close()
        await self._admin.close()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The chunks of one request."""
        if self._work.closed:
            raise Lost(f"{self.NAME} {path}: the connection to the server is closed")
        try:
            silence = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_S_MAX, sock_read=STREAM_S_MAX
            )
            async with self._work.post(self.url + path, json=body, timeout=silence) as response:
                if response.status != 200:
                    reason = error_text(_decoded(await response.read()))
                    raise ServerRefused(f"{self.NAME} {path}: {response.status} {reason}")
                async for event in _events(response.content):
                    if event == b"[DONE]":
                        return
                    yield json.loads(event)
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise Lost(f"{self.NAME} {path}: {type(error).__name__} {error}"[:300]) from error

    async def ask_admin(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, Any]:
        """The status and the body of the answer to an administrator's call. Lost: no answer."""
        return await self._ask(self._admin, method, path, body, timeout_s)

    async def call(self, method: str, path: str) -> Any:
        """The answer to a call that needs no administrator's key."""
        status, answer = await self._ask(self._work, method, path, None, CALL_S_MAX)
        if status != 200:
            raise ServerRefused(f"{self.NAME} {path}: {status} {error_text(answer)}")
        return answer

    async def facts(self, path: str) -> Mapping[str, Any]:
        answer = await self.call("GET", path)
        if not isinstance(answer, dict):
            raise ServerRefused(
                f"{self.NAME} {path}: the answer is no JSON object; is this a {self.NAME} server?"
            )
        return answer

    async def load_adapter(self, label: str, directory: Path, *, timeout_s: float) -> None:
        """Load an adapter under this name. The server reads the directory again whenever it has evicted the adapter."""
        path, body = (
            f"{self.ADAPTERS}load_lora_adapter",
            {"lora_name": label, "lora_path": str(directory)},
        )
        try:
            await self.order(path, body, timeout_s=timeout_s)
        except ServerRefused:
            # It has the name already if the answer to an earlier call was lost.
            await self.unload_adapter(label)
            await self.order(path, body, timeout_s=timeout_s)

    async def unload_adapter(self, label: str) -> None:
        with suppress(ServerRefused):
            await self.order(f"{self.ADAPTERS}unload_lora_adapter", {"lora_name": label})

    async def has_adapter(self, label: str) -> bool:
        """Whether it lists the adapter."""
        listed = (await self.facts("/v1/models")).get("data")
        return any(isinstance(each, dict) and each.get("id") == label for each in listed or ())

    async def order(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float = CALL_S_MAX
    ) -> None:
        status, answer = await self._ask(self._admin, "POST", path, body, timeout_s)
        if status != 200:
            raise ServerRefused(f"{self.NAME} {path}: {status} {error_text(answer)}")

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> tuple[int, Any]:
        if session.closed:
            raise Lost(f"{self.NAME} {path}: the connection to the server is closed")
        try:
            async with (
                asyncio.timeout(timeout_s),
                session.request(method, self.url + path, json=body) as response,
            ):
                answer = await response.content.read(_BODY_BYTES_MAX)
                while not response.content.at_eof():
                    more = await response.content.read(_BODY_BYTES_MAX)
                    if len(answer) + len(more) > _BODY_BYTES_MAX:
                        raise ServerRefused(
                            f"{self.NAME} {path}: an answer of more than {_BODY_BYTES_MAX} bytes"
                        )
                    answer += more
                return response.status, _decoded(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Lost(f"{self.NAME} {path}: {type(error).__name__} {error}"[:300]) from error


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _decoded(body: bytes) -> Any:
    """The JSON value, or the text if it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    waiting = b""
    async for received in content.iter_any():
        *events, waiting = (waiting + received).split(b"\n\n")
        # An event of a cumulative stream repeats all tokens, 40 bytes each.
        if len(waiting) > 64 << 20:
            raise ValueError("an event of more than 64 MiB")
        for event in events:
            yield event.removeprefix(b"data:").strip()


def error_text(body: object) -> str:
    """The reason in an error's body, in any form that servers use."""
    error = body
    if isinstance(body, dict):
        error = body.get("error") or body.get("error_message") or body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]
