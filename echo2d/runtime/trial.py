"""`echo2d try`: tries a run's tasks, with the same processes, sandboxes and limits as the run.

    config --> task processes --prompts--> tokens --> text, as the model reads it
                    ^ answers: the base model's, or given ones
                    +--> rewards, their parts, seconds, tracebacks
    the first rows' expected answers --> the same processes

Nothing is written. A problem would end the run; a caution means that the run would learn little. Not
here: the checks that need no task (`config/checks.py`).
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import pvariance

from echo2d.config.checks import config_cautions
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import RunId
from echo2d.core.protocol.answer_end import WHOLE_ENDS, output_limit
from echo2d.core.protocol.control_messages import Finish
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.engines.base import Engine, EngineOptions, GenerateRequest, UnsuitedEngine
from echo2d.errors import EngineFault, OperatorFault
from echo2d.extras import install_command
from echo2d.registry import ENGINES, SCORERS, load
from echo2d.runtime.coordinator.data_plane import (
    OpenTask,
    open_evals,
    open_tasks,
    turn_end_cautions,
)
from echo2d.runtime.coordinator.main import make_rules, model_facts
from echo2d.runtime.coordinator.run_facts import day_of
from echo2d.runtime.coordinator.task_advice import told
from echo2d.tasks.episodes import Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import Score, ScoreCall
from echo2d.tasks.process import TaskFailed
from echo2d.texts.files import read_text_files
from echo2d.texts.model_texts import ModelTexts
from echo2d.texts.reference import difference

_SHORT = 60  # characters of an answer in a sentence

TellProgress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class TriedAnswer:
    """An answer and its reward."""

    text: str
    finish: str
    tokens: int  # of the answer; 0: it was given as a text
    reward: float | None  # None: computing it failed, or the task cannot judge this answer
    parts: dict[str, float]
    seconds: float
    failed: str = ""  # why there is no reward
    trace: str = ""  # the traceback of the operator's code
    turns: int = 1  # of an episode


@dataclass(frozen=True, slots=True)
class TriedPrompt:
    """A prompt of a task, and the answers to it."""

    where: str  # the row, if the prompt is one
    tokens: list[int]
    text: str  # the decoded tokens
    expected: str | None
    answers: list[TriedAnswer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TriedTask:
    """What the trial of one task has found."""

    name: str
    kind: str
    questions: int | None  # in an epoch; None: without end
    longest: int  # tokens of the longest of the first prompts
    network: bool
    judged: int  # expected answers that were scored
    worthless: int  # expected answers with a reward of 0
    leaked: int  # prompts that contain their expected answer
    groups: int
    varied: int | None  # groups whose rewards differ; None: no answer was made
    printed: str  # the beginning of what its processes wrote to stdout and stderr
    prompts: list[TriedPrompt]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial."""

    tasks: list[TriedTask]
    held_out: dict[str, int | None]  # questions of each [[eval]]
    problems: list[str]  # each would end the run
    cautions: list[str]  # the run would continue
    notes: list[str]  # what could not be tried


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """The options of a trial."""

    prompts: int = 2  # of each task, to be shown and answered
    samples: int = 0  # answers to each prompt; 0: the run's group_size
    answers: Sequence[str] = ()  # texts to be scored instead of the base model's answers
    generate: bool = True  # whether the base model writes answers


async def hold_trial(config: CoordinatorConfig, options: TrialOptions, tell: TellProgress) -> Trial:
    """Try all tasks of a run. tell: gets the present step, and how much of it is done.

    OperatorFault: the run could not start.
    """
    tell("starting the tasks", None)
    async with AsyncExitStack() as stack:
        day = day_of({})
        tasks = await open_tasks(stack, config, day=day)
        evals = await open_evals(stack, config, tasks, day=day)
        rules = await asyncio.to_thread(make_rules, config, RunId(""), tasks, evals)
        model = config.run.base_model
        texts = None if model is None else await asyncio.to_thread(_texts_of, model)
        trials = [_TaskTrial(config, task, rules, texts) for task in tasks]
        for trial in trials:
            await trial.draw(options.prompts, tell)
            await trial.judge_expected(tell)
        notes: list[str] = []
        problems: list[str] = []
        if options.answers:
            for trial in trials:
                await trial.judge_given(options.answers)
        elif options.generate and not any(trial.problems for trial in trials):
            try:
                notes += await _let_model_answer(stack, config, trials, options, tell)
            except EngineFault as fault:
                problems.append(f"run.base_model: {fault}")
        differs = None if model is None else await asyncio.to_thread(_differs, model)
        known = await asyncio.to_thread(model_facts, model)
    held_out = {each.asks.name: each.asks.pool.about.epoch_length for each in evals}
    found = [trial.found() for trial in trials]
    return Trial(
        found,
        held_out,
        [*problems, *(each for trial in trials for each in trial.problems)],
        [
            *filter(None, [differs]),
            *config_cautions(config, known, held_out),
            *turn_end_cautions(tasks, rules),
            *(each for trial in trials for each in trial.cautions),
        ],
        notes,
    )


