"""An outside agent that keeps a diary, and when it is started again continues with the tickets that it holds.

    python -m tests.support.diary_agent TOKEN_FILE DIARY

Before the agent does anything else, it writes down each ticket that it took, each call and its answer, and how it
ends an episode. It repeats a call when the coordinator has died, when the agent itself has died, and sometimes for
no reason. After SIGTERM it ends the episodes that it holds, and takes no others.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from echo2d.demo.two_turns import OPENING, WRONG
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.tasks.sort_digits import SortDigits
from tests.support.witnessed_game import TURNS, worth

AT_ONCE = 12
WAIT_S = 2
RETRY_S = 0.1
ASKED_AGAIN = 0.2  # share of the calls that are made twice


class OverError(Exception):
    """The coordinator no longer needs this episode."""


class Diary:
    """entries: of all earlier processes of the agent."""

    def __init__(self, path: Path) -> None:
        self.entries = read_diary(path)
        self._file = path.open("a")

    def write(self, what: str, ticket: str, **facts: Any) -> None:
        entry = {"what": what, "ticket": ticket, "life": os.getpid(), "at_s": time.time(), **facts}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def read_diary(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Past:
    """The entries of earlier processes about a ticket."""

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self.taken: Mapping[str, Any] = {}
        self.said: list[tuple[list[int], list[int]]] = []
        self.is_asking = self.is_over = False
        for entry in entries:
            match entry["what"]:
                case "taken":
                    self.taken = entry
                case "asked":
                    self.is_asking = True
                case "said":
                    self.said.append((entry["asked"], entry["said"]))
                    self.is_asking = False
                case "ending":
                    # After an end, the last call may not be repeated.
                    self.is_asking = True
                case "ended" | "over" | "refused":
                    self.is_over = True


class Player:
    """Plays one episode after the other."""

    def __init__(self, http: aiohttp.ClientSession, token: TokenFile, diary: Diary) -> None:
        self._http, self._token, self._diary = http, token, diary
        self._task = SortDigits()
        self.is_ending = False

    async def keep_playing(self, pasts: list[Past]) -> None:
        """Play the episodes that an earlier process held, then new ones."""
        while pasts:
            await self.play(pasts.pop())
        while not self.is_ending:
            try:
                taken = await self._post("/v1/episodes", {"wait_s": WAIT_S}, self._token.secret)
            except OverError:
                continue
            if taken is not None:
                self._diary.write("taken", **taken)
                await self.play(Past([{"what": "taken", **taken}]))

    async def play(self, past: Past) -> None:
        ticket = past.taken["ticket"]
        try:
            await self._play(ticket, self._task.prompt(past.taken["row"]).tokens, past)
        except OverError as over:
            self._diary.write("over", ticket, why=str(over))

    async def _play(self, ticket: str, digits: Sequence[int], past: Past) -> None:
        if past.said and not past.is_asking:
            # Repeat the last call of an earlier process.
            await self._call(ticket, past.said[-1][0])
        tokens, answers, written = [OPENING, *digits], [], []
        for turn in range(TURNS):
            if turn:
                tokens += [WRONG, *digits]
            # A repeated call is in the diary more than once; its first answer counts.
            before = next((said for asked, said in past.said if asked == tokens), None)
            said = before or await self._call(ticket, tokens)
            if before is None and random.random() < ASKED_AGAIN:
                await self._call(ticket, tokens)
            answers.append(said)
            written.append([len(tokens), len(tokens) + len(said)])
            tokens = [*tokens, *said]
        trace = [{"token_ids": tokens, "written": written}]
        body = {"reward": worth(answers), "parts": {"turns": TURNS}, "trace": trace}
        self._diary.write("ending", ticket, tokens=tokens, reward=body["reward"])
        told = await self._post(f"/v1/episodes/{ticket}/end", body, ticket)
        self._diary.write("ended", ticket, told=told)

    async def _call(self, ticket: str, tokens: list[int]) -> list[int]:
        self._diary.write("asked", ticket, asked=tokens)
        body = {"model": "policy", "token_ids": tokens}
        reply = await self._post("/inference/v1/generate", body, ticket)
        assert reply is not None
        said: list[int] = reply["choices"][0]["token_ids"]
        self._diary.write("said", ticket, asked=tokens, said=said)
        return said

    async def _post(self, path: str, body: dict[str, Any], secret: str) -> dict[str, Any] | None:
        """The reply. A request that the coordinator cannot serve now is repeated. None: no more tickets are needed."""
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            try:
                async with self._http.post(
                    self._token.url + path, json=body, headers=headers
                ) as reply:
                    said: dict[str, Any] = await reply.json()
                if reply.status == 200:
                    return said
                if reply.status == 410:
                    raise OverError(said)
                # A running coordinator reads new tokens only from time to time, so a new token may be refused first.
                is_new = reply.status == 401 and path == "/v1/episodes"
                if reply.status not in (429, 503) and not is_new:
                    self._diary.write("refused", secret, status=reply.status, why=said, path=path)
                    raise OverError(said)
            except (aiohttp.ClientError, TimeoutError):
                pass
            if self.is_ending and path == "/v1/episodes":
                return None
            await asyncio.sleep(RETRY_S)


async def main(token_file: str, path: str) -> None:
    diary = Diary(Path(path))
    by_ticket: dict[str, list[dict[str, Any]]] = {}
    for entry in diary.entries:
        by_ticket.setdefault(entry["ticket"], []).append(entry)
    held = [past for past in map(Past, by_ticket.values()) if past.taken and not past.is_over]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
        player = Player(http, read_token_file(Path(token_file)), diary)

        def end() -> None:
            player.is_ending = True

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        for _ in range(AT_ONCE):
            group.create_task(player.keep_playing(held))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
