"""An outside agent: plays the demo's game of two turns with tickets, over HTTP.

    ticket --> "<31415926>" -- answer --> "<31415926>", or "+31415926>" if it was right -- answer --> reward

    python -m echo2d.demo.agent TOKEN_FILE [--at-once N]

Any program that speaks to OpenAI's API can do the same (docs/guide/environments.md).
"""

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from echo2d.demo.two_turns import OPENING, RIGHT, WRONG
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.tasks.sort_digits import SortDigits, answer

AT_ONCE = 300  # episodes that are played at once, a few more than the workers have slots
RETRY_S = 0.2  # seconds until a request is sent again

log = logging.getLogger("echo2d.agents")


class OverError(Exception):
    """The coordinator no longer wants this episode."""


class Player:
    """Plays one episode after the other."""

    def __init__(self, http: aiohttp.ClientSession, token: TokenFile, task: SortDigits) -> None:
        self._http, self._token, self._task = http, token, task

    async def play(self) -> float:
        """One episode; returns its reward."""
        taken = await self._post("/v1/episodes", {"wait_s": 20}, self._token.secret)
        ticket, digits = taken["ticket"], self._task.prompt(taken["row"]).tokens
        tokens, parts = [OPENING, *digits], {}
        for name in ("first", "second"):
            said = await self._call(ticket, tokens)
            right = tuple(said) == answer(digits)
            parts[name] = float(right)
            tokens += [*said, RIGHT if right else WRONG, *digits]
        reward = sum(parts.values()) / 2
        await self._post(f"/v1/episodes/{ticket}/end", {"reward": reward, "parts": parts}, ticket)
        return reward

    async def _call(self, ticket: str, tokens: Sequence[int]) -> list[int]:
        body = {"model": "policy", "token_ids": list(tokens)}
        said = await self._post("/inference/v1/generate", body, ticket)
        written: list[int] = said["choices"][0]["token_ids"]
        return written

    async def _post(self, path: str, body: dict[str, Any], secret: str) -> dict[str, Any]:
        """Send a request, again if it fails for a moment, and return the reply. OverError: it was refused for good."""
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            try:
                url = self._token.url + path
                async with self._http.post(url, json=body, headers=headers) as reply:
                    said: dict[str, Any] = await reply.json()
                if reply.status == 200:
                    return said
                # 401 is retried because a coordinator that has just started may not know a new token yet.
                if reply.status not in (401, 429, 503):
                    raise OverError(said)
            except (aiohttp.ClientError, TimeoutError) as error:
                log.info("no answer: %s", error)
            await asyncio.sleep(RETRY_S)


async def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("token_file", type=Path)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    asked = parser.parse_args()
    token, task = read_token_file(asked.token_file), SortDigits()

    async def keep_playing(http: aiohttp.ClientSession) -> None:
        player = Player(http, token, task)
        while True:
            try:
                await player.play()
            except OverError as over:
                log.info("an episode is over: %s", over)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(asked.at_once):
            tasks.create_task(keep_playing(http))


if __name__ == "__main__":
    asyncio.run(main())
