"""The scorer `remote`: asks a judge over HTTP for the reward of an answer.

    POST url  {"answer", "finish", "tokens", "expected", "row"}  ->  {"reward": 0.5, "parts": {...}}

If the judge does not reply or is busy, the scorer repeats the request, and waits longer each time. Any
other refusal, or a malformed reply, is an error of this answer: `task.on_error` decides, and by default
the answer is left out.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer, Reward
from echo2d.tasks.scorers.base import Expected, Scorer

REPLY_BYTES_MAX = 1 << 16
_WAIT_S_MIN, _WAIT_S_MAX = 0.25, 30.0  # seconds between two tries


class JudgeError(Exception):
    """The judge gave no reward."""


def remote(*, url: str, key_variable: str = "", tries: int = 8) -> Scorer:
    """A judge at `url` gives the reward; it replies {"reward": number}, optionally with "parts".

    key_variable: the environment variable with the judge's bearer token; it must be listed in
    task.environment. tries: most requests, if the judge does not reply or is busy: eight take up to
    32 s, if task.timeout_s allows. It needs task.network = true.
    """
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname or "@" in place.netloc:
        raise OperatorFault(
            "scorer remote: url: expected http:// or https://, a host, and no password"
        )
    if tries < 1:
        raise OperatorFault(f"scorer remote: tries: expected at least 1; found {tries}")
    if key_variable and not os.environ.get(key_variable):
        raise OperatorFault(
            f"scorer remote: the variable {key_variable} is not set; name it in task.environment, "
            "and set it where the coordinator starts"
        )
    judge = _Judge(url, os.environ.get(key_variable, "") if key_variable else "", tries)

    async def score(answer: Answer, expected: Expected) -> Reward:
        return await judge.ask(
            {
                "answer": answer.text,
                "finish": answer.finish,
                "tokens": answer.tokens,
                "expected": expected.text,
                "row": dict(expected.row),
            }
        )

    return score


class _Judge:
    def __init__(self, url: str, key: str, tries: int) -> None:
        self._url, self._tries = url, tries
        # Errors reach logs and the status. These must contain no answers, and no keys that a URL's path may have.
        self._name = f"the judge at {urlsplit(url).netloc}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(self, question: Mapping[str, Any]) -> Reward:
        """JudgeError: the judge refused, its reply was malformed, or all tries failed."""
        body, wait_s = json.dumps(question, default=str), _WAIT_S_MIN
        headers = {**self._headers, "Content-Type": "application/json"}
        # The task's own time limit holds for all tries together.
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for left in reversed(range(self._tries)):
                try:
                    status, reply, after_s = await self._post(session, body)
                except (aiohttp.ClientError, OSError):
                    status, reply, after_s = 0, b"", 0.0
                if status == HTTPStatus.OK:
                    return self._reward(reply)
                if left == 0 or not _passes(status):
                    raise JudgeError(f"{self._name} said {status or 'nothing'}")
                await asyncio.sleep(min(_WAIT_S_MAX, max(wait_s, after_s)))
                wait_s *= 2
        raise AssertionError

    async def _post(self, session: aiohttp.ClientSession, body: str) -> tuple[int, bytes, float]:
        """Post once. Returns status, body, and the seconds that the judge asks to wait."""
        async with session.post(self._url, data=body, allow_redirects=False) as response:
            reply = b""
            async for part in response.content.iter_any():
                reply += part
                if len(reply) > REPLY_BYTES_MAX:
                    raise JudgeError(f"{self._name} said more than {REPLY_BYTES_MAX} bytes")
            after = response.headers.get("Retry-After", "")
            return response.status, reply, float(after) if after.isdecimal() else 0.0

    def _reward(self, reply: bytes) -> Reward:
        try:
            said = json.loads(reply)
            parts = {str(name): float(value) for name, value in said.get("parts", {}).items()}
            return Reward(float(said["reward"]), parts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JudgeError(
                f'{self._name} said something else than {{"reward": number}}'
            ) from error


def _passes(status: int) -> bool:
    """Whether another try may succeed. 0: the judge could not be reached."""
    # 501 (not implemented) and 505 (unknown HTTP version) do not pass.
    server_fault = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in (501, 505)
    # Three refusals may pass: 408 (timeout), 425 (too early) and 429 (too many requests).
    return status == 0 or server_fault or status in (408, 425, 429)
