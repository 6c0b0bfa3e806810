"""Plays episodes of a run: many at once, each under its ticket.

    ask for a ticket -> play -> end --> ask for the next one
                         | if it raises, is silent for too long, or is stopped: end with an error

A worker plays one episode at a time. An environment that fails costs its own episode only; while the
gateway is away, all workers wait. Nothing is kept on disk.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from echo2d.errors import PeerFault
from echo2d.runtime.envs.gateway_link import GatewayLink
from echo2d.runtime.envs.ticket_endpoint import SilentEpisode, TicketEndpoint
from echo2d.runtime.envs.tickets import EpisodeOutcome, PlayerTicket, ask_ticket, end_episode

# The time to report the end of one episode when the program ends.
LAST_S_MAX = 5.0
_STOPPED = "the program that played it was stopped"

log = logging.getLogger("echo2d.envs")


class EpisodePlayer(Protocol):
    """Environments of one kind."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Open what the environments share, for as long as episodes are played."""

    async def play(self, ticket: PlayerTicket, bind: Callable[[str], None]) -> EpisodeOutcome:
        """Play one episode. It may raise anything. bind: registers an X-Session-ID of the episode's calls."""


@dataclass(slots=True)
class PlayedTotals:
    """The episodes that were played so far."""

    episodes: int = 0  # counted, with a reward
    reward_sum: float = 0.0
    errors: int = 0  # not counted, because the environment failed
    refused: int = 0  # the gateway did not accept the end
    dropped: int = 0  # the ticket was no longer valid

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.episodes if self.episodes else None

    def fields(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["reward_sum"]
        return {"time": time.time(), "reward_mean": self.reward_mean, **facts}

    def line(self) -> str:
        mean = "-" if self.reward_mean is None else f"{self.reward_mean:.3f}"
        return (
            f"episodes {self.episodes:,}  mean reward {mean}  "
            f"errors {self.errors}  refused {self.refused}  dropped {self.dropped}"
        )


class EpisodeWorkers:
    """All workers of this process. `stop` ends them properly."""

    def __init__(
        self,
        link: GatewayLink,
        endpoint: TicketEndpoint,
        player: EpisodePlayer,
        *,
        task: str | None,
        show: Callable[[PlayedTotals], None],
    ) -> None:
        self._link, self._endpoint, self._player = link, endpoint, player
        self._task, self._show = task, show
        self._totals, self._running = PlayedTotals(), list[asyncio.Task[None]]()

    async def run(self, workers: int) -> None:
        """Play until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            self._running = [tasks.create_task(self._work()) for _ in range(workers)]
            self._running.append(tasks.create_task(self._report()))
        self._show(self._totals)

    def stop(self, reason: str) -> None:
        log.info("stopping reason=%s", reason)
        # A second `stop` must not interrupt the reports of ends that the first one has started.
        running, self._running = self._running, []
        for each in running:
            each.cancel()

    async def _report(self) -> None:
        shown = PlayedTotals()
        while True:
            await asyncio.sleep(10.0)
            if self._totals != shown:
                shown = PlayedTotals(**asdict(self._totals))
                self._show(shown)

    async def _work(self) -> None:
        while True:
            ticket = await ask_ticket(self._link, self._task)
            played = EpisodeOutcome.failed(_STOPPED)
            try:
                played = await self._play(ticket)
                await self._end(ticket, played, patience_s=ticket.silence_s)
            except asyncio.CancelledError:
                # If the end was reported already, reporting it again changes nothing.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S_MAX):
                        await self._end(ticket, played, patience_s=LAST_S_MAX)
                raise

    async def _play(self, ticket: PlayerTicket) -> EpisodeOutcome:
        try:
            async with self._endpoint.open(ticket).lasting() as episode:
                return await self._player.play(ticket, episode.bind)
        except SilentEpisode as silent:
            return EpisodeOutcome.failed(str(silent))
        # An environment may raise anything, which ends only its own episode.
        except Exception as error:
            log.debug("an environment raised row=%d", ticket.row, exc_info=error)
            return EpisodeOutcome.failed(f"{type(error).__name__}: {error}")

    async def _end(
        self, ticket: PlayerTicket, played: EpisodeOutcome, *, patience_s: float
    ) -> None:
        body = played.body()
        try:
            ended = await end_episode(self._link, ticket, body, patience_s=patience_s)
        except PeerFault as fault:
            log.warning(
                "an end was not reported task=%s row=%d: %s", ticket.task, ticket.row, fault
            )
            self._totals.dropped += 1
            return
        if ended.dropped:
            log.info("dropped task=%s row=%d", ticket.task, ticket.row)
            self._totals.dropped += 1
        elif ended.refused:
            log.warning("refused task=%s row=%d: %s", ticket.task, ticket.row, ended.refused)
            self._totals.refused += 1
        elif "error" in body:
            log.warning("failed task=%s row=%d: %s", ticket.task, ticket.row, body["error"])
            self._totals.errors += 1
        else:
            self._totals.episodes += 1
            self._totals.reward_sum += played.reward
