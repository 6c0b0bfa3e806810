"""Scores samples for the core: asks the task pool, and turns its answers into events.

Every ScoreSample is answered by exactly one event, so the core never asks twice. The pool answers each
call even if a task process dies, hangs or cannot be started. An exception that the pool does not
turn into TaskFailed ends the coordinator.

    result of the task  event
    a number            that reward
    Unjudged            0, with the reason: the answer is to blame
    another exception   as `task.on_error` says
    its process died    the call is repeated; after TASK_RETRIES a failure: the machinery is to blame
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.events import ProbeRewards, RewardsProbed, SampleScored, ScoreSample
from echo2d.runtime.coordinator.prompt_calls import PromptCalls
from echo2d.runtime.coordinator.task_advice import FailureLog
from echo2d.tasks.pool import Score, ScoreCall, TaskPrompt
from echo2d.tasks.pool_child import LATE
from echo2d.tasks.process import TaskFailed

_RETRY_S_MIN = 0.1
TASK_RETRIES = 2
# A probe has this many processes of its own, because each of its calls may take task.timeout_s.
PROBED_AT_ONCE = 4

OnError = Literal["zero", "drop_sample", "retry"]


class Pool(Protocol):
    """The part of `tasks.pool.TaskPool` that is used here and by `PromptCalls`."""

    @property
    def at_once(self) -> int: ...

    @property
    def concurrent(self) -> bool: ...

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed: ...

    def rewards(self, calls: Sequence[ScoreCall]) -> AsyncIterator[Score | TaskFailed]: ...

    async def reward(self, call: ScoreCall) -> Score | TaskFailed: ...

    async def expected(self, index: int) -> tuple[str | None, str] | TaskFailed: ...

    async def judge(self, index: int, text: str) -> Score | TaskFailed: ...

    def aside(self, processes: int) -> "AbstractAsyncContextManager[Pool]": ...


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): an answer of at most
    `most` - `tokens` tokens loses nothing, an answer of `most` tokens loses `penalty`, and the loss
    is linear in between.
    """

    most: int
    tokens: int
    penalty: float

    def of(self, length: int) -> float:
        """What an answer of this length loses."""
        beyond = length - (self.most - self.tokens)
        return self.penalty * min(1.0, max(0.0, beyond / self.tokens)) if self.tokens else 0.0


def _fails(result: TaskFailed) -> bool:
    """Whether the task's code is to blame, not the answer. `Unjudged` blames the answer, unless the call timed out."""
    return result.kind != "unjudged" or result.reason.startswith(LATE)


async def _probed(pool: Pool, index: int) -> Score | TaskFailed | None:
    """The score of a prompt's expected answer, or of an empty one. None: there is no such prompt."""
    expected = await pool.expected(index)
    if isinstance(expected, TaskFailed):
        return None
    text, _ = expected
    if text is not None:
        return await pool.judge(index, text)
    return await pool.reward(ScoreCall(index, b"", "length"))


class TaskCalls:
    """Prompts and rewards of one task. name, vocab_size, patient: as in PromptCalls.

    failures: logs failures. overlong: what long answers lose of their rewards; None: nothing.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        name: str,
        vocab_size: int,
        failures: FailureLog | None = None,
        on_error: OnError = "drop_sample",
        overlong: OverlongPenalty | None = None,
        patient: bool = True,
    ) -> None:
        self._overlong = overlong
        self._name, self._pool = name, pool
        self._failures = failures or FailureLog(name)
        self.draw = PromptCalls(pool, name, vocab_size, patient, self._failures.told).draw
        self._on_error = on_error

    def shares(self, actions: Sequence[ScoreSample]) -> list[Sequence[ScoreSample]]:
        """Divide samples among as many calls of `score` as the pool can work on at once."""
        count = min(len(actions), self._pool.at_once)
        return [actions[first::count] for first in range(count)]

    async def score(self, actions: Sequence[ScoreSample]) -> AsyncIterator[SampleScored]:
        """Score samples, and yield each once its reward is there. After a failure the reward is None, with a reason."""
        waiting = list(actions)
        for attempt in range(TASK_RETRIES + 1):
            again: list[ScoreSample] = []
            calls = [ScoreCall(each.cursor, each.tokens, each.finish) for each in waiting]
            asked = iter(waiting)
            async for result in self._pool.rewards(calls):
                action = next(asked)
                if attempt < TASK_RETRIES and self._deserves_retry(result):
                    again.append(action)
                else:
                    yield self._scored(action, result)
            if not again:
                return
            waiting = again
            await asyncio.sleep(_RETRY_S_MIN * 2**attempt)

    async def probe(self, action: ProbeRewards) -> RewardsProbed:
        """Score the expected answers of the first prompts, or empty answers if the task gives none."""
        async with self._pool.aside(PROBED_AT_ONCE) as pool:
            found = await asyncio.gather(*(_probed(pool, index) for index in range(action.prompts)))
        scores = [each for each in found if each is not None]
        failed = [each for each in scores if isinstance(each, TaskFailed) and _fails(each)]
        reason = self._failures.tell(failed[-1]) if failed else ""
        return RewardsProbed(self._name, len(failed), len(scores) - len(failed), reason)

    # --- inside

    def _deserves_retry(self, result: Score | TaskFailed) -> bool:
        """Whether this is a failure that may not happen again."""
        match result:
            case TaskFailed("died"):
                return True
            case TaskFailed("timeout"):
                # A concurrent task waits for another program, which may answer in time at the next attempt.
                return self._pool.concurrent
            case TaskFailed("error"):
                return self._on_error == "retry"
        return False

    def _scored(self, action: ScoreSample, result: Score | TaskFailed) -> SampleScored:
        group, sample = action.group, action.sample
        if isinstance(result, Score):
            parts = tuple(RewardPart(name, value) for name, value in result.parts.items())
            lost = 0.0 if self._overlong is None else self._overlong.of(len(action.tokens) // 4)
            if self._overlong is not None:
                parts += (RewardPart("overlong", -lost),)
            return SampleScored(group, sample, result.reward - lost, "", parts)
        reason = self._failures.tell(result)
        too_hard = result.kind == "unjudged" or (
            result.kind == "timeout" and not self._pool.concurrent
        )
        zero = too_hard or (result.kind == "error" and self._on_error == "zero")
        return SampleScored(group, sample, 0.0 if zero else None, reason, failed=_fails(result))
