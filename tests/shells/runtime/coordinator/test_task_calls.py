from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import Attachment, PromptTag, RewardPart, Source, pack_tokens
from echo2d.core.work.events import (
    DrawPrompt,
    ProbeRewards,
    PromptDrawn,
    PromptFailed,
    RewardsProbed,
    SampleScored,
    ScoreSample,
)
from echo2d.runtime.coordinator import task_calls
from echo2d.runtime.coordinator.task_calls import (
    PROBED_AT_ONCE,
    TASK_RETRIES,
    OnError,
    OverlongPenalty,
    TaskCalls,
)
from echo2d.tasks.pool import Score, ScoreCall, TaskPrompt
from echo2d.tasks.process import TaskFailed

LATE, DIED = TaskFailed("timeout", "10 s passed"), TaskFailed("died", "it died")
RAISED, TOO_HARD = TaskFailed("error", "ValueError: x"), TaskFailed("unjudged", "too hard")


class Pool:
    """Prompt n is the token n; its reward counts the output's tokens. `failures` come first."""

    at_once = 2
    concurrent = False

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self.asked: list[int] = []
        self.failures: list[TaskFailed] = []
        self.prompts = 100
        self.told: str | None = None
        self.make: Callable[[int], TaskPrompt] = lambda index: TaskPrompt(
            pack_tokens([index]), {}, f"row {index}"
        )

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed:
        self.drawn.append(index)
        return self.failures.pop(0) if self.failures else self.make(index)

    async def rewards(self, calls: Sequence[ScoreCall]) -> AsyncIterator[Score | TaskFailed]:
        self.asked.append(len(calls))
        for call in calls:
            if self.failures:
                yield self.failures.pop(0)
            else:
                parts = {"form": 1.0} if call.finish == "length" else {}
                yield Score(float(len(call.tokens) // 4 + call.index), parts)

    async def reward(self, call: ScoreCall) -> Score | TaskFailed:
        (score,) = [score async for score in self.rewards([call])]
        return score

    async def expected(self, index: int) -> tuple[str | None, str] | TaskFailed:
        if index >= self.prompts:
            return TaskFailed("end", "")
        return self.told, f"row {index} of sums.csv"

    @asynccontextmanager
    async def aside(self, processes: int) -> AsyncIterator["Pool"]:
        assert processes == PROBED_AT_ONCE
        yield self

    async def judge(self, index: int, text: str) -> Score | TaskFailed:
        return self.failures.pop(0) if self.failures else Score(float(text == str(index)))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_calls, "_RETRY_S_MIN", 0.0)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def calls(pool: Pool, on_error: OnError = "drop_sample") -> TaskCalls:
    return TaskCalls(pool, name="sums", vocab_size=100, on_error=on_error)


def sample(number: int) -> ScoreSample:
    return ScoreSample(GroupId(1), number, 7, pack_tokens([3, 4]), "stop")


async def scores(made: TaskCalls, *actions: ScoreSample) -> list[SampleScored]:
    return [event async for event in made.score(actions)]


async def test_a_prompt_is_drawn_and_its_samples_are_scored_together(pool: Pool) -> None:
    made = calls(pool)
    assert await made.draw(DrawPrompt(7)) == PromptDrawn(
        7, pack_tokens([7]), Source("sums", "row 7")
    )
    cut = ScoreSample(GroupId(1), 1, 7, pack_tokens([3]), "length")
    assert await scores(made, sample(0), cut) == [
        SampleScored(GroupId(1), 0, 9.0, ""),
        SampleScored(GroupId(1), 1, 8.0, "", (RewardPart("form", 1.0),)),
    ]
    assert (pool.drawn, pool.asked) == ([7], [2])


def test_samples_are_divided_among_the_processes(pool: Pool) -> None:
    made, samples = calls(pool), [sample(number) for number in range(5)]
    assert made.shares(samples) == [samples[::2], samples[1::2]]
    assert made.shares(samples[:1]) == [samples[:1]]
    assert made.shares([]) == []


@pytest.mark.parametrize(
    ("failed", "on_error", "reward"),
    [
        (TOO_HARD, "drop_sample", 0.0),
        (LATE, "drop_sample", 0.0),
        (RAISED, "drop_sample", None),
        (RAISED, "zero", 0.0),
    ],
)
async def test_on_error_decides_the_reward_of_a_failure(
    failed: TaskFailed, on_error: OnError, reward: float | None, pool: Pool
) -> None:
    pool.failures = [failed]
    found, other = await scores(calls(pool, on_error), sample(0), sample(1))
    assert found.reason.startswith(f"{failed.kind}: {failed.reason}")
    fails = failed is not TOO_HARD
    assert replace(found, reason="") == SampleScored(GroupId(1), 0, reward, "", failed=fails)
    assert other == SampleScored(GroupId(1), 1, 9.0, "")


@pytest.mark.parametrize(("failed", "on_error"), [(DIED, "zero"), (RAISED, "retry")])
async def test_a_temporary_failure_is_tried_again(
    failed: TaskFailed, on_error: OnError, pool: Pool
) -> None:
    """Only the sample that failed; in the end it has no reward, for nobody judged its answer."""
    made = calls(pool, on_error)
    pool.failures = [failed] * TASK_RETRIES
    right = SampleScored(GroupId(1), 0, 9.0, "")
    other = SampleScored(GroupId(1), 1, 9.0, "")
    assert sorted(await scores(made, sample(0), sample(1)), key=lambda each: each.sample) == [
        right,
        other,
    ]
    pool.failures = [failed] * (TASK_RETRIES + 1)
    assert await scores(made, sample(0)) == [
        SampleScored(GroupId(1), 0, None, f"{failed.kind}: {failed.reason}", failed=True)
    ]


async def test_a_concurrent_task_that_is_late_is_tried_again(pool: Pool) -> None:
    pool.concurrent = True
    pool.failures = [LATE]
    assert await scores(calls(pool), sample(0)) == [SampleScored(GroupId(1), 0, 9.0, "")]


async def test_a_failed_prompt_is_tried_again(pool: Pool) -> None:
    pool.failures = [LATE, DIED]
    drawn = await calls(pool).draw(DrawPrompt(7))
    assert drawn == PromptDrawn(7, pack_tokens([7]), Source("sums", "row 7"))
    assert pool.drawn == [7, 7, 7]


async def test_a_prompt_that_always_fails_is_given_up(pool: Pool) -> None:
    """One broken row of a file must not hold a place among the prompts for ever."""
    pool.failures = [RAISED] * (TASK_RETRIES + 1)
    assert await calls(pool).draw(DrawPrompt(7)) == PromptFailed(7, RAISED.reason, "sums")
    pool.failures = [DIED] * (TASK_RETRIES + 3)
    assert isinstance(await calls(pool).draw(DrawPrompt(8)), PromptDrawn)


@pytest.mark.parametrize("tokens", [(), (100,), (-1,), (1,) * 200_000])
async def test_prompts_with_tokens_outside_the_vocabulary_are_failures(
    tokens: tuple[int, ...], pool: Pool
) -> None:
    right = pool.make

    def mended(index: int) -> TaskPrompt:
        pool.make = right
        return TaskPrompt(pack_tokens(tokens))

    pool.make = mended
    assert isinstance(await calls(pool).draw(DrawPrompt(7)), PromptDrawn)


async def test_long_answers_lose_reward_and_the_loss_is_reported(pool: Pool) -> None:
    """DAPO: nothing up to 6 tokens, all of the penalty at 10, half of it in between."""
    overlong = OverlongPenalty(most=10, tokens=4, penalty=0.5)
    made = TaskCalls(pool, name="sums", vocab_size=100, overlong=overlong)

    async def lost(tokens: int) -> tuple[float, float]:
        action = ScoreSample(GroupId(1), 0, 0, pack_tokens([3] * tokens), "stop")
        [found] = await scores(made, action)
        assert found.reward is not None
        [part] = found.parts
        assert part.name == "overlong"
        return tokens - found.reward, part.value

    assert [await lost(tokens) for tokens in (1, 6, 8, 10)] == [
        (0.0, 0.0),
        (0.0, 0.0),
        (0.25, -0.25),
        (0.5, -0.5),
    ]


async def test_the_facts_of_a_prompt_reach_the_metrics(pool: Pool) -> None:
    pool.make = lambda index: TaskPrompt(pack_tokens([1]), {"level": "3", "kind": "sum"}, "r")
    drawn = await calls(pool).draw(DrawPrompt(7))
    assert isinstance(drawn, PromptDrawn)
    assert drawn.tags == (PromptTag("kind", "sum"), PromptTag("level", "3"))


async def test_attachments_are_named_by_their_digests(pool: Pool) -> None:
    attached = {"b": b"second", "a": b"first"}
    pool.make = lambda index: TaskPrompt(pack_tokens([1]), {}, "r", attached)
    drawn = await calls(pool).draw(DrawPrompt(7))
    assert isinstance(drawn, PromptDrawn)
    first, second = (
        Attachment("a", digest_of(b"first"), 5),
        Attachment("b", digest_of(b"second"), 6),
    )
    assert drawn.source.attachments == (first, second)
    assert drawn.contents == (b"first", b"second")


async def test_a_question_whose_process_dies_again_and_again_is_given_up(pool: Pool) -> None:
    """A task waits for its prompts; an evaluation would hold up the run."""
    pool.failures = [DIED, LATE] * 5
    made = TaskCalls(pool, name="held", vocab_size=100, patient=False)
    assert await made.draw(DrawPrompt(7)) == PromptFailed(7, DIED.reason, "held")


@pytest.mark.parametrize("told", [None, "7"])
async def test_expected_answers_are_probed_or_empty_ones(pool: Pool, told: str | None) -> None:
    pool.told, pool.failures = told, [RAISED, TOO_HARD, DIED]
    probed = await calls(pool).probe(ProbeRewards("sums", 8))
    assert probed == RewardsProbed("sums", 2, 6, "died: it died")
    pool.prompts = 3
    assert await calls(pool).probe(ProbeRewards("sums", 8)) == RewardsProbed("sums", 0, 3, "")


async def test_each_kind_of_failure_is_logged_once_with_its_traceback(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    at, trace = "/home/you/judge.py:8 in score", "Traceback\n  File judge.py\nConnectError: no"
    away = [
        TaskFailed("error", f"ConnectError: no {n}", f"row {n} of sums.csv", at, trace)
        for n in range(3)
    ]
    pool.failures = [*away, RAISED]
    found = await scores(calls(pool), *map(sample, range(4)))
    first, *_, last = (each.getMessage() for each in caplog.records)
    assert first == (
        "task=sums failed: error: row 0 of sums.csv: ConnectError: no 0 (/home/you/judge.py:8 in score); a "
        f"task has no network unless task.network = true\n{trace}"
    )
    assert (len(caplog.records), last) == (2, "task=sums failed: error: ValueError: x")
    assert found[2].reason.startswith("error: row 2 of sums.csv: ConnectError: no 2 (")
    assert [each.failed for each in found] == [True] * 4


@pytest.mark.parametrize(
    ("failed", "fails"),
    [
        (RAISED, True),
        (DIED, True),
        (TOO_HARD, False),
        (TaskFailed("unjudged", "no answer in 10 s"), True),
    ],
)
async def test_a_failure_is_blamed_on_the_answer_or_on_the_tasks_code(
    pool: Pool, failed: TaskFailed, fails: bool
) -> None:
    pool.failures = [failed] * 3
    (found,) = await scores(calls(pool, "zero"), sample(0))
    assert found.failed is fails
