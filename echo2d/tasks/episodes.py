"""Plays the episodes of an environment in the processes of its task.

    reset, step --> the process that has the episode --> EpisodeTurn or EpisodeEnd
                         | it died
                         v
                    a fresh process, which restores the state of the last acknowledged turn

A step that was acknowledged is never executed again: the caller keeps the state that came with it.
A step that was not acknowledged may be executed again, and its reply then says `again`. If several
calls ran at the same time, it is unknown which of them ended the process. So each of these calls is made again
alone, in a spare process, where it delays no other call.

Every fault ends the episode with a `TaskFailed`, never with a reward.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from echo2d.core.protocol.control_messages import Finish
from echo2d.tasks.base import TASK_NAME_CHARS_MAX
from echo2d.tasks.kept_episode import KEPT_BYTES_MAX
from echo2d.tasks.pool import Score, TaskPool, parse_score
from echo2d.tasks.pool_child import TASK_REASON_CHARS_MAX, pack
from echo2d.tasks.process import TaskFailed, TaskProcess
from echo2d.tasks.served_environment import CONTENT_CHARS_MAX, OPEN_EPISODES_MAX
from echo2d.tasks.served_task import checked_tags, short_name

EPISODE_RETRIES = 2  # retries of a call whose process died

log = logging.getLogger("echo2d.task")


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """What the policy answers next."""

    given: bytes  # new tokens, packed int32
    # What `step` needs if the process ends; None: the episode ends with the process.
    state: bytes | None
    again: bool = False  # the call was made more than once
    # The tags and the row of the first turn, as in `TaskPrompt`.
    tags: Mapping[str, str] = field(default_factory=dict)
    row: str = ""
    # Empty: `given` follows all tokens so far. Else `given` is the whole conversation, rendered again,
    # and this says why ("word: detail").
    branch: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The end of an episode."""

    score: Score
    closing: str = ""  # the environment's last message, for readers of samples
    again: bool = False  # the call was made more than once


@dataclass(frozen=True, slots=True)
class StepCall:
    """An answer to the last turn of an episode."""

    episode: int
    turns: int  # answers that were acknowledged before
    state: bytes | None  # state of the last turn
    # All tokens of the newest branch before this answer, from the prompt on, packed int32. Not needed if
    # the environment is in tokens.
    transcript: bytes
    answer: bytes  # packed int32, including the end token
    finish: Finish = "stop"


class Seat:
    """A process, and how many calls it may work on."""

    def __init__(self, process: TaskProcess, calls_max: int) -> None:
        self.process = process
        self.calls = asyncio.Semaphore(calls_max)
        self.episodes: set[int] = set()  # episodes that the process has open


