"""`echo2d init` sets up a run after a few questions. `echo2d try` tries the tasks of a run before a box costs money."""

import inspect
import json
import shutil
import socket
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d import hub
from echo2d.cli.parts import DIRECTORY, FILE, end, json_option, set_option
from echo2d.errors import OperatorFault
from echo2d.registry import SCORERS, TASKS, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from echo2d.recipes.run_folder import WrittenRun
    from echo2d.runtime.trial import TellProgress, Trial

SHOWN_TOKENS = 4  # At most this many token files are named.
TASK_CHOICES = {
    "tiny": "digits to sort, with a tiny model that is made here, to try everything",
    "questions": "questions with answers, in a file of yours",
    "class": "prompts and rewards of a Python class",
    "environment": "an environment of several turns",
    "agents": "programs outside that use the policy as an OpenAI API",
}
_TINY = "tiny"
MODEL_QUESTION = "Model to train: a directory, a name on the Hugging Face hub, or tiny?"
KIND_QUESTION = "Which one: package.module:Class, or a name of `echo2d init --list-tasks`?"


@click.command("init")
@click.option(
    "--task",
    type=click.Choice(list(TASK_CHOICES)),
    help=f"What is trained on: {'; '.join(f'{n}: {about}' for n, about in TASK_CHOICES.items())}. "
    "Default with --rows: questions.",
)
@click.option(
    "--kind",
    help="With class or environment: your own as package.module:Class, or a name from --list-tasks.",
)
@click.option(
    "--base-model",
    metavar="DIRECTORY",
    help="Model to train: its directory, or its name on the Hugging Face hub; tiny: a tiny one that is "
    "made here, for tasks in digits.",
)
@click.option(
    "--rows",
    help="Questions with answers: a file of JSON lines, CSV or Parquet, a pattern of files, a directory "
    "of the package datasets, or OWNER/NAME:SPLIT of the Hugging Face hub.",
)
@click.option(
    "--held-out-rows",
    help="Questions that are only for evaluation. Default: 5 % of --rows are held out.",
)
@click.option(
    "--prompt",
    help='For questions: the column that has the question, or a text such as "{question} Think first."',
)
@click.option("--answer", help="For questions: the column that has the expected answer.")
@click.option("--scorer", help="For questions: how an answer is judged, such as math or exact.")
@click.option("--max-new-tokens", type=click.IntRange(1, 131072), help="Token limit per answer.")
@click.option("--host", help="The address at which the boxes reach this host.")
@click.option(
    "--port",
    type=click.IntRange(1, 65534),
    default=7700,
    show_default=True,
    help="The coordinator's TCP port; the next one is for weights.",
)
@click.option("--boxes", type=int, help="Number of boxes that may join.")
@click.option(
    "--one-token", is_flag=True, help="Make one token file for all boxes instead of one per box."
)
@click.option("--out", type=DIRECTORY, help="New folder for the config and the run.")
@set_option("Set a key of the config: TABLE.KEY=VALUE")
@click.option("--yes", is_flag=True, help="Ask no questions; use the suggested answers.")
@click.option(
    "--list-tasks",
    is_flag=True,
    help="List the task kinds and scorers that a config can name, with their options, and exit.",
)
@json_option("Ask no questions; print one JSON object.")
def init(*, yes: bool, list_tasks: bool, as_json: bool, **given: Any) -> None:
    """Set up a run: ask a few questions, write its config and tokens, and show the next commands.

    Each question has an option that answers it. Before anything is written, the task is tried as by
    `echo2d try`, but without answers of the model.
    """
    if list_tasks:
        _list_tasks(as_json=as_json)
        return
    with _telling() as tell:
        asks = sys.stdin.isatty() and not (yes or as_json)
        written, trial = _set_up(given, tell, asks=asks)
    here, there = next_commands(written)
    if as_json:
        facts = {"config": str(written.config), "url": written.url, "task": written.task}
        tokens = {
            "boxes": [str(path) for path in written.boxes],
            "agents": None if written.agents is None else str(written.agents),
        }
        told = {"here": here, "there": there, "trial": asdict(trial)}
        click.echo(json.dumps({**facts, "tokens": tokens, **told}))
        return
    _show(trial)
    _tell(written, here, there)


