from collections.abc import Callable

import pytest

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.rollouts.events import DrawPrompt, PromptDrawn, SampleScored, ScoreSample
from echo2d.runtime.coordinator import task_calls
from echo2d.runtime.coordinator.task_calls import TaskCalls
from echo2d.tasks.base import Prompt
from echo2d.tasks.pool import Score
from echo2d.tasks.process import TaskFailed

BROKEN = TaskFailed("timeout", "10 s passed")
OUTPUT = pack_tokens([3, 4])


class Pool:
    """Prompt n is the token n; its reward counts the output's tokens. `failures` come first."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self.failures: list[TaskFailed] = []
        self.make: Callable[[int], Prompt] = lambda index: Prompt((index,))

    async def prompt(self, index: int) -> Prompt | TaskFailed:
        self.drawn.append(index)
        return self.failures.pop(0) if self.failures else self.make(index)

    async def reward(self, prompt: Prompt, output: list[int]) -> Score | TaskFailed:
        return (
            self.failures.pop(0) if self.failures else Score(float(len(output) + prompt.tokens[0]))
        )


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def plane(pool: Pool) -> TaskCalls:
    return TaskCalls(pool, vocab_size=100)


def score(cursor: int) -> ScoreSample:
    return ScoreSample(GroupId(1), 0, cursor, OUTPUT)


async def test_a_prompt_is_drawn_once_and_scored(plane: TaskCalls, pool: Pool) -> None:
    assert await plane.draw(DrawPrompt(7)) == PromptDrawn(7, pack_tokens([7]))
    assert await plane.score(score(7)) == SampleScored(GroupId(1), 0, 9.0, "")
    assert pool.drawn == [7]


async def test_after_a_restart_the_prompt_is_drawn_again(plane: TaskCalls, pool: Pool) -> None:
    assert await plane.score(score(7)) == SampleScored(GroupId(1), 0, 9.0, "")
    assert pool.drawn == [7]


async def test_a_failed_reward_is_an_error_of_that_sample(plane: TaskCalls, pool: Pool) -> None:
    await plane.draw(DrawPrompt(7))
    pool.failures = [BROKEN]
    assert await plane.score(score(7)) == SampleScored(GroupId(1), 0, None, "timeout: 10 s passed")


async def test_a_lost_prompt_is_an_error_of_that_sample(plane: TaskCalls, pool: Pool) -> None:
    pool.failures = [BROKEN]
    assert await plane.score(score(7)) == SampleScored(GroupId(1), 0, None, "timeout: 10 s passed")


async def test_a_failed_prompt_is_tried_again(
    plane: TaskCalls, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_calls, "RETRY_S_MIN", 0.001)
    pool.failures = [BROKEN, BROKEN]
    assert await plane.draw(DrawPrompt(7)) == PromptDrawn(7, pack_tokens([7]))
    assert pool.drawn == [7, 7, 7]


@pytest.mark.parametrize("tokens", [(), (100,), (-1,), (True,), ("1",), (1,) * 200_000])
async def test_prompts_outside_the_vocabulary_are_failures(
    plane: TaskCalls, pool: Pool, tokens: tuple[int, ...]
) -> None:
    pool.make = lambda index: Prompt(tokens)
    assert (await plane.score(score(0))).reward is None


async def test_old_prompts_are_forgotten(
    plane: TaskCalls, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_calls, "PROMPTS_KEPT_MAX", 2)
    for cursor in (0, 1, 2, 0, 2):
        await plane.draw(DrawPrompt(cursor))
    assert pool.drawn == [0, 1, 2, 0]
