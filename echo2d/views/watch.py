"""`echo2d status --watch`: shows the status again and again, across restarts of the coordinator.

On a terminal the picture is redrawn in place. Elsewhere each interval prints a plain block, or one line with `as_json`.
If the first request gets no answer, the watch ends with an OperatorFault. If a later one gets none, a pause is shown.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from echo2d.client import AsyncCoordinator, OperatorFault, PeerFault, Unreachable
from echo2d.core.status.json_form import read_own_status, read_status
from echo2d.core.status.schema import OwnStatus, Status
from echo2d.views.own_status import is_own, own_picture
from echo2d.views.status import TokenRate, age, narrowed, plain_console, status_picture

# Wait at most this long for one answer, because a person waits at the terminal.
ANSWER_S = 5.0
# A single status repeats its request for this long, because the coordinator may just be starting.
WATCH_PATIENCE_S = 5.0

# Finds the URL and the token file of the coordinator. OperatorFault: no coordinator runs.
Find = Callable[[], tuple[str, Path]]


class Away(Exception):  # noqa: N818 - a state, not an error
    """The coordinator did not answer the last request."""


class Asker:
    """Asks one coordinator for its status, also after it restarts at another address.

    `async with` closes the connection.
    """

    def __init__(self, find: Find, *, patience_s: float = 0.0) -> None:
        self._find = find
        self._patience_s = patience_s
        self._at: tuple[str, Path] | None = None
        self._client: AsyncCoordinator | None = None
        self._answered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def status(self) -> dict[str, Any]:
        """The answer as JSON; with a worker's token it has only the boxes of that token.

        Away: this request got no answer, but an earlier one did. OperatorFault: no request ever got an answer, or the
        coordinator does not accept the token.
        """
        try:
            facts = await self._ask(await self._present())
        except (Unreachable, PeerFault, TimeoutError) as fault:
            reason = (
                str(fault) or f"no answer from {self._at and self._at[0]} within {ANSWER_S:.0f} s"
            )
            if not self._answered:
                raise OperatorFault(reason) from fault
            raise Away(reason) from fault
        self._answered = True
        return facts

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _ask(self, client: AsyncCoordinator) -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_S + self._patience_s):
            if await client.role() == "worker":
                return await client.own_status()
            return await client.status()

    async def _present(self) -> AsyncCoordinator:
        """A client for the coordinator's present address; after a restart the address may be another one."""
        try:
            at = await asyncio.to_thread(self._find)
        except OperatorFault as fault:
            raise Unreachable(str(fault)) from fault
        if self._client is None or at != self._at:
            await self._close()
            self._at = at
            self._client = AsyncCoordinator(at[0], token_file=at[1], timeout_s=self._patience_s)
        return self._client


class Screen:
    """Shows statuses and pauses to a person, or to a program."""

    def __init__(self, *, as_json: bool, console: Console | None = None, only: str = "") -> None:
        """only: part of the name, the id or the state of the workers to show."""
        self._as_json = as_json
        self._only = only
        self._console = console or plain_console()
        self._rate = TokenRate()
        self._last: Status | OwnStatus | None = None
        self._answered_at = 0.0
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._as_json:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, facts: Mapping[str, Any], *, now: float) -> None:
        """Show a new answer; `now` is monotonic seconds. PeerFault: the answer is not a status."""
        self._answered_at = now
        if self._as_json:
            print(json.dumps(narrowed(facts, self._only)), flush=True)
            return
        self._last = read_own_status(facts) if is_own(facts) else read_status(facts)
        rate = None
        if isinstance(self._last, Status):
            rate = self._rate.update(self._last.tokens_accepted, now)
        if self._live.is_started:
            self._draw(self._last, rate)
        else:
            picture = self._picture(self._last, rate)
            self._console.print(Text(time.strftime("--- %H:%M:%S")), picture)

    def away(self, reason: str, *, now: float) -> None:
        """Show that there is no answer; the last status stays on the terminal."""
        away_s = now - self._answered_at
        words = Text(
            f"coordinator away since {age(away_s)}, trying again: {reason}", style="bold yellow"
        )
        if self._as_json:
            print(json.dumps({"away_s": away_s, "reason": reason}), flush=True)
        elif self._live.is_started and self._last is not None:
            self._draw(self._last, None, away=words)
        else:
            self._console.print(words, soft_wrap=True)

    def _draw(
        self, status: Status | OwnStatus, tokens_per_s: float | None, away: Text | None = None
    ) -> None:
        """Draw on the terminal. away: the line that is shown above the last status while no answer comes."""
        picture = self._picture(status, tokens_per_s, self._console.height - (away is not None))
        self._live.update(picture if away is None else Group(away, picture), refresh=True)

    def _picture(
        self, status: Status | OwnStatus, tokens_per_s: float | None, lines: int | None = None
    ) -> RenderableType:
        if isinstance(status, OwnStatus):
            return own_picture(status)
        return status_picture(
            status,
            tokens_per_s=tokens_per_s,
            lines=lines,
            width=self._console.width,
            only=self._only,
        )


async def status_once(find: Find) -> dict[str, Any]:
    """One answer, as JSON. OperatorFault: no answer comes."""
    async with Asker(find, patience_s=WATCH_PATIENCE_S) as asker:
        return await asker.status()


async def typed_status_once(find: Find) -> Status:
    """One answer, as a `Status`. PeerFault: a key is missing."""
    return read_status(await status_once(find))


async def watch(find: Find, screen: Screen, *, interval_s: float) -> None:
    """Watch until cancelled.

    OperatorFault: the first call got no answer, or the token is not accepted. PeerFault: the answer
    is not a status of this echo2d.
    """
    clock = asyncio.get_running_loop().time
    async with Asker(find) as asker:
        facts = await asker.status()  # before anything is drawn
        with screen:
            screen.show(facts, now=clock())
            while True:
                await asyncio.sleep(interval_s)
                try:
                    screen.show(await asker.status(), now=clock())
                except Away as away:
                    screen.away(str(away), now=clock())