@click.command("try")
@click.option("--config", type=FILE, required=True, help="TOML file of the run.")
@set_option("Override a key of the config: TABLE.KEY=VALUE, such as sampling.max_new_tokens=200")
@click.option(
    "--prompts",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Show and answer this many prompts of each task.",
)
@click.option(
    "--samples",
    type=click.IntRange(0, 1024),
    default=0,
    help="Let the base model write this many answers to each prompt. Default: the run's group_size.",
)
@click.option(
    "--answer", "answers", multiple=True, help="Score this text instead of the model's answers."
)
@click.option("--no-answers", is_flag=True, help="Let the base model write no answers.")
@json_option("Print one JSON object.")
def try_run(
    config: Path,
    *,
    settings: tuple[str, ...],
    prompts: int,
    samples: int,
    answers: tuple[str, ...],
    no_answers: bool,
    as_json: bool,
) -> None:
    """Try a run's tasks: show prompts, a few answers of the base model, and their rewards.

    Everything runs in the task's own processes, with the isolation and the limits of the run. The
    expected answers of the first 200 rows are scored, too. Nothing is written, and no coordinator is
    needed. Exit code 1: the run could not start, or would fail.
    """
    import asyncio

    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.recipes.learner_table import check_learner_of
    from echo2d.runtime.trial import TrialOptions, hold_trial

    loaded = CoordinatorConfig.load(config, settings)
    check_learner_of(loaded, config, settings)
    options = TrialOptions(prompts, samples, answers, generate=not no_answers)
    with _telling() as tell:
        trial = asyncio.run(hold_trial(loaded, options, tell))
    if as_json:
        click.echo(json.dumps(asdict(trial)))
    else:
        _show(trial)
    end(1 if trial.problems else 0)


@contextmanager
def _telling() -> "Iterator[TellProgress]":
    """Shows on the last line of a terminal what is being tried, and how much of that is done."""
    from echo2d.views.progress import progress_line

    with progress_line() as line:
        yield (lambda *_: None) if line is None else line.show


def _show(trial: "Trial") -> None:
    from echo2d.views.trial import trial_lines

    click.echo("\n".join(trial_lines(asdict(trial))))


def _tell(written: "WrittenRun", here: list[str], there: list[str]) -> None:
    """Print what was written, and what to type next."""
    several = len(written.boxes) > 1
    shown = ", ".join(map(str, written.boxes[:SHOWN_TOKENS]))
    shown += f", ... ({len(written.boxes)} in all)" if len(written.boxes) > SHOWN_TOKENS else ""
    click.echo(f"Wrote {written.config} for the task {written.task}, and {shown}.\n")
    click.echo(f"Type on this host:\n\n{_indented(here)}\n")
    # If only this host can reach the coordinator, the worker runs on this host and no box needs a token.
    if several or not written.local:
        click.echo(
            f"Copy {'its own token file' if several else str(written.boxes[0])} to each box, and type there, "
            f"with echo2d installed:\n\n{_indented(there)}\n\n"
            f"The boxes must reach two TCP ports of this host: that of {written.url} and the next one."
        )
    if written.agents is not None:
        click.echo(f"Agents play with {written.agents} (docs/guide/environments.md).")


