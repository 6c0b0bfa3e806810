"""The tasks of a run: starts their processes, makes their rules, and passes each call to its task.

    [[task]] --> TaskPool --introduces itself--> TaskRules, TaskBegun
    DrawPrompt, ScoreSample, StepEnvironment --by the task's name--> the task's calls --> event

A task's data and the files that turn its text into tokens must not change within a run: the ledger
names a prompt by its number and an answer by its tokens. It has the digests of the data and of the files.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.tasks import EvalTable, SamplingTable, TaskTable
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import EpisodeRules, EvalRules, Informative, RowFilter, TaskRules
from echo2d.core.work.events import (
    DrawPrompt,
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    ProbeRewards,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    RewardsProbed,
    SampleScored,
    ScoreSample,
    StepEnvironment,
    TaskBegun,
    TaskProgress,
)
from echo2d.errors import OperatorFault
from echo2d.model_files import require_model
from echo2d.process_environment import task_environment
from echo2d.runtime.coordinator.agent_episodes import AgentCalls
from echo2d.runtime.coordinator.environment_calls import EnvironmentCalls
from echo2d.runtime.coordinator.task_advice import FailureLog, told
from echo2d.runtime.coordinator.task_calls import OverlongPenalty, TaskCalls
from echo2d.tasks.agents import AGENT_SILENCE_S
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.pool import Limits, TaskPlace, TaskPool, TextSettings
from echo2d.tasks.process import TaskFailed
from echo2d.texts.files import text_digest

# Options with which one of our tasks gives its held-out questions. For other tasks the operator sets such options.
_HELD_OUT: Mapping[str, Mapping[str, object]] = {
    "rows": {"split": "heldout", "epochs": 1},
    "gym": {"split": "heldout"},
    "sort_digits": {"split": "heldout"},
}
_AGENTS = "agents"
# Options that do not change the prompts. The task's own digest covers the data in `files`.
MAY_CHANGE = frozenset({
    "files", "epochs", "scorer", "scorer_options", "answer", "answer_after", "silence_s",
})  # fmt: skip
# Weights are rounded to this denominator: sums of floats would drift over a long run.
WEIGHT_DENOMINATOR_MAX = 10_000
SLOW_START_S = 20.0  # imports of torch take this long on a loaded host

log = logging.getLogger("echo2d.task")


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task whose processes have introduced themselves."""

    name: str
    table: TaskTable
    pool: TaskPool
    # The digest of the files that turn the task's text into tokens; empty for a task in tokens.
    texts: bytes

    @property
    def begun(self) -> TaskBegun:
        """Digests of everything that decides which prompt a number names, and which tokens the prompt has."""
        table = self.table
        options = {key: value for key, value in table.options.items() if key not in MAY_CHANGE}
        said = [table.kind, options, table.system, table.template]
        told = json.dumps(said, sort_keys=True, default=str).encode()
        return TaskBegun(self.name, blake3(self.pool.about.digest + told).digest(), self.texts)


class DataPlane:
    """See the module docstring."""

    def __init__(
        self,
        tasks: Mapping[str, TaskCalls],
        environments: Mapping[str, EnvironmentCalls | AgentCalls] = MappingProxyType({}),
    ) -> None:
        self._tasks, self._environments = tasks, environments
        self.agents = {
            name: calls for name, calls in environments.items() if isinstance(calls, AgentCalls)
        }
        self._draws = {name: task.draw for name, task in tasks.items()}
        self._draws |= {name: environment.draw for name, environment in environments.items()}

    async def draw(self, action: DrawPrompt) -> PromptDrawn | PromptFailed | PromptsEnded:
        """Draw a prompt; see `PromptCalls.draw`."""
        return await self._draws[action.task](action)

    async def probe(self, action: ProbeRewards) -> RewardsProbed:
        """Score the expected answers of a task's first prompts."""
        task = self._tasks.get(action.task) or self._environments[action.task]
        return await task.probe(action)

    def step(
        self, action: StepEnvironment
    ) -> Coroutine[Any, Any, EnvironmentStepped | EpisodeEnded]:
        """Give a turn to an environment; see `EnvironmentCalls.step`."""
        return self._environments[action.task].step(action)

    def forget(self, action: ForgetEpisode) -> None:
        """Let an environment drop this episode."""
        self._environments[action.task].forget(action)

    def shares(self, actions: Iterable[ScoreSample]) -> list[Sequence[ScoreSample]]:
        """Divide samples among as many calls of `score` as the tasks can work on at once."""
        by_task: dict[str, list[ScoreSample]] = {}
        for action in actions:
            by_task.setdefault(action.task, []).append(action)
        return [share for task, its in by_task.items() for share in self._tasks[task].shares(its)]

    def score(self, actions: Sequence[ScoreSample]) -> AsyncIterator[SampleScored]:
        """Score one of the `shares`; see `TaskCalls.score`."""
        return self._tasks[actions[0].task].score(actions)


