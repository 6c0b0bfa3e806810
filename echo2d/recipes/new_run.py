"""Sets up a run for `echo2d init`: makes its config, and tries it before anything is written.

    the operator's decisions --> run.toml's text --> config --trial--> folder, run, tokens

The trial is the one of `echo2d try`, but without answers of the base model. It finds mistakes that would make the run
fail.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.model_config import context_max
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.demo.two_turns import OPENING
from echo2d.errors import OperatorFault
from echo2d.model_files import require_model
from echo2d.recipes.learner_table import check_learner_table
from echo2d.recipes.recipe_file import changed, filled, parsed, toml
from echo2d.recipes.run_folder import (
    Boxes,
    WrittenRun,
    issue_agent_token,
    issue_tokens,
    require_new,
    url_of,
    whole_or_nothing,
    write_folder,
)
from echo2d.runtime.trial import TellProgress, Trial, TrialOptions, hold_trial
from echo2d.tasks.agents import Agents
from echo2d.tasks.rows.files import DataRow, RowFiles, found_files
from echo2d.tasks.rows.task import RowsTask
from echo2d.tasks.sort_digits import EOS, SortDigits

NewTask = Literal["tiny", "questions", "class", "environment", "agents"]

# Usual names of the column with the question, the likeliest first.
QUESTIONS = ("question", "problem", "prompt", "input", "query", "instruction")
ANSWERS = ("answer", "final_answer", "target", "output", "label", "solution")
# In GSM8K an answer has the steps first, then this mark, then the number.
BEFORE_ANSWER = "####"
# The share of the questions that is held out. If there are few questions, a larger share is, at most the second one.
_HELD_OUT, _HELD_OUT_MAX = 0.05, 0.2
_CACHE = Path.home() / ".cache" / "echo2d"
TINY_MODEL = "model"  # name of the tiny model's copy in the run's folder
# Settings for the tiny model; after 80 steps most of its answers are right.
_TINY = ("sampling.max_new_tokens=12", "learner.steps=80", "learner.lr=2e-4", "learner.threads=1")


@dataclass(frozen=True, slots=True)
class QuestionRows:
    """Rows with one right answer each. rows: files, patterns of files, or a directory of `datasets`.

    prompt, answer: names of columns; prompt may also be a text with names of columns in braces. asked: files with the
    held-out questions; None: a share of `rows` is held out.
    """

    rows: Sequence[str]
    prompt: str
    answer: str
    scorer: str = "math"
    asked: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class NewRun:
    """What the operator decides."""

    task: NewTask
    folder: Path  # for the config and the run
    host: str  # the address at which workers reach the coordinator
    kind: str = ""  # the value of task.kind, if `task` is "class" or "environment"
    questions: QuestionRows | None = None
    base_model: Path | None = None  # None: the tiny model, which is made here
    port: int = 7700
    max_new_tokens: int = 1024
    boxes: Boxes = field(default_factory=Boxes)
    settings: Sequence[str] = ()  # "table.key=value"


def first_row(rows: Sequence[str]) -> DataRow:
    """The first row of the data. OperatorFault: it cannot be read."""
    return RowFiles(found_files(rows)).row(0)


def offered_tokens(model: Path) -> int:
    """The suggested token limit per answer: 1024, or half of the model's context if that is less."""
    try:
        reads = context_max(json.loads((model / "config.json").read_bytes()))
    except (OSError, ValueError):
        reads = None  # `require_model` reports this error
    return 1024 if reads is None else min(1024, reads // 2)


def guess(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of these names that is a column, in upper or lower case; None: no name is a column."""
    found = {column.lower(): column for column in columns}
    return next((found[name] for name in names if name in found), None)


def set_up(job: NewRun, tell: TellProgress) -> tuple[WrittenRun, Trial]:
    """Try the run and write its folder. Returns what was written, and the result of the trial.

    OperatorFault: something is missing or wrong; then nothing is written.
    """
    require_new(job.folder)
    model = _tiny_model() if job.base_model is None else job.base_model
    try:
        require_model(model)
    except OperatorFault as fault:
        raise OperatorFault(f"--base-model: {fault}") from fault
    if not any(model.glob("*.safetensors")):
        raise OperatorFault(
            f"--base-model: {model} has no *.safetensors; expected the directory of a model as Hugging "
            "Face publishes it"
        )
    text = _text(job, _path(model, job.folder))
    config = _config(job, text)
    tried = _before_its_folder(config)
    trial = asyncio.run(hold_trial(tried, TrialOptions(prompts=1, generate=False), tell))
    if trial.problems:
        raise OperatorFault(trial.problems[0])
    trial = _with_held_out_file(trial, job, tried)
    copies = {} if job.base_model is not None else {TINY_MODEL: model}
    url = url_of(config.coordinator.host, config.coordinator.port)
    with whole_or_nothing(job.folder):
        path = write_folder(job.folder, _text(job, TINY_MODEL) if copies else text, copies=copies)
        boxes = issue_tokens(job.folder, url, job.boxes)
        agents = issue_agent_token(job.folder, url) if job.task == "agents" else None
    return WrittenRun(path, url, trial.tasks[0].name, boxes, agents), trial


def _tiny_model() -> Path:
    try:
        return make_tiny_model(_CACHE)
    except ImportError as error:
        raise OperatorFault(
            f"the tiny model is made with torch and transformers, but {error.name} is not installed: "
            "install them here, or give --base-model DIR"
        ) from error


def _config(job: NewRun, text: str) -> CoordinatorConfig:
    """The config, with the checks of coordinator and learner."""
    document, folder = parsed(text), job.folder.absolute()
    config = CoordinatorConfig.read(document, folder)
    url_of(config.coordinator.host, config.coordinator.port)  # raises if boxes could not dial it
    check_learner_table(document, folder)
    return config


def _text(job: NewRun, model: Path | str) -> str:
    kind = {"tiny": SortDigits.name, "agents": Agents.name, "questions": RowsTask.name}.get(
        job.task, job.kind
    )
    values: dict[str, Any] = {
        "base_model": str(model),
        "host": job.host,
        "port": job.port,
        "max_new_tokens": job.max_new_tokens,
        "kind": kind,
    }
    text = filled("run", values)
    if job.questions is not None:
        tables = filled("questions", _of_questions(job.questions, job.folder))
        text = text.replace("[learner]", f"{tables}\n[learner]")
    settings = [*_presets(job), *_modules(job), *job.settings]
    return changed(text, settings)


def _of_questions(asked: QuestionRows, folder: Path) -> dict[str, Any]:
    files = RowFiles(found_files(asked.rows))
    first = files.row(0)
    own = None if asked.asked is None else [_path(p, folder) for p in found_files(asked.asked)]
    wanted = round(50 / len(files), 2)
    return {
        "rows": [_path(path, folder) for path in found_files(asked.rows)],
        "prompt": asked.prompt,
        "answer": asked.answer,
        "answer_after": BEFORE_ANSWER if BEFORE_ANSWER in str(first.get(asked.answer)) else "",
        "scorer": asked.scorer,
        "held_out": max(_HELD_OUT, min(_HELD_OUT_MAX, wanted)) if own is None else 0.0,
        "asked": {} if own is None else {"files": own, "split": "train"},
    }


def _presets(job: NewRun) -> list[str]:
    tiny = list(_TINY) if job.base_model is None else []
    if job.task != "agents":
        return tiny
    # The tiny model has no chat template whose first token would begin each call, so the task gives that token.
    begin = f"task.options={{ opening = [{OPENING}], stop_token_ids = [{EOS}] }}"
    return [*tiny, *([begin] if tiny else []), "gateway.enabled=true"]


def _modules(job: NewRun) -> list[str]:
    """The setting with which a run finds a module of the current folder, even if it is started elsewhere."""
    scorer = "" if job.questions is None else job.questions.scorer
    hooks = [
        each.partition("=")[2]
        for each in job.settings
        if each.startswith(("learner.loss=", "learner.advantages="))
    ]
    entries = [job.kind, scorer, *hooks]
    names = [each.partition(":")[0].partition(".")[0] for each in entries if ":" in each]
    here = Path.cwd()
    if not any((here / f"{name}.py").exists() or (here / name).is_dir() for name in names):
        return []
    return [f"run.modules={toml([_path(here, job.folder)])}"]


def _path(path: Path, folder: Path) -> str:
    """A path for the config: relative to the config's folder if both are in the current folder."""
    here, path, folder = Path.cwd(), path.absolute(), folder.absolute()
    near = path.is_relative_to(here) and folder.is_relative_to(here)
    return os.path.relpath(path, folder) if near else str(path)


def _before_its_folder(config: CoordinatorConfig) -> CoordinatorConfig:
    """The config for the trial. Its folder does not exist yet, so it has the current folder, and absolute paths."""

    def found(options: Mapping[str, Any]) -> dict[str, Any]:
        files = options.get("files")
        if files is None:
            return dict(options)
        listed = [files] if isinstance(files, str) else files
        return {**options, "files": [str(_flat(config.folder / each)) for each in listed]}

    tasks = [replace(each, options=found(each.options)) for each in config.tasks]
    evals = [replace(each, options=found(each.options)) for each in config.evals]
    modules, model = tuple(map(_flat, config.run.modules)), config.run.base_model
    run = replace(config.run, modules=modules, base_model=None if model is None else _flat(model))
    return replace(config, folder=Path.cwd(), run=run, tasks=tuple(tasks), evals=tuple(evals))


def _flat(path: Path) -> Path:
    """The path without "..", because ".." cannot lead through a folder that does not exist yet."""
    return Path(os.path.normpath(path))


def _with_held_out_file(trial: Trial, job: NewRun, config: CoordinatorConfig) -> Trial:
    """The trial with the number of questions that are not held out. OperatorFault: no question is left."""
    if job.questions is None or job.questions.asked is None:
        return trial
    options = {**config.tasks[0].options, "scorer": "exact", "scorer_options": {}}
    kept = set(RowsTask(**{**options, "split": "heldout", **config.evals[0].options}).names())
    trained = sum(name not in kept for name in RowsTask(**options).names())
    if not trained:
        raise OperatorFault(
            "--held-out-rows: it has every question of --rows, so none is left to train on"
        )
    return replace(trial, tasks=[replace(trial.tasks[0], questions=trained), *trial.tasks[1:]])
