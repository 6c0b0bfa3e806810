"""Tasks in text, in real processes: tokens by the model's template, rewards by the text."""

import asyncio
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.core.protocol.control_messages import Finish
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.errors import OperatorFault
from echo2d.tasks.pool import CONCURRENT_MAX, Score, ScoreCall, TaskPool, TaskPrompt, TextSettings
from echo2d.tasks.process import TaskFailed
from tests.support.texts import bytes_tokenizer, write_text_model

ECHO = "tests.support.text_task:Echo"
JUDGE = "tests.support.text_task:Judge"
TIMEOUT_S = 600.0  # no test waits for it
END = 0  # any id: the last token of an answer that stopped


@pytest.fixture
def model() -> Iterator[TextSettings]:
    """Where a task process of another user may read, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield TextSettings(str(write_text_model(Path(name) / "model")))


def answer(index: int, text: str, finish: Finish = "stop") -> ScoreCall:
    ids = bytes_tokenizer().encode(text).ids
    return ScoreCall(index, pack_tokens([*ids, END] if finish == "stop" else ids), finish)


async def test_messages_become_tokens_and_tokens_become_text(model: TextSettings) -> None:
    async with TaskPool(ECHO, texts=model) as pool:
        prompt = await pool.prompt(1)
        right, cut, wrong = [
            score
            async for score in pool.rewards(
                [answer(1, "éé"), answer(1, "éé", "length"), answer(1, "é")]
            )
        ]
    assert isinstance(prompt, TaskPrompt)
    asked = bytes_tokenizer().decode(unpack_tokens(prompt.tokens).tolist())
    assert (asked, prompt.tags, prompt.row) == ("<user>éé<answer>", {"level": "1"}, "r1")
    assert right == Score(1.0, {"right": 1.0, "tokens": 5.0})
    assert cut == Score(0.5, {"right": 1.0, "tokens": 4.0})
    assert wrong == Score(0.0, {"right": 0.0, "tokens": 3.0})


async def test_a_prompt_has_the_system_message_and_the_templates_variables(
    model: TextSettings,
) -> None:
    settings = TextSettings(model.directory, system="s", options={"shout": True})
    async with TaskPool(ECHO, texts=settings) as pool:
        prompt = await pool.prompt(0)
    assert isinstance(prompt, TaskPrompt)
    text = bytes_tokenizer().decode(unpack_tokens(prompt.tokens).tolist())
    assert text == "<system>s<user>é!<answer>"


async def test_the_end_of_prompts_is_no_error(model: TextSettings) -> None:
    async with TaskPool(ECHO, texts=model) as pool:
        assert await pool.prompt(4) == TaskFailed("end", "")


async def test_a_task_in_text_needs_a_model(model: TextSettings) -> None:
    with pytest.raises(OperatorFault, match=r"no run\.base_model"):
        await TaskPool(ECHO).start()
    (Path(model.directory) / "tokenizer.json").unlink()
    with pytest.raises(OperatorFault, match=r"has no tokenizer\.json"):
        await TaskPool(ECHO, texts=model).start()


async def test_a_model_without_a_template_is_refused(model: TextSettings) -> None:
    write_text_model(Path(model.directory), template=None)
    async with TaskPool(ECHO, texts=model) as pool:
        failed = await pool.prompt(0)
    assert isinstance(failed, TaskFailed)
    assert "no chat template" in failed.reason


async def test_rows_are_asked_and_scored_in_a_process(model: TextSettings) -> None:
    rows = Path(model.directory) / "rows.csv"
    await asyncio.to_thread(rows.write_text, "prompt,answer\n1+1,2\n")
    async with TaskPool("rows", {"files": str(rows)}, texts=model) as pool:
        assert (pool.about.name, pool.about.epoch_length) == ("rows", 1)
        assert len(pool.about.digest) == 32
        assert await pool.reward(answer(5, "2")) == Score(1.0)


async def test_async_rewards_of_one_process_wait_concurrently(model: TextSettings) -> None:
    """Of 64 rewards in one process none is there before all were asked for."""
    async with TaskPool(JUDGE, {"beside": 64}, texts=model, timeout_s=TIMEOUT_S) as pool:
        assert pool.concurrent
        assert pool.at_once == CONCURRENT_MAX == 64
        await pool.prompt(0)
        calls = [answer(0, "x" * (n % 5)) for n in range(64)]
        scores = [score async for score in pool.rewards(calls)]
    assert scores == [Score(float(n % 5)) for n in range(64)]


async def test_one_late_judge_delays_and_harms_no_other_answer(model: TextSettings) -> None:
    async with TaskPool(JUDGE, texts=model, timeout_s=2.0) as pool:
        calls = [answer(0, text) for text in ("never", "a", "raise", "bb")]
        late, one, raised, two = [score async for score in pool.rewards(calls)]
        assert await pool.reward(answer(0, "ccc")) == Score(3.0)
    assert late == TaskFailed("timeout", "no answer in 2 s")
    assert raised == TaskFailed("error", "ValueError: no")
    assert (one, two) == (Score(1.0), Score(2.0))


async def test_a_judge_that_blocks_its_process_is_interrupted(model: TextSettings) -> None:
    async with TaskPool(JUDGE, texts=model, timeout_s=4.0) as pool:
        blocked, one = [score async for score in pool.rewards([answer(0, "block"), answer(0, "a")])]
    assert blocked == TaskFailed("unjudged", "it blocked its process for 2 s")
    assert one == Score(1.0)


async def test_an_expression_with_huge_powers_costs_only_its_own_answer(
    model: TextSettings,
) -> None:
    """math-verify would compute it; the task's time ends that, and the process goes on."""
    rows = Path(model.directory) / "rows.csv"
    await asyncio.to_thread(rows.write_text, "prompt,answer\n1+1,2\n")
    options = {"files": str(rows), "scorer": "math"}
    async with TaskPool("rows", options, texts=model, timeout_s=2.0) as pool:
        texts = ["2", "3", "2", "$9^{9^{9^9}}$", "2", "3", "2", "\\boxed{2}"]
        scores = [score async for score in pool.rewards([answer(0, text) for text in texts])]
    others = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [score for at, score in enumerate(scores) if at != 3] == list(map(Score, others))
    assert scores[3] in (Score(0.0), TaskFailed("unjudged", "no answer in 2 s"))