async def _opened(
    stack: AsyncExitStack,
    table: TaskTable,
    config: CoordinatorConfig,
    stops: tuple[str, ...],
    day: str,
) -> TaskPool:
    """Start the processes of a task; `stack` ends them. A slow start is logged once."""
    own = [each for each in (table.kind, str(table.options.get("scorer"))) if ":" in each]
    does = f"imports {' and '.join(own)}" if own else "reads its rows"
    said = "task=%s still starts after %g s: it %s"
    slow = asyncio.get_running_loop().call_later(
        SLOW_START_S, log.warning, said, table.name or table.kind, SLOW_START_S, does
    )
    try:
        return await stack.enter_async_context(_pool(table, config, stops, day))
    finally:
        slow.cancel()


async def open_tasks(
    stack: AsyncExitStack, config: CoordinatorConfig, *, day: str = ""
) -> list[OpenTask]:
    """Start the processes of all tasks; `stack` ends them. day: as in `ModelTexts`.

    OperatorFault: the base model cannot be used, a task cannot be started, or two have the same name.
    """
    model = config.run.base_model
    texts = b"" if model is None else await asyncio.to_thread(_text_digest, config, model)
    found: dict[str, OpenTask] = {}
    for table in config.tasks:
        stops = config.sampling_of(table).stop
        pool = await _opened(stack, table, config, stops, day)
        if stops and not pool.about.in_text:
            raise OperatorFault(
                f"sampling.stop: task {pool.about.name!r} is in tokens; expected no stop strings"
            )
        name = table.name or pool.about.name
        if name in found:
            raise OperatorFault(f"task.name: two tasks are called {name!r}; name one of them")
        if pool.about.environment:
            _check_environment(config, name, table)
        if table.kind == _AGENTS:
            await _check_opening(name, pool)
        found[name] = OpenTask(name, table, pool, texts if pool.about.in_text else b"")
    return list(found.values())


def _text_digest(config: CoordinatorConfig, model: Path) -> bytes:
    """OperatorFault: the model cannot be loaded, or our learner, if the config has its table, cannot train it."""
    try:
        require_model(model, trains=bool(config.learner))
    except OperatorFault as fault:
        raise OperatorFault(f"run.base_model: {fault}") from fault
    return text_digest(model)


def _check_environment(config: CoordinatorConfig, name: str, table: TaskTable) -> None:
    """OperatorFault: the config has a setting with which episodes do not work."""
    if table.kind == _AGENTS and not config.gateway.enabled:
        raise OperatorFault(
            f"gateway.enabled: agents outside play task {name!r} through the gateway; expected true"
        )
    if table.overlong_tokens:
        raise OperatorFault(
            f"task.overlong_tokens: task {name!r} is an environment; expected 0, and a reward that "
            "says what length costs"
        )


async def _check_opening(name: str, pool: TaskPool) -> None:
    """OperatorFault: the task does not say with which tokens the calls of agents begin."""
    first = await Episodes(pool).reset(0, 0, 0)
    if isinstance(first, TaskFailed):
        raise OperatorFault(
            f"task.options: {first.reason}; name the tokens that all calls of task {name!r} begin with: "
            "opening = [...]"
        )


@dataclass(frozen=True, slots=True)
class OpenEval:
    """An [[eval]]."""

    table: EvalTable
    asks: OpenTask  # the task that has the questions
    of: OpenTask  # the trained task of which these are the held-out questions