def _set_up(
    given: dict[str, Any], tell: "TellProgress", *, asks: bool
) -> "tuple[WrittenRun, Trial]":
    """Ask for the decisions that no option gives, try the run, and write it. OperatorFault: it cannot be written."""
    from echo2d.recipes.new_run import (
        ANSWERS,
        QUESTIONS,
        NewRun,
        QuestionRows,
        first_row,
        guess,
        offered_tokens,
        set_up,
    )
    from echo2d.recipes.run_folder import Boxes

    def decide(name: str, question: str, offered: Any) -> Any:
        return _decide(given, name, question, offered, asks=asks)

    if given["task"] is None and given["rows"] is not None:
        given["task"] = "questions"
    if asks and given["task"] is None:
        for name, about in TASK_CHOICES.items():
            click.echo(f"  {name:12} {about}")
    task = decide("task", "What do you want to train on?", "tiny")
    if task not in TASK_CHOICES:
        raise OperatorFault(f"--task: expected {', '.join(TASK_CHOICES)}; found {task!r}")
    kind = decide("kind", KIND_QUESTION, None) if task in ("class", "environment") else ""
    named = _TINY if task == "tiny" else str(decide("base_model", MODEL_QUESTION, None))
    model = None if named == _TINY else _loaded_model(named)
    questions = None
    if task == "questions":
        if model is None:
            raise OperatorFault("--base-model: the tiny model reads no text; expected a directory")
        rows = _loaded_rows(decide("rows", "File with the questions?", None))
        columns = list(first_row(rows))
        header = " (the first row of CSV names the columns)" if rows[0].endswith(".csv") else ""
        which = f"{', '.join(columns)}{header}: which column is the"
        prompt = decide("prompt", f"{which} question?", guess(columns, QUESTIONS))
        answer = decide("answer", f"{which} expected answer?", guess(columns, ANSWERS))
        scorer = given["scorer"] or "math"
        held_out = None if given["held_out_rows"] is None else _loaded_rows(given["held_out_rows"])
        questions = QuestionRows(rows, prompt, answer, scorer, held_out)
    asked = "Tokens of an answer at most?"
    tokens = 12 if model is None else decide("max_new_tokens", asked, offered_tokens(model))
    host = decide("host", "At which address do the boxes reach this host?", _own_address())
    boxes = Boxes(decide("boxes", "How many boxes will join?", 1), one_token=given["one_token"])
    folder = Path(decide("out", "In which new folder shall the run live?", "run"))
    job = NewRun(
        task,
        folder,
        host,
        kind,
        questions,
        model,
        given["port"],
        tokens,
        boxes,
        tuple(given["settings"]),
    )
    return set_up(job, tell)


def _loaded_model(named: str) -> Path:
    """The directory of the model; a model of the hub is downloaded first."""
    return hub.load_model(named) if hub.names_a_repository(named) else Path(named)


def _loaded_rows(named: str) -> list[str]:
    """The files of the rows; files of the hub are downloaded first."""
    return list(map(str, hub.load_rows(named))) if hub.names_a_repository(named) else [named]


def _decide(given: dict[str, Any], name: str, question: str, offered: Any, *, asks: bool) -> Any:
    """The value of the option, or the person's answer, or the suggestion. OperatorFault: there is none."""
    if given[name] is not None:
        return given[name]
    if asks:
        return click.prompt(question, default=offered, type=type(offered) if offered else str)
    if offered is None:
        raise OperatorFault(f"--{name.replace('_', '-')}: expected an answer to: {question}")
    return offered


def _own_address() -> str:
    """The address from which this host would reach others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chosen:
        try:
            chosen.connect(("198.51.100.1", 9))  # reserved for documentation: no host has it
        except OSError:
            return "127.0.0.1"
        return str(chosen.getsockname()[0])


def next_commands(written: "WrittenRun") -> tuple[list[str], list[str]]:
    """The commands to type on this host, and those for a box. `echo2d` is written as the operator typed it."""
    script, echo2d = Path(sys.argv[0]), "echo2d"
    if script.name == echo2d and str(shutil.which(echo2d)) != str(script.absolute()):
        # The operator typed a path, so that `echo2d` on PATH may be missing or another one.
        echo2d = sys.argv[0]
    here = [
        f"{echo2d} try --config {written.config}",
        f"{echo2d} run --config {written.config}" + ("" if written.local else " --workers 0"),
        f"{echo2d} status --run-dir {written.run_dir} --watch",
    ]
    return here, [f"{echo2d} join --token-file {written.boxes[0].name} --state-dir state"]


def _list_tasks(*, as_json: bool) -> None:
    kinds = {name: _about(load(entry)) for name, entry in TASKS.items()}
    scorers = {name: _about(load(entry)) for name, entry in SCORERS.items()}
    if as_json:
        click.echo(json.dumps({"tasks": kinds, "scorers": scorers}))
        return
    for title, found in (("task.kind", kinds), ("scorer", scorers)):
        for name, facts in found.items():
            click.echo(f'\n{title} = "{name}"\n')
            click.echo("\n".join(f"    {line}".rstrip() for line in facts["about"].splitlines()))
            for option, default in facts["options"].items():
                click.echo(f"      {option}" + ("" if default is None else f" = {default}"))


def _about(made_by: Any) -> dict[str, Any]:
    """The docstring of a task or scorer, and its options with their defaults. The default of a required option is
    null.
    """
    options = {
        name: None if each.default is inspect.Parameter.empty else json.dumps(each.default)
        for name, each in inspect.signature(made_by).parameters.items()
    }
    return {"about": inspect.getdoc(made_by) or "", "options": options}


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
