"""A run with several tasks: each prompt and reward reaches its own task, and their data stay the same."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import GroupId, RunId
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import NOTHING, Partial, RewardPart, Source, pack_tokens
from echo2d.core.rules.tasks import EpisodeRules, Informative, RowFilter
from echo2d.core.work.evaluation.open_evaluation import EVALUATION
from echo2d.core.work.events import (
    DrawPrompt,
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    PromptDrawn,
    PromptsEnded,
    ScoreSample,
    StepEnvironment,
    TaskProgress,
)
from echo2d.core.work.leases import group_of
from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.data_plane import (
    OpenTask,
    begin_tasks,
    data_plane,
    eval_rules,
    open_evals,
    open_tasks,
    task_rules,
)
from echo2d.runtime.coordinator.main import make_rules
from echo2d.tasks.sort_digits import EOS, answer
from tests.support.texts import write_text_model

RUN = RunId("run")
SORTS: dict[str, Any] = {"kind": "sort_digits", "name": "sorts", "processes": 1}


def config(folder: Path, *tasks: dict[str, Any], **tables: Any) -> CoordinatorConfig:
    return CoordinatorConfig.read(
        {
            "run": {"run_dir": "run", "snapshot_root": "out", "base_model": str(folder / "model")},
            "policy": {"trajectories_per_step": 8, "group_size": 2},
            "sampling": {"vocab_size": 256, "max_new_tokens": 30, "temperature": 0.9},
            "task": list(tasks),
            **tables,
        }
    )


def rows(folder: Path, *questions: str, **options: Any) -> dict[str, Any]:
    file = folder / "rows.csv"
    file.write_text("prompt,answer\n" + "".join(f"{each},{each}\n" for each in questions))
    options = {"files": [str(file)], "shuffle": False, **options}
    return {"kind": "rows", "processes": 1, "options": options, "read_paths": [str(file)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


async def opened(stack: AsyncExitStack, *args: Any, **tables: Any) -> list[OpenTask]:
    return await open_tasks(stack, config(*args, **tables))


async def test_each_prompt_and_reward_reaches_its_own_task(folder: Path) -> None:
    made = config(folder, SORTS, rows(folder, "ab", "c", epochs=1))
    async with AsyncExitStack() as stack:
        tasks = await open_tasks(stack, made)
        rules = await asyncio.to_thread(make_rules, made, RUN, tasks)
        plane = data_plane(tasks, (), rules)
        drawn = await plane.draw(DrawPrompt(3, "sorts"))
        assert isinstance(drawn, PromptDrawn)
        assert drawn.source == Source("sorts")
        asked = await plane.draw(DrawPrompt(1, "rows"))
        assert isinstance(asked, PromptDrawn)
        assert asked.source.task == "rows"
        assert len(asked.source.row) > 0
        assert await plane.draw(DrawPrompt(2, "rows")) == PromptsEnded(2, "rows")
        right = pack_tokens(answer([*memoryview(drawn.tokens).cast("i")]))
        said = asked.tokens[4 * len("<user>") : 4 * len("<user>c")]
        asks: Sequence[ScoreSample] = (
            ScoreSample(GroupId(1), 0, 3, right, "stop", "sorts"),
            ScoreSample(GroupId(2), 0, 1, said, "length", "rows"),
            ScoreSample(GroupId(1), 1, 3, right[:-4], "length", "sorts"),
        )
        shares = plane.shares(asks)
        assert sorted({each.task for each in share}.pop() for share in shares) == ["rows", "sorts"]
        scored = []
        for share in shares:
            scored += [event async for event in plane.score(share)]
        found = {(each.group, each.sample): each.reward for each in scored}
        assert found == {(1, 0): 1.0, (1, 1): 0.0, (2, 0): 1.0}


async def test_the_rules_of_a_run_follow_its_tables(folder: Path) -> None:
    other = {
        **rows(folder, "a"),
        "weight": 0.3,
        "sampling": {"temperature": 0.6, "top_k": 20, "max_new_tokens": 5},
        "sampler": "filter",
        "retest_after": 7,
    }
    made = config(folder, SORTS, other)
    async with AsyncExitStack() as stack:
        sorts, asks = [task_rules(made, each, (9,)) for each in await open_tasks(stack, made)]
    assert (sorts.name, sorts.sampling) == ("sorts", Sampling(0.9))
    assert (sorts.max_new_tokens, sorts.row_filter) == (30, None)
    assert sorts.stop_token_ids == (1, 9)
    assert asks.weight / sorts.weight == Fraction("0.3")
    assert asks.name == "rows"
    assert (asks.sampling, asks.max_new_tokens) == (Sampling(0.6, 1.0, 20), 5)
    assert asks.row_filter == RowFilter(1, 7)
    assert asks.stop_token_ids == (9,)
    for sampler, row_filter in (("informative", Informative(0.5)), ("pairs", None)):
        made = config(folder, {**SORTS, "sampler": sampler, "explore": 0.5})
        async with AsyncExitStack() as stack:
            [task] = [task_rules(made, each, ()) for each in await open_tasks(stack, made)]
        assert (task.row_filter, task.pairs) == (row_filter, sampler == "pairs")


async def test_two_tasks_of_one_name_are_refused(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(OperatorFault, match=r"task\.name: two tasks are called 'sorts'"):
            await opened(stack, folder, SORTS, SORTS)


async def test_data_and_tokenizer_stay_the_same_over_restarts(folder: Path) -> None:
    async def begun(*known: TaskProgress) -> list[TaskProgress]:
        async with AsyncExitStack() as stack:
            new = begin_tasks(await opened(stack, folder, SORTS, rows(folder, *questions)), known)
        return [TaskProgress(each.task, 5, each.data, each.texts) for each in new]

    questions = ["a", "b"]
    known = await begun()
    assert [each.task for each in known] == ["sorts", "rows"]
    assert all(each.data for each in known)
    assert [bool(each.texts) for each in known] == [False, True]
    assert await begun(*known) == []
    questions.append("c")
    with pytest.raises(
        OperatorFault, match=r"task 'rows': its data or options changed since this run began"
    ):
        await begun(*known)
    questions.pop()
    write_text_model(folder / "model", "{{ messages }}")
    with pytest.raises(OperatorFault, match=r"task 'rows': its tokenizer or chat template changed"):
        await begun(*known)


async def test_options_that_map_numbers_to_prompts_stay_the_same(folder: Path) -> None:
    async def begun(known: Sequence[TaskProgress], **options: Any) -> list[TaskProgress]:
        async with AsyncExitStack() as stack:
            found = await opened(stack, folder, rows(folder, "a", "b", "c", **options))
            new = begin_tasks(found, known)
        return [TaskProgress(each.task, 5, each.data, each.texts) for each in new]

    known = await begun(())
    assert await begun(known, epochs=3, scorer="regex", scorer_options={"pattern": "."}) == []
    for changed in ({"rng_seed": 1}, {"held_out": 0.5}, {"prompt": "{prompt}!"}):
        with pytest.raises(OperatorFault, match="its data or options changed"):
            await begun(known, **changed)


async def test_evaluations_ask_held_out_rows_under_their_own_names(folder: Path) -> None:
    asks = rows(folder, *map(str, range(40)), held_out=0.5)
    tables = [{}, {"name": "cold", "sampling": {"temperature": 0.0}, "rows": 5, "samples": 3}]
    made = config(folder, SORTS, asks, eval=[{**each, "task": "rows"} for each in tables])
    async with AsyncExitStack() as stack:
        tasks = await open_tasks(stack, made)
        evals = await open_evals(stack, made, tasks)
        whole, cold = [eval_rules(made, each, ()) for each in evals]
        length = evals[0].asks.pool.about.epoch_length
        assert length is not None
        assert length < 40
        assert (whole.name, whole.rows, whole.samples) == ("rows/heldout", length, 1)
        assert (cold.name, cold.rows, cold.samples) == ("cold", 5, 3)
        assert (whole.task.sampling, cold.task.sampling) == (Sampling(0.9), Sampling(0.0))
        plane = data_plane(tasks, evals, await asyncio.to_thread(make_rules, made, RUN, tasks))
        sides: list[set[str]] = []
        for name, count in (("rows", 60), ("cold", 60)):
            drawn = [await plane.draw(DrawPrompt(cursor, name)) for cursor in range(count)]
            sides.append({each.source.row for each in drawn if isinstance(each, PromptDrawn)})
        assert not sides[0] & sides[1]
        assert min(map(len, sides)) > 5
        assert PromptsEnded(59, "cold") == await plane.draw(DrawPrompt(59, "cold"))


async def test_episodes_of_an_environment_are_audited(folder: Path) -> None:
    game = {"kind": "echo2d.demo.two_turns:TwoTurnDigits", "name": "game", "processes": 1}
    made = config(folder, game, audit={"enabled": True, "trusted": ["mine"]})
    async with AsyncExitStack() as stack:
        tasks = await open_tasks(stack, made)
        rules = await asyncio.to_thread(make_rules, made, RUN, tasks, [])
    assert rules.audit is not None
    assert all(task.episode is not None for task in rules.tasks)


async def test_evaluations_play_the_held_out_rows_of_an_environment(folder: Path) -> None:
    """In processes of their own, with the same seed or another: two games at once end with their own rewards."""
    game = {
        "kind": "echo2d.demo.two_turns:TwoTurnDigits",
        "name": "game",
        "processes": 1,
        "turns_max": 5,
    }
    made = config(
        folder,
        game,
        eval=[{"task": "game", "rows": 3, "samples": 2, "options": {"split": "heldout"}}],
    )
    async with AsyncExitStack() as stack:
        tasks = await open_tasks(stack, made)
        evals = await open_evals(stack, made, tasks)
        rules = await asyncio.to_thread(make_rules, made, RUN, tasks, evals)
        [held] = rules.evals
        assert (held.name, held.rows, held.task.episode) == (
            "game/heldout",
            3,
            EpisodeRules(5, 8192),
        )
        plane = data_plane(tasks, evals, rules)
        drawn = await plane.draw(DrawPrompt(1, held.name))
        trained = await plane.draw(DrawPrompt(1, "game"))
        assert isinstance(drawn, PromptDrawn)
        assert isinstance(trained, PromptDrawn)
        assert drawn.source == Source("game/heldout")
        assert drawn.tokens != trained.tokens
        right = pack_tokens(answer([*memoryview(drawn.tokens).cast("i")]))
        wrong = pack_tokens([EOS])

        def order(sample: int, turn: int, before: Partial, said: bytes) -> StepEnvironment:
            whole = before.plus(said, bytes(len(said)), ())
            return StepEnvironment(
                group_of(EVALUATION, 1), sample, 0, turn, 1, 7, drawn.tokens, whole, "stop",
                task=held.name,
            )  # fmt: skip

        outputs = {}
        for sample, first in ((0, right), (1, wrong)):
            stepped = await plane.step(order(sample, 1, NOTHING, first))
            assert isinstance(stepped, EnvironmentStepped)
            assert (stepped.group, stepped.sample) == (group_of(EVALUATION, 1), sample)
            said = NOTHING.plus(first, bytes(len(first)), ())
            outputs[sample] = said.with_given(stepped.tokens)
        plane.forget(ForgetEpisode(group_of(EVALUATION, 1), 1, held.name))
        ended = await plane.step(order(0, 2, outputs[0], wrong))
    assert isinstance(ended, EpisodeEnded)
    parts = (RewardPart("first", 1.0), RewardPart("second", 0.0))
    assert (ended.reward, ended.parts) == (0.5, parts)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"task": "none"}, r"eval\.task: expected one of sorts, nasty; found 'none'"),
        ({"name": "sorts"}, r"eval\.name: 'sorts' is the name of a task"),
        ({"rows": 0}, r"eval\.rows: expected a number above 0, because task 'sorts' does not say"),
        ({"task": "nasty"}, r"eval\.options: the evaluation of task 'nasty' would ask"),
    ],
)
async def test_a_wrong_evaluation_is_refused_by_name(
    folder: Path, table: dict[str, Any], words: str
) -> None:
    nasty = {"kind": "tests.support.nasty_task:NastyTask", "name": "nasty", "processes": 1}
    made = config(folder, SORTS, nasty, eval=[table])
    async with AsyncExitStack() as stack:
        tasks = await open_tasks(stack, made)

        async def rules() -> None:
            for each in await open_evals(stack, made, tasks):
                eval_rules(made, each, ())

        with pytest.raises(OperatorFault, match=words):
            await rules()


def test_evaluations_beside_an_audit_need_a_trusted_worker(folder: Path) -> None:
    with pytest.raises(OperatorFault, match=r"audit\.trusted: .* \[\[eval\]\]"):
        config(folder, SORTS, eval=[{}], audit={"enabled": True})


@pytest.mark.parametrize("weight", [0.00001, 1e-9])
def test_a_task_weight_too_small_for_any_step_is_refused(folder: Path, weight: float) -> None:
    with pytest.raises(OperatorFault, match=r"task\.weight: expected at least 0\.001 of the sum"):
        config(folder, SORTS, {**SORTS, "weight": weight})


def test_shares_of_tasks_are_weights_or_exact_numbers(folder: Path) -> None:
    made = config(folder, {**SORTS, "groups_per_step": 3}, {**SORTS, "groups_per_step": 1})
    assert [each.groups_per_step for each in made.tasks] == [3, 1]
    for numbers in ([3, 0], [3, 2]):
        tables = [{**SORTS, "groups_per_step": each} for each in numbers]
        with pytest.raises(OperatorFault, match=r"task\.groups_per_step: .* add up to 4"):
            config(folder, *tables)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            {"temperature": 0},
            r"sampling\.temperature: expected at least 0\.001, or 0\.0 for \[\[eval\]\]",
        ),
        ({"top_q": 1}, r"sampling\.top_q: unknown key"),
        ({"vocab_size": 9}, r"task\.sampling\.vocab_size: all tasks use the one in \[sampling\]"),
    ],
)
def test_a_wrong_sampling_of_a_task_is_refused_by_name(
    folder: Path, sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(OperatorFault, match=words):
        config(folder, {**SORTS, "sampling": sampling})


AGENTS: dict[str, Any] = {"kind": "agents", "name": "outside", "processes": 1}


async def test_outside_agents_need_the_gateway_and_play_no_evaluation(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(OperatorFault, match=r"gateway\.enabled: agents outside play task"):
            await opened(stack, folder, AGENTS)
        made = config(folder, AGENTS, gateway={"enabled": True}, eval=[{"rows": 3}])
        tasks = await open_tasks(stack, made)
        with pytest.raises(OperatorFault, match=r"eval\.task: agents outside play task 'outside'"):
            await open_evals(stack, made, tasks)


async def test_the_beginning_of_agents_calls_is_known_before_the_run_begins(
    folder: Path,
) -> None:
    write_text_model(folder / "model", template=None)
    told = {**AGENTS, "options": {"opening": [5]}}
    async with AsyncExitStack() as stack:
        with pytest.raises(OperatorFault, match=r"task\.options: .*; name the tokens .* opening"):
            await opened(stack, folder, AGENTS, gateway={"enabled": True})
        [task] = await opened(stack, folder, told, gateway={"enabled": True})
        assert task.name == "outside"