class _TaskTrial:
    """The trial of one task."""

    def __init__(
        self, config: CoordinatorConfig, task: OpenTask, rules: RunRules, texts: ModelTexts | None
    ) -> None:
        of_task = rules.task(task.name)
        assert of_task is not None
        self.rules: TaskRules = of_task
        self.problems: list[str] = []
        self.cautions: list[str] = []
        self._context, self._group_size = rules.context_max, config.policy.group_size
        self._table, self._pool, self._name = task.table, task.pool, task.name
        self._environment = task.pool.about.environment
        self._episodes = Episodes(task.pool) if self._environment else None
        self._texts = texts
        self._prompts: list[TriedPrompt] = []
        self._shown = self._longest = self._judged = self._worthless = self._leaked = 0
        self._numbers = count()
        # Failures of answers that were reported already.
        self._reported: set[str] = set()

    @property
    def _own_scorer(self) -> bool:
        """Whether the operator's own code computes the rewards."""
        return self._table.options.get("scorer", "exact") not in SCORERS or ":" in self._table.kind

    async def draw(self, prompts: int, tell: TellProgress) -> None:
        """Draw the first prompts, and choose those that are shown. OperatorFault: a prompt cannot be made."""
        # The expected answers of at most 200 rows are scored, and the prompts of these rows are measured.
        most = 200 if self._pool.about.in_text and self._episodes is None else prompts
        last = min(most, self._pool.about.epoch_length or most)
        for index in range(last):
            tell(f"task {self._name}: prompts", index / last)
            tokens, where = await self._draw_one(index)
            if tokens is None:
                break
            self._longest = max(self._longest, len(tokens))
            full = self._context is not None and len(tokens) >= self._context
            expected = None
            if self._episodes is None:
                found = await self._pool.expected(index)
                if isinstance(found, TaskFailed):
                    self.problems.append(
                        f"task {self._name}: prompt {index}: {told(found, self._table)}"
                    )
                    return
                expected, where = found
            self._prompts.append(TriedPrompt(where, tokens, self._decoded(tokens), expected))
            if full:
                self.problems.append(
                    f"task {self._name}: {where or f'prompt {index}'}: a prompt of {len(tokens)} tokens fills the "
                    f"model's context of {self._context}: leave it out, or shorten it"
                )
                break
        self._shown = min(prompts, len(self._prompts))
        if self._episodes is not None:
            self.cautions += [f"task {self._name}: {each}" for each in self._episodes.cautions]

    async def _draw_one(self, index: int) -> tuple[list[int] | None, str]:
        """The tokens of a prompt; None: there are no more."""
        if self._episodes is None:
            found = await self._pool.prompt(index)
            given = b"" if isinstance(found, TaskFailed) else found.tokens
        else:
            first = await self._episodes.reset(next(self._numbers), index, 0)
            found = first if isinstance(first, TaskFailed) else None  # type: ignore[assignment]
            given = b"" if isinstance(first, TaskFailed) else first.given
        if isinstance(found, TaskFailed):
            if found.kind == "end" and index:
                return None, ""
            raise OperatorFault(f"task {self._name}: prompt {index}: {told(found, self._table)}")
        return unpack_tokens(given).tolist(), ""

    async def judge_expected(self, tell: TellProgress) -> None:
        """Score the expected answers, each as the answer to its own prompt."""
        worthless: TriedPrompt | None = None
        leaked: TriedPrompt | None = None
        known = [(at, each) for at, each in enumerate(self._prompts) if each.expected is not None]
        for done, (index, prompt) in enumerate(known):
            tell(f"task {self._name}: expected answers", done / len(known))
            expected = prompt.expected or ""
            if not expected:
                self.problems.append(
                    f"task {self._name}: {prompt.where}: the expected answer is empty; leave the row out"
                )
                return
            if re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", prompt.text):
                self._leaked, leaked = self._leaked + 1, leaked or prompt
            score = await self._pool.judge(index, expected)
            if isinstance(score, TaskFailed):
                self._tell_failure(f"the expected answer {_short(expected)!r}: ", score)
                return
            self._judged += 1
            if score.reward == 0:
                self._worthless, worthless = self._worthless + 1, worthless or prompt
        if worthless is not None:
            self._tell_worthless(worthless)
        if known and (said := await self._pool.data_caution()):
            self.cautions.append(f"task {self._name}: {said}")
        if leaked is not None:
            self.cautions.append(
                f"task {self._name}: {self._leaked} of {len(known)} prompts hold the text of their expected "
                f"answer, e.g. {leaked.where} {_short(leaked.expected or '')!r}: the model may copy it"
            )

    def _tell_worthless(self, first: TriedPrompt) -> None:
        told = (
            f"task {self._name}: {self._worthless} of {self._judged} expected answers get a reward of 0 from the "
            f"scorer, e.g. {first.where} {_short(first.expected or '')!r}"
        )
        if self._worthless < self._judged or self._own_scorer:
            self.cautions.append(told)
        else:
            self.problems.append(f"{told}; name another answer column, or another scorer")

    def _tell_failure(self, what: str, failed: TaskFailed) -> None:
        """Report a failure, once for each place in the operator's code."""
        if (kind := failed.at or failed.reason) in self._reported:
            return
        self._reported.add(kind)
        self.problems.append(f"task {self._name}: the reward of {what}{told(failed, self._table)}")

    async def judge_given(self, answers: Sequence[str]) -> None:
        """Score these texts as answers to the shown prompts."""
        if not self._pool.about.in_text or self._episodes is not None:
            raise OperatorFault(
                f"--answer: task {self._name} does not take a text as its answer; leave --answer out"
            )
        for index, prompt in enumerate(self._prompts[: self._shown]):
            for text in answers:
                began = time.perf_counter()
                score = await self._pool.judge(index, text)
                prompt.answers.append(self._tried(text, "stop", 0, score, began))

    async def play(self, engine: Engine, samples: int, tell: TellProgress) -> None:
        """Let the base model answer the shown prompts, and score its answers."""
        for index, prompt in enumerate(self._prompts[: self._shown]):
            play = self._score_answers if self._episodes is None else self._play_episodes
            wanted, done = samples or self._group_size, 0
            async with aclosing(play(engine, index, prompt, wanted)) as answers:
                async for answer in answers:
                    prompt.answers.append(answer)
                    done += 1
                    tell(
                        f"task {self._name}: answers to prompt {index + 1} of {self._shown}",
                        done / wanted,
                    )
        ends = [each.finish in WHOLE_ENDS for prompt in self._prompts for each in prompt.answers]
        if ends and not any(ends):
            self.cautions.append(
                f"task {self._name}: all {len(ends)} answers were cut off at sampling.max_new_tokens = "
                f"{self.rules.max_new_tokens}, or at the model's context"
            )

    async def _score_answers(
        self, engine: Engine, index: int, prompt: TriedPrompt, samples: int
    ) -> AsyncGenerator[TriedAnswer, None]:
        written = await self._write(engine, prompt.tokens, samples)
        for tokens, finish in written:
            began = time.perf_counter()
            score = await self._pool.reward(ScoreCall(index, pack_tokens(tokens), finish))
            yield self._tried(self._decoded(tokens), finish, len(tokens), score, began)

    async def _play_episodes(
        self, engine: Engine, row: int, prompt: TriedPrompt, samples: int
    ) -> AsyncGenerator[TriedAnswer, None]:
        """Play episodes that begin with this prompt, one after the other."""
        assert self._episodes is not None
        assert self.rules.episode is not None
        for seed in range(samples):
            episode, began = next(self._numbers), time.perf_counter()
            turn = await self._episodes.reset(episode, row, seed)
            said, transcript, finish, turns = "", list(prompt.tokens), "stop", 0
            result: Score | TaskFailed | None = None
            while isinstance(turn, EpisodeTurn) and turns < self.rules.episode.turns_max:
                ((tokens, end),) = await self._write(engine, transcript, 1)
                call = StepCall(
                    episode, turns, turn.state, pack_tokens(transcript), pack_tokens(tokens), end
                )
                found = await self._episodes.step(call)
                turns, finish = turns + 1, end
                said += self._decoded(tokens)
                transcript = [*transcript, *tokens]
                if isinstance(found, EpisodeTurn):
                    given = unpack_tokens(found.given).tolist()
                    transcript = given if found.branch else [*transcript, *given]
                    said += self._decoded(given)
                    turn = found
                    continue
                result = found if isinstance(found, TaskFailed) else found.score
                break
            if isinstance(turn, TaskFailed):
                result = turn
            if result is None:
                self._episodes.drop(episode)
                result = TaskFailed("unjudged", f"the episode has more than {turns} turns")
            tried = self._tried(said, finish, len(transcript), result, began)
            yield replace(tried, turns=turns)

    async def _write(
        self, engine: Engine, prompt: Sequence[int], samples: int
    ) -> list[tuple[list[int], Finish]]:
        limit = output_limit(
            self.rules.max_new_tokens, prompt_tokens=len(prompt), context_max=self._context
        )
        request = GenerateRequest(
            f"trial-{next(self._numbers)}",
            prompt,
            samples,
            max(1, limit.tokens),
            self.rules.sampling,
            self.rules.stop_token_ids,
        )
        written: list[list[int]] = [[] for _ in range(samples)]
        ends: list[Finish] = ["length"] * samples
        async for output in engine.generate(request):
            written[output.sample] += output.tokens
            if output.finish is not None and output.finish != "abort":
                ends[output.sample] = output.finish
        return list(zip(written, ends, strict=True))

    def _tried(
        self, text: str, finish: str, tokens: int, score: Score | TaskFailed, began: float
    ) -> TriedAnswer:
        seconds = time.perf_counter() - began
        if isinstance(score, Score):
            return TriedAnswer(text, finish, tokens, score.reward, dict(score.parts), seconds)
        if score.kind == "error":
            self._tell_failure("an answer: ", score)
        return TriedAnswer(text, finish, tokens, None, {}, seconds, str(score), score.trace)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return "" if self._texts is None else self._texts.decode(tokens)

    def found(self) -> TriedTask:
        shown = self._prompts[: self._shown]
        groups = [
            [each.reward for each in prompt.answers if each.reward is not None] for prompt in shown
        ]
        full = [group for group in groups if len(group) > 1]
        varied = sum(pvariance(group) > 0 for group in full) if full else None
        if varied == 0:
            self.cautions.append(
                f"task {self._name}: the answers of each of {len(full)} groups have equal rewards: a "
                "step learns nothing from such groups"
            )
        return TriedTask(
            self._name,
            self._table.kind,
            self._pool.about.epoch_length,
            self._longest,
            self._table.network,
            self._judged,
            self._worthless,
            self._leaked,
            len(full),
            varied,
            self._pool.printed,
            shown,
        )


