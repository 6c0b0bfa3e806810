"""The task pool with real processes and tasks that misbehave in many ways."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import uvloop

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.prompt_calls import PROMPT_TOKENS_MAX
from echo2d.tasks.base import ATTACHMENTS_BYTES_MAX
from echo2d.tasks.pool import (
    PIPELINED_MAX,
    Limits,
    Score,
    ScoreCall,
    TaskIntroduction,
    TaskPool,
    TaskPrompt,
    parse_prompt,
    parse_score,
)
from echo2d.tasks.pool_child import TASK_MESSAGE_BYTES_MAX
from echo2d.tasks.process import TaskFailed
from echo2d.tasks.sort_digits import SortDigits, answer
from echo2d.tasks.user_ids import TASK_UIDS
from tests.support.attached_task import SHARED
from tests.support.nasty_task import index_of
from tests.support.polling import HANG_S
from tests.support.processes import is_running
from tests.support.shared_folder import shared_folder

NASTY = "tests.support.nasty_task:NastyTask"
TIMEOUT_S = 600.0  # no test waits for it: what is to die of something else has the time for it on a busy machine
HANG_TIMEOUT_S = 0.5


def ask(act: str, tokens: int = 1) -> ScoreCall:
    return ScoreCall(index_of(act), pack_tokens([1] * tokens))


async def rewards(pool: TaskPool, calls: Sequence[ScoreCall]) -> list[Score | TaskFailed]:
    return [score async for score in pool.rewards(calls)]


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
async def nasty(directory: Path) -> AsyncIterator[TaskPool]:
    limits = Limits(memory_bytes_max=1 << 30, file_bytes_max=1 << 20, cpu_s_max=1)
    async with TaskPool(
        NASTY, {"directory": str(directory)}, timeout_s=TIMEOUT_S, limits=limits
    ) as pool:
        yield pool


async def test_a_prompt_brings_its_attachments() -> None:
    async with TaskPool("tests.support.attached_task:AttachedTask") as pool:
        prompt = await pool.prompt(7)
        assert isinstance(prompt, TaskPrompt)
        assert prompt.attachments == {"picture": b"bytes of 7", "legend": SHARED}


@pytest.mark.parametrize(("count", "size"), [(17, 1), (1, (480 << 10) + 1)])
async def test_too_many_or_too_large_attachments_are_an_error(count: int, size: int) -> None:
    options = {"count": count, "size": size}
    async with TaskPool("tests.support.attached_task:LadenTask", options) as pool:
        failed = await pool.prompt(0)
        assert isinstance(failed, TaskFailed)
        assert "attachments of a prompt: expected at most 16, with at most 491520 " in failed.reason
        assert f"found {count} with {count * size} bytes; make them smaller" in failed.reason


async def test_the_largest_prompt_fits_into_an_answer_of_its_process() -> None:
    options = {"count": 16, "size": ATTACHMENTS_BYTES_MAX // 16, "tokens": PROMPT_TOKENS_MAX}
    async with TaskPool("tests.support.attached_task:LadenTask", options) as pool:
        assert isinstance(await pool.prompt(0), TaskPrompt)


async def test_a_task_is_loaded_by_name_and_gives_prompts_and_rewards() -> None:
    async with TaskPool("sort_digits", {"rng_seed": 3}) as pool:
        task = SortDigits(3)
        prompt = await pool.prompt(7)
        assert pool.about == TaskIntroduction(
            "sort_digits", (1,), b"", None, concurrent=False, in_text=False
        )
        assert prompt == TaskPrompt(pack_tokens(task.prompt(7).tokens), {"digits": "8"})
        right = answer(task.prompt(7).tokens)
        assert await pool.reward(ScoreCall(7, pack_tokens(right))) == Score(1.0)
        assert await pool.reward(ScoreCall(7, pack_tokens([1]))) == Score(0.0)


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ("raise", "ZeroDivisionError"),
        ("quit", "SystemExit"),
        ("crash", "died"),
        ("fork", "left processes behind"),
        ("detach", "left processes behind"),
        pytest.param("spin", "died", marks=pytest.mark.timeout(TIMEOUT_S)),
        ("print", "printed more than"),
        ("memory", "MemoryError"),
        ("file", "OSError|died"),
        ("forge", "nonsense"),
        ("nan", "the reward is nan"),
        ("text", "expected a number or Reward"),
        ("none", "TypeError"),
    ],
)
async def test_a_misbehaving_reward_fails_only_its_own_call(
    nasty: TaskPool, secret: str, reason: str
) -> None:
    before, failed, after = await rewards(nasty, [ask("fine"), ask(secret), ask("fine", 2)])
    assert isinstance(failed, TaskFailed), failed
    assert failed.kind in ("error", "died")
    assert re.search(reason, failed.reason), failed.reason
    assert (before, after) == (Score(1.0), Score(2.0))


async def test_a_hanging_reward_is_interrupted_and_its_process_goes_on(directory: Path) -> None:
    async with TaskPool(NASTY, {"directory": str(directory)}, timeout_s=HANG_TIMEOUT_S) as pool:
        _, failed, _, after = await rewards(
            pool, [ask(act) for act in ("who", "hang", "unjudged", "fine")]
        )
        before = (directory / "who").read_text()
        await pool.reward(ask("who"))
    assert failed == TaskFailed("unjudged", "no answer in 0.5 s")
    assert after == Score(1.0)
    assert (directory / "who").read_text() == before


@pytest.mark.parametrize("act", ["fine", "alarm"])
async def test_time_between_rewards_does_not_count_as_reward_time(
    directory: Path, act: str
) -> None:
    """Also when the task has put its own handler in place of ours."""
    async with TaskPool(NASTY, {"directory": str(directory)}, timeout_s=HANG_TIMEOUT_S) as pool:
        await rewards(pool, [ask("who"), ask(act)])
        before = (directory / "who").read_text()
        await asyncio.sleep(2 * HANG_TIMEOUT_S)
        await rewards(pool, [ask("who")])
    assert (directory / "who").read_text() == before


async def test_a_process_whose_reward_cannot_be_interrupted_is_killed() -> None:
    async with TaskPool(NASTY, timeout_s=HANG_TIMEOUT_S) as pool:
        failed, after = await rewards(pool, [ask("deaf"), ask("fine")])
    assert failed == TaskFailed("timeout", "no answer in 1.5 s")
    assert after == Score(1.0)


async def test_a_reward_has_parts_and_an_answer_may_not_be_judged(nasty: TaskPool) -> None:
    assert await rewards(nasty, [ask("parts"), ask("unjudged")]) == [
        Score(0.5, {"form": 1.0, "length": -0.5}),
        TaskFailed("unjudged", "too hard for me"),
    ]


async def test_processes_that_a_reward_forked_are_killed(nasty: TaskPool, directory: Path) -> None:
    await nasty.reward(ask("fork"))
    pids = [int(line) for line in (directory / "pids").read_text().split()]
    assert len(pids) == 2
    async with asyncio.timeout(HANG_S):
        while any(map(is_running, pids)):  # noqa: ASYNC110 - a process that is not our child has no event
            await asyncio.sleep(0.01)


async def test_a_task_may_print_a_little_in_every_call(nasty: TaskPool, directory: Path) -> None:
    assert await rewards(nasty, [ask("chat")] * 40) == [Score(0.0)] * 40


async def test_a_prompt_that_crashes_or_is_too_long_fails_alone(nasty: TaskPool) -> None:
    assert isinstance(await nasty.prompt(-1), TaskFailed)
    assert isinstance(await nasty.prompt(TASK_MESSAGE_BYTES_MAX + 1), TaskFailed)
    assert await nasty.prompt(2) == TaskPrompt(pack_tokens([0, 1]), {"index": "2"})


async def test_an_output_too_long_to_send_fails_alone(nasty: TaskPool) -> None:
    first, second = await rewards(nasty, [ask("fine", TASK_MESSAGE_BYTES_MAX), ask("fine")])
    assert isinstance(first, TaskFailed)
    assert second == Score(1.0)


async def test_calls_beyond_the_limit_wait_and_are_answered(nasty: TaskPool) -> None:
    calls = [ask("fine", n) for n in range(3 * PIPELINED_MAX)]
    assert await rewards(nasty, calls) == [Score(float(n)) for n in range(3 * PIPELINED_MAX)]
    wide = [ask("fine", TASK_MESSAGE_BYTES_MAX // 12)] * 5
    assert await rewards(nasty, wide) == [Score(float(TASK_MESSAGE_BYTES_MAX // 12))] * 5


async def test_a_cancelled_call_leaves_the_pool_usable(nasty: TaskPool) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await nasty.reward(ask("hang"))
    assert await nasty.reward(ask("fine")) == Score(1.0)


async def test_processes_of_a_pool_work_at_the_same_time() -> None:
    async with TaskPool(NASTY, processes=2, timeout_s=HANG_TIMEOUT_S) as pool:
        hang, fine = await asyncio.gather(pool.reward(ask("hang")), pool.reward(ask("fine")))
    assert isinstance(hang, TaskFailed)
    assert fine == Score(1.0)


def test_the_pool_gives_the_same_results_under_uvloop() -> None:
    async def scenario() -> list[Score | TaskFailed]:
        async with TaskPool(NASTY, timeout_s=TIMEOUT_S) as pool:
            return await rewards(
                pool, [ask(secret) for secret in ("fine", "crash", "print", "fork", "fine")]
            )

    results = uvloop.run(scenario())
    assert [type(result) for result in results] == [
        Score,
        TaskFailed,
        TaskFailed,
        TaskFailed,
        Score,
    ]


async def test_the_process_has_its_own_user_and_no_environment(
    nasty: TaskPool, directory: Path
) -> None:
    assert await nasty.reward(ask("who")) == Score(0.0)
    pid, uid, environment = (directory / "who").read_text().split(" ", 2)
    assert int(pid) != os.getpid()
    assert int(uid) in (TASK_UIDS if os.geteuid() == 0 else [os.getuid()])
    found = eval(environment)
    # Python itself sets LC_CTYPE where no locale is given.
    assert set(found) - {"LC_CTYPE"} == {"PYTHONHASHSEED", "TZ"}, "alike on every host"


async def test_closing_a_pool_kills_its_processes_and_fails_open_calls(directory: Path) -> None:
    pool = TaskPool(NASTY, {"directory": str(directory)})
    await pool.start()
    await pool.reward(ask("who"))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(pool.reward(ask("hang")))
        await asyncio.sleep(0)
        await pool.close()
    assert isinstance(waiting.result(), TaskFailed)
    assert isinstance(await pool.reward(ask("fine")), TaskFailed)
    assert not is_running(int((directory / "who").read_text().split()[0]))


@pytest.mark.parametrize(
    ("task", "options", "reason"),
    [
        (NASTY, {"refuse": True}, "I refuse"),
        (NASTY, {"no_such": 1}, "no_such"),
        ("no_such_module:Task", {}, "no_such_module"),
        ("tests.support.nasty_task:NoSuchClass", {}, "NoSuchClass"),
        ("sort_digits", {"digits_min": 1}, "digits_min"),
    ],
)
async def test_a_task_that_cannot_start_is_the_operators_fault(
    task: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(OperatorFault, match=reason):
        await TaskPool(task, options).start()


@pytest.mark.parametrize(
    "reply",
    [
        [1e300, {}],
        [float("nan"), {}],
        [1.0, {"x" * 65: 1.0}],
        [1.0, {str(number): 1.0 for number in range(33)}],
        [1.0, {"huge": 1.7e308}],
        [1, {}],
    ],
)
def test_a_malformed_score_of_a_hostile_process_is_a_failure(reply: object) -> None:
    assert isinstance(parse_score(reply), TaskFailed)


@pytest.mark.parametrize(
    "reply",
    [
        [b"1234", {}, "r" * 65, {}],
        [b"1234", {"t" * 65: "x"}, "", {}],
        [b"1234", {str(number): "x" for number in range(17)}, "", {}],
        [b"1234", {}, "", {"a" * 65: b""}],
        [b"1234", {}, "", {str(number): bytes(60_000) for number in range(16)}],
        [b"123", {}, "", {}],
    ],
)
def test_a_malformed_prompt_of_a_hostile_process_is_a_failure(reply: object) -> None:
    assert isinstance(parse_prompt(reply), TaskFailed)


def test_a_long_tag_of_a_hostile_process_is_cut() -> None:
    found = parse_prompt([b"1234", {"tag": "x" * 5000}, "", {}])
    assert isinstance(found, TaskPrompt)
    assert found.tags == {"tag": "x" * 64}
