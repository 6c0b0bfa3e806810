"""Sends requests to a run's gateway, and waits while the gateway restarts or has no room.

    answers --no connection--> away (one line in the log) --an answer--> answers (one line)

Every request of the tickets' API may be repeated: the same call gets the same answer again. So a
request without an answer, or with the answer to try again, is repeated until its time is over. Of this
folder, only this module knows the secret.
"""

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

import aiohttp

from echo2d.errors import OperatorFault, PeerFault
from echo2d.net.backoff import Backoff
from echo2d.net.security.auth import TokenFile
from echo2d.net.security.tls import Tls, in_words, is_for_good, to_coordinator
from echo2d.net.security.urls import coordinator_url

# A wait that a gateway asks for is cut to this: a longer one would only hide that the gateway is back.
RETRY_AFTER_S_MAX = 60.0
COME_BACK = frozenset({HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS})

log = logging.getLogger("echo2d.envs")


class GatewayAway(PeerFault):
    """The gateway did not answer within the time that the request could wait."""


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    status: int
    body: bytes
    content_type: str = "application/json"

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object. PeerFault: it is not one."""
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PeerFault(
                f"the gateway answered {self.status} with something other than a JSON object"
            )
        return found

    def reason(self) -> str:
        """The reason of a refusal, in one line."""
        try:
            found = json.loads(self.body)
            error = found.get("error", found)
            text = str(error.get("message") or error.get("detail") or error)
        except (ValueError, AttributeError):
            text = self.body.decode(errors="replace")
        return f"{self.status}: {' '.join(text.split())[:500]}"


class GatewayLink:
    """The connection to one gateway, as a context."""

    def __init__(self, url: str, token: TokenFile) -> None:
        self._url = coordinator_url(url)
        self._tls = Tls.of(self._url, token.authority, promised=token.url)
        self._secret = token.secret
        self._session: aiohttp.ClientSession | None = None
        self._answered = self._away = False

    async def __aenter__(self) -> Self:
        # A host that does not answer by then is away.
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._secret}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        patience_s: float | None,
    ) -> GatewayAnswer:
        """Ask until there is an answer other than 503 and 429, for at most `patience_s` (None: without limit).

        After that time a 503 or 429 is returned, too. GatewayAway: there was no answer at all in that time.
        """
        loop, backoff = asyncio.get_running_loop(), Backoff(random.Random())
        deadline = None if patience_s is None else loop.time() + patience_s
        while True:
            try:
                answer, wait_s = await self._once(method, path, body, headers or {})
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._lost(error)
                wait_s = backoff.next_s()
                if deadline is not None and loop.time() + wait_s > deadline:
                    raise GatewayAway(f"{self._url} does not answer: {in_words(error)}") from error
            else:
                if answer.status not in COME_BACK:
                    return answer
                if deadline is not None and loop.time() + wait_s > deadline:
                    return answer
            await asyncio.sleep(wait_s)

    async def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[GatewayAnswer, float]:
        """The answer, and how long to wait before the next attempt."""
        assert self._session is not None
        sent = {"Content-Type": "application/json", **headers} if body is not None else headers
        async with self._session.request(
            method, self._url + path, data=body, headers=sent, **to_coordinator(self._tls)
        ) as response:
            answer = GatewayAnswer(response.status, await response.read(), response.content_type)
        if self._away:
            log.info("the gateway answers again url=%s", self._url)
        self._answered, self._away = True, False
        return answer, _retry_after_s(response.headers.get("Retry-After", ""))

    def _lost(self, error: Exception) -> None:
        if is_for_good(error) and not self._answered:
            raise OperatorFault(f"{self._url}: {in_words(error)}") from error
        if not self._away:
            log.warning("the gateway is away url=%s reason=%s", self._url, in_words(error))
        self._away = True


def _retry_after_s(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = 1.0
    # NaN and negative numbers become the shortest wait.
    return min(wait_s, RETRY_AFTER_S_MAX) if wait_s > 0.05 else 0.05
