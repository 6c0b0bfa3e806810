"""`echo2d init`: write the config of a common job, after a few questions."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.parts import DIRECTORY, json_option
from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.recipes.math import MathJob, Preview

SHOWN_CHARS = 600  # of the first prompt


@click.group("init")
def init() -> None:
    """Write the config of a common job and try what it names, before anything runs."""


@init.command("math")
@click.option(
    "--base-model",
    type=DIRECTORY,
    required=True,
    help="Directory of the model to train, as Hugging Face publishes it.",
)
@click.option(
    "--rows",
    required=True,
    help="Questions with answers: JSON lines, CSV, Parquet, or a directory.",
)
@click.option(
    "--held-out-rows", help="Held-out questions; else 5 % of --rows are never trained on."
)
@click.option(
    "--prompt", help='Column with the question, or a text such as "{question} Think first."'
)
@click.option("--answer", help="Column with the expected answer.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1, 131072), help="Tokens of an answer at most."
)
@click.option("--host", help="This host's address, at which the boxes reach it.")
@click.option(
    "--port",
    type=click.IntRange(1, 65534),
    default=7700,
    show_default=True,
    help="The coordinator's TCP port; the next one is for weights.",
)
@click.option("--out", type=DIRECTORY, help="New folder for the config and the run.")
@click.option("--set", "settings", multiple=True, help="Another key: TABLE.KEY=VALUE; repeatable.")
@click.option("--yes", is_flag=True, help="Ask nothing; take the guesses that are offered.")
@json_option("Ask nothing; print one JSON object.")
def math(*, settings: tuple[str, ...], yes: bool, as_json: bool, **given: Any) -> None:
    """Questions with one right answer, which math-verify judges, as in GSM8K or MATH.

    Asks at most five questions, and none that an option answers. Reads the first rows, makes tokens
    of the first prompts, and lets the scorer judge an expected answer.
    """
    from echo2d.recipes.math import write_config

    job = _job(given, settings, asks=sys.stdin.isatty() and not (yes or as_json))
    path, preview = write_config(job)
    if as_json:
        click.echo(json.dumps({"config": str(path), **asdict(preview)}))
    else:
        _explain(job, path, preview)


def _job(given: dict[str, Any], settings: tuple[str, ...], *, asks: bool) -> "MathJob":
    """OperatorFault: a column is neither given nor to be guessed."""
    from echo2d.recipes.math import ANSWERS, QUESTIONS, MathJob, first_row, guess

    columns = list(first_row(given["rows"]))

    def decide(name: str, question: str, offered: Any) -> Any:
        if given[name] is not None:
            return given[name]
        if asks:
            return click.prompt(question, default=offered, type=type(offered) if offered else str)
        if offered is None:
            raise OperatorFault(
                f"--{name}: expected a column of {given['rows']}: {', '.join(columns)}"
            )
        return offered

    if asks:
        click.echo(f"{given['rows']} has the columns {', '.join(columns)}.")
    return MathJob(
        base_model=given["base_model"],
        rows=given["rows"],
        asked=given["held_out_rows"],
        prompt=decide("prompt", "Which column is the question?", guess(columns, QUESTIONS)),
        answer=decide("answer", "Which column is the answer?", guess(columns, ANSWERS)),
        max_new_tokens=decide("max_new_tokens", "Tokens of an answer at most?", 1024),
        host=decide("host", "At which address do the boxes reach this host?", "127.0.0.1"),
        folder=Path(decide("out", "In which new folder shall the run live?", "math")),
        port=given["port"],
        settings=settings,
    )


def _explain(job: "MathJob", path: Path, preview: "Preview") -> None:
    shown = preview.text[:SHOWN_CHARS] + ("..." if len(preview.text) > SHOWN_CHARS else "")
    click.echo(
        f"{preview.trained:,} questions to train on, {preview.held_out:,} held out; "
        f"the longest of the first prompts has {preview.longest} tokens.\n\n"
        f"The first prompt, as the model reads it:\n\n{_indented(shown)}\n\n"
        f"The answer to it: {preview.expected}\n\n"
        f"Wrote {path}. Start the run, in three terminals on this host:\n\n"
        f"  echo2d coordinate --config {path}\n"
        f"  python -m learner --config {path}\n"
        f"  echo2d status --run-dir {job.folder}/coordinator --watch\n\n"
        "and for each box make a token and copy it there:\n\n"
        f"  echo2d token create box-1 --role worker --run-dir {job.folder}/coordinator --url {preview.url}\n"
        f"  echo2d join {preview.url} --token-file box-1.token --state-dir state    # on the box\n"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