async def test_a_process_that_starts_again_with_other_rows_scores_nothing(
    model: TextSettings,
) -> None:
    """Prompts are asked by number: another file would give an answer another question's reward."""
    rows = Path(model.directory) / "rows.csv"
    await asyncio.to_thread(rows.write_text, "prompt,answer\n1+1,2\n")
    async with TaskPool("rows", {"files": str(rows)}, texts=model) as pool:
        await asyncio.to_thread(rows.write_text, "prompt,answer\n1+1,2\n2+2,4\n")
        for process in pool._processes:
            await process.kill()
        failed = await pool.reward(answer(0, "2"))
    assert failed == TaskFailed("died", "its data or options have changed since the run began")


async def test_a_task_gets_the_answer_up_to_its_stop_string(model: TextSettings) -> None:
    settings = dataclasses.replace(model, stops=("é", "zz"))
    async with TaskPool(JUDGE, texts=settings) as pool:

        async def score(text: str, finish: Finish) -> Score | TaskFailed:
            tokens = bytes_tokenizer().encode(text, add_special_tokens=False).ids
            return await pool.reward(ScoreCall(0, pack_tokens(tokens), finish))

        # The reward is the number of characters.
        assert await score("abzzé", "stop_string") == Score(2.0)
        assert await score("abé", "stop_string") == Score(2.0)
        assert await score("abz", "length") == Score(3.0)
        lie = await score("abz", "stop_string")
    assert isinstance(lie, TaskFailed)
    assert lie.kind == "error"
    assert "was reported to end at a stop string" in lie.reason
