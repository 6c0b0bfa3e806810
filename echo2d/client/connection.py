"""Sends calls to the coordinator's HTTP API, and repeats each until it is answered.

Not here: which calls there are (`async_coordinator`), and what a refusal means (`faults`).
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from echo2d.client.faults import NoAnswer, NoRoom, Unreachable, json_object_of, refusal_of
from echo2d.client.http import VERSIONS_PATH
from echo2d.core.protocol.builds import (
    BUILD_HEADER,
    OURS_AS_LEARNER_API,
    to_header,
)
from echo2d.errors import OperatorFault, PeerFault
from echo2d.net.backoff import CONNECT_TIMEOUT_S, NO_COORDINATOR, Backoff
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.net.security.tls import Tls, in_words, is_for_good, to_coordinator
from echo2d.net.security.urls import CoordinatorUrls
from echo2d.this_build import THIS_BUILD

# The longest time without a byte of the answer. The coordinator answers a request for a batch within
# LONG_POLL_S, with or without a batch, and everything else at once.
ANSWER_SILENCE_S_MAX = 120.0

log = logging.getLogger("echo2d.client")


def _url_in(token_file: Path) -> str:
    if not (url := read_token_file(token_file).url):
        raise OperatorFault(
            f"{token_file} names no coordinator; expected its URL, https://HOST:PORT"
        )
    return url


class ApiConnection:
    """A connection to a coordinator.

    url: as for `CoordinatorUrls`; empty: the URL in the token file. timeout_s: for this long a call is
    retried while the coordinator is unreachable.
    """

    def __init__(self, url: str, *, token_file: Path, timeout_s: float) -> None:
        self._urls = CoordinatorUrls(url or _url_in(token_file))
        self.losses = 0  # requests that were retried
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._headers: dict[str, str] = {}
        self._tls: Tls | None = None
        self._answered = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._urls.url

    async def token(self) -> TokenFile:
        """OperatorFault: the token file cannot be read."""
        return await asyncio.to_thread(read_token_file, self._token_file)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Retry until there is an answer, and return its JSON object."""
        _, _, answer = await self.repeat(method, path, body)
        return json_object_of(answer)

    async def repeat(
        self, method: str, path: str, body: Mapping[str, Any] | Path | bytes | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Retry until there is an answer. Every call of this API may be repeated."""
        loop, backoff = asyncio.get_running_loop(), Backoff(random.Random())
        deadline = loop.time() + self._timeout_s
        while True:
            try:
                return await self.ask(method, path, body)
            except NoRoom as full:
                # The operator may take days to make room there.
                deadline = loop.time() + self._timeout_s
                log.warning("waiting for room: %s", full)
                await asyncio.sleep(backoff.next_s())
            except NoAnswer as lost:
                self.losses += 1
                delay_s = backoff.next_s()
                if loop.time() + delay_s > deadline:
                    # A URL that never worked is probably wrong, which is the operator's mistake.
                    fault = PeerFault if self._answered else Unreachable
                    raise fault(f"cannot reach the coordinator at {self._urls}: {lost}") from lost
                if self.losses == len(self._urls.all) and not self._answered:
                    log.warning(NO_COORDINATOR, self._urls)
                log.info("unreachable url=%s reason=%s", self.url, lost)
                self._urls.try_next()
                await asyncio.sleep(delay_s)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | Path | bytes | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Try once; return the answer's status, headers and bytes. NoAnswer: another try may help.

        body: an object to send as JSON, a file, or bytes.
        """
        if not self._headers:
            token = await self.token()
            self._tls = Tls.of(self.url, token.authority, promised=token.url)
            build = to_header(replace(OURS_AS_LEARNER_API, name=THIS_BUILD.name))
            self._headers = {"Authorization": f"Bearer {token.secret}", BUILD_HEADER: build}
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        content: dict[str, Any] = {"json": body}
        if isinstance(body, Path | bytes):
            content = {"data": _parts(body) if isinstance(body, Path) else body}
        # A publish may be silent for longer: without a manifest the coordinator first hashes the version, which
        # takes minutes if the version is large and the disk slow.
        silence_s = 3600.0 if path.startswith(VERSIONS_PATH) else ANSWER_SILENCE_S_MAX
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s
        )
        try:
            async with self._session.request(
                method, self.url + path, timeout=timeout, **content, **to_coordinator(self._tls)
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if is_for_good(error) and not self._answered and len(self._urls.all) == 1:
                raise OperatorFault(f"{self.url}: {in_words(error)}") from error
            raise NoAnswer(in_words(error)) from error
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise refusal_of(response.status, answer)
        self._answered = True
        return response.status, response.headers, answer


async def _parts(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while part := await asyncio.to_thread(file.read, 1 << 20):
            yield part
    finally:
        await asyncio.to_thread(file.close)