async def open_evals(
    stack: AsyncExitStack, config: CoordinatorConfig, tasks: Sequence[OpenTask], *, day: str = ""
) -> list[OpenEval]:
    """Start the processes of all evaluations; `stack` ends them. day: as in `ModelTexts`.

    OperatorFault: an evaluation cannot be started, names no task, or has the name of a task or of another evaluation.
    """
    names = [task.name for task in tasks]
    found: dict[str, OpenEval] = {}
    for table in config.evals:
        of = tasks[config.task_of(table, names)]
        kind = of.table.kind
        if kind == _AGENTS:
            raise OperatorFault(
                f"eval.task: agents outside play task {of.name!r}; expected another task"
            )
        options = {**of.table.options, **_HELD_OUT.get(kind, {}), **table.options}
        if options == of.table.options:
            raise OperatorFault(
                f"eval.options: the evaluation of task {of.name!r} would ask the questions that the run trains on; "
                "set options of the task's class that give other questions"
            )
        asks = replace(of.table, options=options, sampling={**of.table.sampling, **table.sampling})
        stops = config.sampling_of(asks, greedy=True).stop
        pool = await _opened(stack, asks, config, stops, day)
        name = table.name or f"{of.name}/heldout"
        if name in names or name in found:
            raise OperatorFault(f"eval.name: {name!r} is the name of a task or of another eval")
        found[name] = OpenEval(table, OpenTask(name, asks, pool, of.texts), of)
    return list(found.values())


def eval_rules(
    config: CoordinatorConfig, opened: OpenEval, model_ends: tuple[int, ...]
) -> EvalRules:
    table, length = opened.table, opened.asks.pool.about.epoch_length
    if not table.rows and length is None:
        raise OperatorFault(
            f"eval.rows: expected a number above 0, because task {opened.of.name!r} does not say how many "
            "questions it has; found 0"
        )
    return EvalRules(
        task=task_rules(config, opened.asks, model_ends, greedy=True),
        every=table.every,
        samples=table.samples,
        # A question that is asked twice would count as two, so there are at most `length` rows.
        rows=table.rows if length is None else min(table.rows or length, length),
        hold_s=table.hold_s,
        solved_at=table.solved_at,
    )


def begin_tasks(tasks: Iterable[OpenTask], before: Iterable[TaskProgress]) -> list[TaskBegun]:
    """The records of tasks that the ledger does not have yet.

    OperatorFault: a task has other data or another tokenizer than before.
    """
    known = {each.task: each for each in before}
    new = []
    for task in tasks:
        begun, past = task.begun, known.get(task.name)
        if past is None or not (past.data or past.texts):
            new.append(begun)
            continue
        for what, now, then in (
            ("data or options", begun.data, past.data),
            ("tokenizer or chat template", begun.texts, past.texts),
        ):
            if now != then:
                raise OperatorFault(
                    f"task {task.name!r}: its {what} changed since this run began; put the old "
                    "ones back, give the task another name, or begin a new run"
                )
    return new


def task_rules(
    config: CoordinatorConfig, task: OpenTask, model_ends: tuple[int, ...], *, greedy: bool = False
) -> TaskRules:
    """The rules of one task. model_ends: the model's own end tokens, which are added to the task's.

    greedy: as in `CoordinatorConfig.sampling_of`.
    """
    table, sampling = task.table, config.sampling_of(task.table, greedy=greedy)
    episode = None
    if task.pool.about.environment:
        episode = EpisodeRules(table.turns_max, table.episode_tokens, table.kind == _AGENTS)
    return TaskRules(
        name=task.name,
        weight=_weight(config, table),
        sampling=drawn(sampling),
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys((*task.pool.about.stop_token_ids, *model_ends))),
        stop_strings=sampling.stop,
        row_filter=_row_filter(table),
        pairs=table.sampler == "pairs",
        episode=episode,
    )


def turn_end_cautions(tasks: Iterable[OpenTask], rules: RunRules) -> list[str]:
    """A line for each task whose chat template ends a turn with a token that does not end an answer."""
    return [
        f"task {task.name}: the chat template ends a turn with token {end}, which is no end token of the "
        "model (generation_config.json): answers continue after it"
        for task in tasks
        if (end := task.pool.about.turn_end) is not None
        and (of_task := rules.task(task.name)) is not None
        and end not in of_task.stop_token_ids
    ]


