"""Performs the core's orders to one environment: draws its prompts, plays the turns of its episodes.

    StepEnvironment --> Episodes (its processes) --> EnvironmentStepped or EpisodeEnded

Every StepEnvironment is answered by exactly one event. The first turn of a sample begins its episode: the
environment is reset with the sample's own seed, and must return the prompt that the whole group has.
If a conversation cannot continue as tokens, the environment returns it rendered from the start. This
rendering becomes a new branch if it begins with the group's prompt.
A failed episode has no reward, unless `task.on_error` makes an error count as a reward of zero.
"""

import logging
from collections import Counter
from collections.abc import Coroutine
from itertools import count
from typing import Any

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    ProbeRewards,
    RewardsProbed,
    StepEnvironment,
)
from echo2d.runtime.coordinator.prompt_calls import PromptCalls, tokens_fit
from echo2d.runtime.coordinator.task_advice import FailureLog
from echo2d.runtime.coordinator.task_calls import OnError
from echo2d.tasks.episodes import EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import TaskPrompt
from echo2d.tasks.process import TaskFailed

# For these kinds of failures the environment's code is to blame, not the answer.
_FAILS = ("error", "died", "timeout")

log = logging.getLogger("echo2d.task")


class EnvironmentCalls:
    """See the module docstring. name, vocab_size, patient: as in PromptCalls."""

    def __init__(
        self,
        episodes: Episodes,
        *,
        name: str,
        vocab_size: int,
        on_error: OnError = "drop_sample",
        patient: bool = True,
        failures: FailureLog | None = None,
    ) -> None:
        self._name, self._failures = name, failures or FailureLog(name)
        self.draw = PromptCalls(self, name, vocab_size, patient, self._failures.told).draw
        self._episodes = episodes
        self._vocab_size = vocab_size
        self._on_error = on_error
        self._numbers = count()
        # For each sample in play: how often it was begun before, and the number of its episode.
        self._open: dict[tuple[GroupId, int], tuple[int, int]] = {}
        # How many branches began, by the first word of the reason.
        self.branches: Counter[str] = Counter()

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed:
        """Reset the environment for a row, and return its first turn as the prompt."""
        number = next(self._numbers)
        turn = await self._episodes.reset(number, index, 0)
        if isinstance(turn, TaskFailed):
            return turn
        self._episodes.drop(number)
        return TaskPrompt(turn.given, turn.tags, turn.row)

    def step(
        self, order: StepEnvironment
    ) -> Coroutine[Any, Any, EnvironmentStepped | EpisodeEnded]:
        """Give a turn to the environment; returns its answer as an event for the core.

        A `forget` after this call takes effect even before the result is awaited.
        """
        return self._step(order, self._number_of(order))

    def forget(self, order: ForgetEpisode) -> None:
        """Drop this sample's episode, which the core does not continue."""
        _, number = self._open.pop((order.group, order.sample), (0, None))
        if number is not None:
            self._episodes.drop(number)

    async def probe(self, action: ProbeRewards) -> RewardsProbed:
        """Play the first turns of the first rows with empty answers, and count the failures."""
        failed, succeeded, reason = 0, 0, ""
        for row in range(action.prompts):
            number = next(self._numbers)
            found = await self._episodes.reset(number, row, 0)
            if isinstance(found, EpisodeTurn):
                call = StepCall(number, 0, found.state, found.given, b"", "length")
                end = await self._episodes.step(call)
                self._episodes.drop(number)
                found = end if isinstance(end, TaskFailed) else found
            if isinstance(found, TaskFailed) and found.kind == "end":
                break
            if isinstance(found, TaskFailed) and found.kind in _FAILS:
                failed, reason = failed + 1, self._failures.tell(found)
            else:
                succeeded += 1
        return RewardsProbed(self._name, failed, succeeded, reason)

    # --- inside

    async def _step(self, order: StepEnvironment, number: int) -> EnvironmentStepped | EpisodeEnded:
        at = order.group, order.sample, order.begun, order.turn
        found = await self._play_turn(order, number)
        if order.again or (not isinstance(found, TaskFailed) and found.again):
            log.info(
                "turn repeated group=%d sample=%d turn=%d", order.group, order.sample, order.turn
            )
        if isinstance(found, EpisodeTurn):
            if not self._is_open(order, number):
                self._episodes.drop(number)
            stepped = self._to_event(order, found)
            if isinstance(stepped, EnvironmentStepped):
                return stepped
            self._episodes.drop(number)
            found = stepped
        if self._is_open(order, number):
            del self._open[order.group, order.sample]
        if isinstance(found, EpisodeEnd):
            parts = [RewardPart(name, value) for name, value in found.score.parts.items()]
            return EpisodeEnded(*at, found.score.reward, "", tuple(parts))
        zero = found.kind == "error" and self._on_error == "zero"
        failed, reason = found.kind in _FAILS, self._failures.tell(found)
        return EpisodeEnded(*at, 0.0 if zero else None, reason, failed=failed)

    def _to_event(
        self, order: StepEnvironment, turn: EpisodeTurn
    ) -> EnvironmentStepped | TaskFailed:
        """The turn as an event for the core. TaskFailed: the turn is unusable."""
        at = order.group, order.sample, order.begun, order.turn
        given, is_branch = turn.given, bool(turn.branch)
        if not tokens_fit(given, self._vocab_size):
            return TaskFailed("error", f"tokens that are not all below {self._vocab_size}")
        if is_branch:
            # An engine gets the prompt before every branch, so the branch must not repeat it.
            given = given.removeprefix(order.prompt)
            if len(given) in (0, len(turn.given)):
                detail = "rendered from the start, it does not begin with the group's prompt"
                return TaskFailed("no_continuation", f"{turn.branch}; {detail}")
            word = turn.branch.partition(":")[0]
            self.branches[word] += 1
            log.info(
                "branch group=%d sample=%d turn=%d reason=%s number=%d",
                *(order.group, order.sample, order.turn, word, self.branches[word]),
            )
        return EnvironmentStepped(*at, given, turn.state, is_branch)

    async def _play_turn(
        self, order: StepEnvironment, number: int
    ) -> EpisodeTurn | EpisodeEnd | TaskFailed:
        state = order.state
        if order.turn == 1:
            first = await self._episodes.reset(number, order.cursor, order.rng_seed)
            if isinstance(first, TaskFailed):
                return first
            if first.given != order.prompt:
                self._episodes.drop(number)
                return TaskFailed("error", "the first turn depends on more than the row")
            state = first.state
        if not self._is_open(order, number):
            self._episodes.drop(number)
            return TaskFailed("error", "the core has given up this episode")
        output = order.output
        tokens, written_from = output.tokens, 4 * output.turn_start
        return await self._episodes.step(
            StepCall(
                number,
                order.turn - 1,
                state,
                order.prompt + tokens[4 * output.branch_start : written_from],
                tokens[written_from:],
                order.finish,
            )
        )

    def _is_open(self, order: StepEnvironment, number: int) -> bool:
        return self._open.get((order.group, order.sample)) == (order.begun, number)

    def _number_of(self, order: StepEnvironment) -> int:
        """The number of the sample's episode. A sample that begins again gets another episode."""
        at = order.group, order.sample
        if at not in self._open or self._open[at][0] != order.begun:
            self._open[at] = order.begun, next(self._numbers)
        return self._open[at][1]
