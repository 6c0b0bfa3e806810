"""SGLang's HTTP: calls and streams, errors told apart by what they leave behind. Decides nothing.

Administration has connections of its own: behind hundreds of streams, a pause would wait for its turn.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from echo2d.engines.server.admission import ServerLoad
from echo2d.engines.server.continuation import error_text
from echo2d.engines.sglang.compat import Dialect, dialect_of
from echo2d.errors import EngineFault

CALL_S_MAX = (
    30.0  # of a call that has nothing to wait for; a busy scheduler answers between two batches
)
CONNECT_S_MAX = 10.0  # it is on this machine
STREAM_S_MAX = 100.0  # between two chunks of a request: below the 120 s after which a worker gives a lease back
BODY_BYTES_MAX = (
    64 << 20
)  # of an answer; /server_info and checksums of thousands of tensors are below a megabyte
CHUNK_BYTES_MAX = (
    64 << 20
)  # of one event of a stream: a cumulative one repeats all tokens, 40 bytes each
_EVENT_END = b"\n\n"


class ServerRefused(EngineFault):
    """The server answered, and it is no."""


class Lost(EngineFault):
    """There is no answer: it may or may not have been done."""


class SglangClient:
    """One server at `url`. Keys are secrets: they go into headers and nowhere else."""

    def __init__(self, url: str, *, api_key: str = "", admin_key: str = "") -> None:
        self.url = url.rstrip("/")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX)
        self._work = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=_bearer(api_key),
            timeout=timeout,
            trust_env=False,
        )
        admin = admin_key or api_key
        self._admin = aiohttp.ClientSession(
            headers=_bearer(admin), timeout=timeout, trust_env=False
        )

    async def close(self) -> None:
        await self._work.close()
        await self._admin.close()

    async def ready(self) -> bool:
        """Whether a server that starts takes requests. Not for later: while paused it would call itself sick for it."""
        try:
            await self.call("GET", "/health")
        except EngineFault:
            return False
        return True

    async def probe(self) -> Dialect:
        """Only the version is kept of /server_info: it holds the keys."""
        info = await self._facts("/server_info")
        try:
            paths = (await self.call("GET", "/openapi.json"))["paths"].keys()
        except (ServerRefused, KeyError, AttributeError, TypeError):
            paths = None
        return dialect_of(str(info.get("version", "")), paths)

    async def model(self) -> Mapping[str, Any]:
        return await self._facts("/model_info")

    async def load(self) -> ServerLoad:
        """EngineFault also where the answer has no such numbers."""
        answer = await self.call("GET", "/v1/loads?include=core")
        try:
            ranks = answer["loads"]
            return ServerLoad(
                sum(int(rank["num_running_reqs"]) for rank in ranks),
                sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                max(float(rank["token_usage"]) for rank in ranks),
                sum(int(rank["max_running_requests"]) for rank in ranks),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused(f"SGLang's load is not as expected: {error}") from error

    async def pause(self, mode: str) -> None:
        await self._order("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._order("/continue_generation", {"torch_empty_cache": False})

    async def abort_all(self) -> None:
        await self._order("/abort_request", {"rid": "", "abort_all": True})

    async def abort(self, rid: str) -> None:
        """It must be as long as all others: SGLang aborts every request whose id begins with it."""
        await self._order("/abort_request", {"rid": rid})

    async def flush(self) -> None:
        await self._order("/flush_cache?timeout=5", {})

    async def relabel(self, label: str) -> None:
        """Without `abort_all_requests` it would abort them."""
        await self._order(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )

    async def update(self, body: Mapping[str, Any], *, timeout_s: float) -> tuple[bool, str]:
        """What an update from disk says of itself. Lost: no answer."""
        status, answer = await self._ask(
            self._admin, "POST", "/update_weights_from_disk", body, timeout_s
        )
        told = answer if isinstance(answer, dict) else {}
        return status == 200 and told.get("success") is True, error_text(
            told.get("message", answer)
        )

    async def checksums(self) -> Mapping[str, str]:
        """Of the weights in memory, by the server's names and its own hash; one rank only."""
        status, answer = await self._ask(
            self._admin, "POST", "/weights_checker", {"action": "checksum"}, CALL_S_MAX
        )
        if status != 200:
            raise ServerRefused(f"SGLang /weights_checker: {status} {error_text(answer)}")
        return dict(answer["ranks"][0]["checksums"])

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The chunks of one request."""
        if self._work.closed:
            raise Lost("SGLang /generate: its server was given up")
        try:
            silence = aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S_MAX, sock_read=STREAM_S_MAX
            )
            async with self._work.post(
                self.url + "/generate", json=body, timeout=silence
            ) as response:
                if response.status != 200:
                    raise ServerRefused(
                        f"SGLang /generate: {response.status} {error_text(_decoded(await response.read()))}"
                    )
                async for event in _events(response.content):
                    if event == b"[DONE]":
                        return
                    yield json.loads(event)
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise Lost(f"SGLang /generate: {type(error).__name__} {error}"[:300]) from error

    async def call(self, method: str, path: str) -> Any:
        """Of the kind that needs no administrator."""
        status, answer = await self._ask(self._work, method, path, None, CALL_S_MAX)
        if status != 200:
            raise ServerRefused(f"SGLang {path}: {status} {error_text(answer)}")
        return answer

    async def _facts(self, path: str) -> Mapping[str, Any]:
        answer = await self.call("GET", path)
        if not isinstance(answer, dict):
            raise ServerRefused(f"SGLang {path}: no JSON object; is this a SGLang server?")
        return answer

    async def _order(self, path: str, body: Mapping[str, Any]) -> None:
        status, answer = await self._ask(self._admin, "POST", path, body, CALL_S_MAX)
        if status != 200:
            raise ServerRefused(f"SGLang {path}: {status} {error_text(answer)}")

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> tuple[int, Any]:
        if session.closed:
            raise Lost(f"SGLang {path}: its server was given up")
        try:
            async with (
                asyncio.timeout(timeout_s),
                session.request(method, self.url + path, json=body) as response,
            ):
                answer = await response.content.read(BODY_BYTES_MAX)
                while not response.content.at_eof():
                    more = await response.content.read(BODY_BYTES_MAX)
                    if len(answer) + len(more) > BODY_BYTES_MAX:
                        raise ServerRefused(
                            f"SGLang {path}: an answer of more than {BODY_BYTES_MAX} bytes"
                        )
                    answer += more
                return response.status, _decoded(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Lost(f"SGLang {path}: {type(error).__name__} {error}"[:300]) from error


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _decoded(body: bytes) -> Any:
    """JSON, or the text."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    waiting = b""
    async for received in content.iter_any():
        *events, waiting = (waiting + received).split(_EVENT_END)
        if len(waiting) > CHUNK_BYTES_MAX:
            raise ValueError("an event without end")
        for event in events:
            yield event.removeprefix(b"data:").strip()
