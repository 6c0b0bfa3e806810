"""The recipe "math": questions with one right answer, in a file of yours.

    rows --columns--> the task --chat template--> a first prompt in tokens
                         |
                         +--> the expected answer, judged by the scorer --> the config

Everything that a run would stumble over later is tried here once, with the classes that the run uses.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.errors import OperatorFault
from echo2d.recipes.learner_table import check_learner_table
from echo2d.recipes.recipe_file import changed, filled, parsed
from echo2d.recipes.run_folder import RUN_DIR, SNAPSHOTS, require_new, url_of, write_folder
from echo2d.tasks.base import Answer, Reward, TextPrompt
from echo2d.tasks.rows.files import DataRow, RowFiles, found_files
from echo2d.tasks.rows.task import RowsTask
from echo2d.tasks.served_task import ModelFiles, TaskTexts
from echo2d.texts.model_texts import UnusableText
from echo2d.texts.reference import difference

# Names of columns in the data sets that people use, the likeliest first.
QUESTIONS = ("question", "problem", "prompt", "input", "query", "instruction")
ANSWERS = ("answer", "final_answer", "target", "output", "label", "solution")
# GSM8K writes the steps first, then this and the number.
BEFORE_ANSWER = "####"
_HELD_OUT = 0.05
JUDGE_S = 60.0  # for a judge elsewhere
MEASURED = 200  # prompts that are tokenized to know how long they are


@dataclass(frozen=True, slots=True)
class MathJob:
    """What the operator decides. rows: a file, a pattern of files, or a directory of `datasets`.

    asked: another file with the held-out questions; None: a share of `rows` is held out. prompt,
    answer: columns. max_new_tokens: of one answer. folder: gets the config and the run. host: the
    address at which workers reach the coordinator. port: its port. settings: "table.key=value".
    """

    base_model: Path
    rows: str
    prompt: str
    answer: str
    max_new_tokens: int
    folder: Path
    host: str
    port: int = 7700
    asked: str | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """What the run will see. trained, held_out: questions. longest: tokens of the longest prompt.

    text: the first prompt as the model reads it. expected: the answer to it. url: of the coordinator.
    differs: as of `reference.difference`.
    """

    url: str
    trained: int
    held_out: int
    longest: int
    text: str
    expected: str
    differs: str | None


def first_row(rows: str) -> DataRow:
    """The first row of the data. OperatorFault: it cannot be read."""
    return RowFiles(found_files(rows)).row(0)


def guess(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of these names that is a column, whatever its case; None: there is none."""
    found = {column.lower(): column for column in columns}
    return next((found[name] for name in names if name in found), None)


def write_config(job: MathJob) -> tuple[Path, Preview]:
    """Check the job and write its config; return the path and what the run will see.

    OperatorFault: something is missing or wrong, or there is a config already. Nothing is written then.
    """
    require_new(job.folder)
    if job.answer == job.prompt:
        raise OperatorFault(
            f"--answer: expected another column than --prompt; found {job.answer!r}"
        )
    text = changed(filled("math", _values(job)), job.settings)
    config = CoordinatorConfig.read(parsed(text))
    url = url_of(config.coordinator.host, config.coordinator.port)
    text = changed(text, [f"learner.url={url}"])
    check_learner_table(parsed(text))
    preview = _preview(config, job, url)
    return write_folder(job.folder, text), preview


def _values(job: MathJob) -> dict[str, Any]:
    folder = job.folder.absolute()
    first = first_row(job.rows)
    files = [str(path.absolute()) for path in found_files(job.rows)]
    asked = None if job.asked is None else [str(p.absolute()) for p in found_files(job.asked)]
    return {
        "name": folder.name,
        "run_dir": str(folder / RUN_DIR),
        "snapshot_root": str(folder / SNAPSHOTS),
        "base_model": str(job.base_model.absolute()),
        "host": job.host,
        "port": job.port,
        "max_new_tokens": job.max_new_tokens,
        "rows": files,
        "prompt": job.prompt,
        "answer": job.answer,
        "answer_after": BEFORE_ANSWER if BEFORE_ANSWER in str(first.get(job.answer)) else "",
        "held_out": _HELD_OUT if asked is None else 0.0,
        "asked": {} if asked is None else {"files": asked, "split": "train"},
        "url": "",
        "token_file": str(folder / RUN_DIR / "tokens" / "learner.token"),
        "out_dir": str(folder / "learner"),
    }


def _preview(config: CoordinatorConfig, job: MathJob, url: str) -> Preview:
    """OperatorFault: the run would fail."""
    table, asked = config.tasks[0], config.evals[0]
    task = RowsTask(**table.options)
    held_out = RowsTask(**{**table.options, "split": "heldout", **asked.options})
    held_out_rows = set(held_out.names())
    trained = len(task)
    if job.asked is not None:
        trained = sum(name not in held_out_rows for name in task.names())
    if not trained:
        raise OperatorFault(
            "--held-out-rows: it has every question of --rows; none is left to train on"
        )
    prompts = [task.prompt(index) for index in range(min(MEASURED, len(task)))]
    texts = _texts(job.base_model, config)
    try:
        lengths = [len(texts.tokens(prompt)) for prompt in prompts]
        shown = texts.text(prompts[0])
    except UnusableText as fault:
        raise OperatorFault(_unusable(job.base_model, fault)) from fault
    _require_scorable(task, prompts[0], job)
    expected = task.expected(prompts[0]).text
    return Preview(
        url, trained, len(held_out_rows), max(lengths), shown, expected, difference(job.base_model)
    )


def _texts(base_model: Path, config: CoordinatorConfig) -> TaskTexts:
    for name in ("config.json", "*.safetensors"):
        if not any(base_model.glob(name)):
            raise OperatorFault(
                f"--base-model: {base_model} has no {name}; expected the directory of a model as "
                "Hugging Face publishes it"
            )
    table = config.tasks[0]
    facts = {"directory": str(base_model), "template": None, "system": table.system}
    return TaskTexts(ModelFiles.read({**facts, "options": table.template}))


def _unusable(base_model: Path, fault: UnusableText) -> str:
    if fault.code == "no_chat_template":
        return (
            f"--base-model: {base_model} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json); take a model that was trained to follow instructions"
        )
    return f"--base-model: {base_model}: {fault.detail}"


def _require_scorable(task: RowsTask, prompt: TextPrompt, job: MathJob) -> None:
    """OperatorFault: the scorer does not even take the expected answer for right."""
    expected = task.expected(prompt)
    if not expected.text:
        raise OperatorFault(f"--answer: the column {job.answer!r} is empty in the first row")
    if _score(task, prompt, expected.text) == 0:
        raise OperatorFault(
            f"--answer: the scorer finds no answer in {expected.text[:60]!r}, from the column "
            f"{job.answer!r}; name another column, or another scorer (--scorer exact)"
        )


def _score(task: RowsTask, prompt: TextPrompt, text: str) -> float:
    """What the scorer gives for this answer. OperatorFault: it fails."""

    async def judged(found: Awaitable[Any]) -> Any:
        async with asyncio.timeout(JUDGE_S):
            return await found

    try:
        found = task.reward(prompt, Answer(text, "stop", 1))
        reward = asyncio.run(judged(found)) if isinstance(found, Awaitable) else found
        return float(reward.value if isinstance(reward, Reward) else reward)
    # It may be the operator's own function.
    except Exception as error:
        raise OperatorFault(
            f"task.options.scorer: it fails at the expected answer: {type(error).__name__}: {error}"
        ) from error