class Episodes:
    """The episodes of a pool that has started, and whose task is an environment.

    An episode is a number that no other episode has while it is open. Its calls must be awaited to
    their end: if the environment is not `async`, a cancelled call has its process killed.
    """

    def __init__(self, pool: TaskPool) -> None:
        self._pool = pool
        self._concurrent = pool.about.concurrent
        calls_max = OPEN_EPISODES_MAX if self._concurrent else 1
        self._seats = [Seat(process, calls_max) for process in pool.processes]
        # A call that is repeated here runs alone, so only that call can be to blame.
        self._spare = Seat(pool.spare(), 1) if self._concurrent else None
        self._seat_of: dict[int, Seat] = {}
        self._under_way: set[int] = set()
        # Warnings for the operator, each of them once.
        self.cautions: list[str] = []

    async def reset(self, episode: int, row: int, seed: int) -> EpisodeTurn | TaskFailed:
        """Begin an episode. TaskFailed "end": the rows end before this one."""
        reply, again = await self._call(episode, ["reset", episode, row, seed], lives_on=True)
        match reply:
            case TaskFailed():
                return reply
            case [*turn, dict(tags), str(row_name), str(caution)] if all(
                type(each) is str for pair in tags.items() for each in pair
            ):
                if caution:
                    self._log_once(caution[:TASK_REASON_CHARS_MAX])
                with suppress(ValueError):
                    first = EpisodeTurn(b"", None, again, checked_tags(tags), short_name(row_name))
                    return self._turn(episode, turn, first)
        return self._malformed(episode)

    async def step(self, call: StepCall) -> EpisodeTurn | EpisodeEnd | TaskFailed:
        """Take an answer. Unless an EpisodeTurn is returned, the episode is over."""
        transcript = call.transcript if self._pool.about.in_text else b""
        request = [
            *("step", call.episode, call.turns, call.state),
            *(transcript, call.answer, call.finish),
        ]
        lives_on = call.state is not None
        reply, again = await self._call(call.episode, request, lives_on=lives_on)
        match reply:
            case TaskFailed():
                return reply
            case ["end", value, parts, str(closing)]:
                self._forget(call.episode)
                score = parse_score([value, parts])
                closing = closing[:CONTENT_CHARS_MAX]
                return score if isinstance(score, TaskFailed) else EpisodeEnd(score, closing, again)
            case list():
                return self._turn(call.episode, reply, EpisodeTurn(b"", None, again))
        return self._malformed(call.episode)

    def drop(self, episode: int) -> None:
        """End an episode that will not be continued; its pending call is cancelled."""
        seat = self._forget(episode)
        if seat is not None:
            seat.process.tell(pack(["drop", episode]))

    # --- inside

    async def _call(self, episode: int, request: list[Any], *, lives_on: bool) -> tuple[Any, bool]:
        """The reply or TaskFailed, and whether the call was made more than once.

        lives_on: the call can be made again after its process died.
        """
        if episode in self._under_way:
            return TaskFailed("error", f"episode {episode}: a call is under way"), False
        try:
            packed = pack(request)
        except ValueError as error:
            self.drop(episode)
            return TaskFailed("error", str(error)), False
        self._under_way.add(episode)
        try:
            reply, again = await self._ask(episode, packed, lives_on=lives_on)
        except asyncio.CancelledError:
            self.drop(episode)
            raise
        finally:
            self._under_way.discard(episode)
        if isinstance(reply, TaskFailed):
            self._forget(episode)
        return reply, again

    async def _ask(self, episode: int, packed: bytes, *, lives_on: bool) -> tuple[Any, bool]:
        seat = self._seat_of.get(episode) or min(self._seats, key=lambda each: len(each.episodes))
        reply: Any = None
        for attempt in range(EPISODE_RETRIES + 1):
            self._sit(episode, seat)
            async with seat.calls:
                if self._pool.closed:
                    return TaskFailed("died", "the task's processes were ended"), attempt > 0
                reply = await self._ask_at(seat, packed)
            if not (isinstance(reply, TaskFailed) and reply.kind == "died" and lives_on):
                return reply, attempt > 0
            seat = self._spare or seat
        return reply, True

    async def _ask_at(self, seat: Seat, packed: bytes) -> Any:
        if self._concurrent:
            return await seat.process.ask_beside_others(packed)
        (reply,) = [reply async for reply in seat.process.ask([packed])]
        return reply

    def _sit(self, episode: int, seat: Seat) -> None:
        self._forget(episode)
        self._seat_of[episode] = seat
        seat.episodes.add(episode)

    def _forget(self, episode: int) -> Seat | None:
        seat = self._seat_of.pop(episode, None)
        if seat is not None:
            seat.episodes.discard(episode)
        return seat

    def _turn(self, episode: int, said: list[Any], turn: EpisodeTurn) -> EpisodeTurn | TaskFailed:
        """The turn, filled in with the process's reply."""
        match said:
            case ["turn", bytes(given), bytes() | None as state, str(unsaved), str(branch)] if (
                given and len(given) % 4 == 0 and len(state or b"") <= KEPT_BYTES_MAX
            ):
                if state is None:
                    self._log_once(f"its episodes are lost if their process ends: {unsaved}")
                elif self._seat_of.get(episode) is self._spare:
                    # Its next call goes to one of the usual processes.
                    self.drop(episode)
                return replace(turn, given=given, state=state, branch=branch[:TASK_NAME_CHARS_MAX])
        return self._malformed(episode)

    def _malformed(self, episode: int) -> TaskFailed:
        self.drop(episode)
        return TaskFailed("error", "a malformed turn")

    def _log_once(self, why: str) -> None:
        # At most 16 distinct reasons are logged, because a task may put a number into each.
        if why not in self.cautions and len(self.cautions) < 16:
            self.cautions.append(why)
            log.warning("task=%s %s", self._pool.about.name, why)