async def _let_model_answer(
    stack: AsyncExitStack,
    config: CoordinatorConfig,
    trials: Sequence[_TaskTrial],
    options: TrialOptions,
    tell: TellProgress,
) -> list[str]:
    """Let the base model answer. Returns notes on why it could not. EngineFault: no engine can load it."""
    model = config.run.base_model
    if model is None:
        return ["run.base_model is not given, so no answers were made; --answer TEXT gives some"]
    if not await asyncio.to_thread(_has_weights, model):
        return [
            f"{model} has no *.safetensors here, so no answers were made; --answer TEXT gives some"
        ]
    tell("loading the base model", None)
    try:
        engine = await stack.enter_async_context(_engine(model, options.samples))
    except ImportError:
        return [
            f"no answers were made, which needs torch ({install_command('torch')}); --answer TEXT gives some"
        ]
    except (UnsuitedEngine, OperatorFault) as fault:
        return [f"no answers were made: {fault}; --answer TEXT gives some"]
    for trial in trials:
        await trial.play(engine, options.samples, tell)
    return []


@asynccontextmanager
async def _engine(model: Path, samples: int) -> AsyncIterator[Engine]:
    """The torch engine, serving the base model. ImportError: torch is not installed."""
    options = EngineOptions(
        count=1, slots=max(samples, 16), threads=0, device="auto", dtype="auto", folder=model
    )
    (engine,) = await asyncio.to_thread(lambda: load(ENGINES["torch"])(options))
    await engine.start()
    try:
        await engine.refit(model, "base model")
        yield engine
    finally:
        await engine.close()


def _has_weights(model: Path) -> bool:
    return any(model.glob("*.safetensors"))


def _texts_of(model: Path) -> ModelTexts | None:
    """The model's tokenizer; None: it has none, and the tasks are in tokens."""
    files = read_text_files(model)
    return ModelTexts(files) if "tokenizer.json" in files else None


def _differs(model: Path) -> str:
    if not (model / "tokenizer.json").exists():
        return ""
    differs = difference(model)
    return f"{differs}: the model does not know such prompts" if differs else ""


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else text[:_SHORT] + "..."