def _row_filter(table: TaskTable) -> RowFilter | Informative | None:
    match table.sampler:
        case "filter":
            return RowFilter(table.retire_after, table.retest_after)
        case "informative":
            return Informative(table.explore)
    return None


def _weight(config: CoordinatorConfig, table: TaskTable) -> Fraction:
    """The task's share of the groups of a step, above 0, relative to the shares of the other tasks."""
    if table.groups_per_step:
        return Fraction(table.groups_per_step)
    share = table.weight / sum(task.weight for task in config.tasks)
    return Fraction(min(1.0, share)).limit_denominator(WEIGHT_DENOMINATOR_MAX)


def drawn(table: SamplingTable) -> Sampling:
    return Sampling(table.temperature, table.top_p, table.top_k, table.min_p)


def data_plane(tasks: Iterable[OpenTask], evals: Iterable[OpenEval], rules: RunRules) -> DataPlane:
    """Make the calls of these tasks. In an evaluation the length of an answer costs nothing."""
    limits: dict[str, int | None] = {task.name: task.max_new_tokens for task in rules.tasks}
    environments: dict[str, EnvironmentCalls | AgentCalls] = {}
    offered = asyncio.Event()
    answered = {}
    for task in (*tasks, *(each.asks for each in evals)):
        limit = limits.get(task.name)
        if task.table.kind == _AGENTS:
            environments[task.name] = _agents(task, rules, offered)
        elif task.pool.about.environment:
            environments[task.name] = EnvironmentCalls(
                Episodes(task.pool),
                name=task.name,
                vocab_size=rules.vocab_size,
                on_error=task.table.on_error,
                patient=limit is not None,
                failures=FailureLog(task.name, task.table),
            )
        else:
            answered[task.name] = _calls(task, rules.vocab_size, limit)
    return DataPlane(answered, environments)


def _agents(task: OpenTask, rules: RunRules, offered: asyncio.Event) -> AgentCalls:
    of_task, options = rules.task(task.name), task.table.options
    assert of_task is not None
    return AgentCalls(
        Episodes(task.pool),
        of_task,
        rules,
        silence_s=options.get("silence_s", AGENT_SILENCE_S),
        rows=options.get("rows", 0),
        in_text=task.pool.about.in_text,
        offered=offered,
    )


def _calls(task: OpenTask, vocab_size: int, limit: int | None) -> TaskCalls:
    """limit: the most tokens of an answer. None: an evaluation, in which length costs nothing."""
    table = task.table
    overlong = None
    if limit is not None and table.overlong_tokens:
        overlong = OverlongPenalty(limit, table.overlong_tokens, table.overlong_penalty)
    return TaskCalls(
        task.pool,
        name=task.name,
        vocab_size=vocab_size,
        on_error=table.on_error,
        failures=FailureLog(task.name, table),
        overlong=overlong,
        # A task can wait for its prompt, but an evaluation that waits for a question would hold up the run.
        patient=limit is not None,
    )


def _pool(
    table: TaskTable, config: CoordinatorConfig, stops: tuple[str, ...], day: str
) -> TaskPool:
    model, scorer = config.run.base_model, table.options.get("scorer")
    return TaskPool(
        table.kind,
        table.options,
        processes=table.processes,
        timeout_s=table.timeout_s,
        limits=Limits(
            memory_bytes_max=table.memory_bytes_max,
            cpu_s_max=table.cpu_s_max,
            network=table.network,
            read_paths=tuple(map(str, table.read_paths)),
        ),
        place=TaskPlace(
            environment=task_environment(table.environment),
            folder=config.folder,
            # Our own tasks do not see the operator's folders.
            modules=tuple(config.module_folders) if ":" in f"{table.kind}{scorer}" else (),
        ),
        told=lambda failed: told(failed, table),
        texts=None
        if model is None
        else TextSettings(
            str(model.absolute()), system=table.system, options=table.template, stops=stops, day=day
        ),
    )
