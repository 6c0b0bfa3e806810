"""`echo2d keep`: back a run up, restore it, and export the trained model."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from echo2d.cli.parts import (
    DIRECTORY,
    RUN_FOLDER,
    FullSentences,
    json_option,
    progress_bar,
    run_dir_option,
)
from echo2d.errors import Fault, OperatorFault

if TYPE_CHECKING:
    from echo2d.runtime.run_dir.results import Result


@click.group(cls=FullSentences)
def keep() -> None:
    """Keep a run: back it up, restore it, export the trained model.

    These commands work on the run directory, whether or not the coordinator is running.
    """


@keep.command()
@click.option("--run-dir", type=RUN_FOLDER, help="The run's directory: run.run_dir of its config.")
@click.option("--to", "target", type=DIRECTORY, help="New directory to write the backup to.")
@click.option(
    "--learner-dir",
    type=DIRECTORY,
    help="learner.out_dir of the config, if it is on this host: also back up its checkpoints.",
)
@click.option(
    "--reuse",
    type=DIRECTORY,
    help="An earlier backup of this run: link files that have not changed to it instead of copying them.",
)
@click.option("--verify", type=DIRECTORY, help="Back nothing up: check every byte of this backup.")
@json_option("Print one JSON object.")
def backup(
    run_dir: Path | None,
    target: Path | None,
    learner_dir: Path | None,
    reuse: Path | None,
    verify: Path | None,
    *,
    as_json: bool,
) -> None:
    """Back a run up while it goes on.

    The backup holds the run's key, credentials, ledger and kept versions, and with --learner-dir the
    checkpoints that a restored run resumes from. It holds secrets: only its owner can read it. A
    backup that fails leaves no directory. The config file is not part of it.
    """
    from echo2d.runtime.run_dir import backup_files
    from echo2d.runtime.run_dir.backup import back_up

    # A backup gives way to every other program.
    os.nice(10)
    with progress_bar("backing up") as tell:
        if verify is not None:
            if any(each is not None for each in (run_dir, target, learner_dir, reuse)):
                raise OperatorFault("backup: --verify allows no other option")
            facts, where = backup_files.verify(verify, tell), verify
        elif run_dir is None or target is None:
            raise OperatorFault("backup: expected --run-dir DIR and --to DIR, or --verify DIR")
        else:
            facts = back_up(run_dir, target, learner_dir=learner_dir, reuse=reuse, tell=tell)
            where = target
    if as_json:
        click.echo(json.dumps({**asdict(facts), "files": len(facts.files), "bytes": facts.size}))
        return
    resumes = (
        "no checkpoint of the learner"
        if facts.checkpoint is None
        else f"the learner's checkpoint of step {facts.checkpoint}"
    )
    click.echo(
        f"{where} is whole: run {facts.run_id} at step {facts.step}, {resumes}; "
        f"{len(facts.files)} files, {facts.size / 1e6:.1f} MB"
    )


@keep.command()
@click.argument("backup", type=DIRECTORY)
@click.option("--run-dir", type=DIRECTORY, required=True, help="New run directory.")
@click.option("--learner-dir", type=DIRECTORY, help="New learner.out_dir, for the checkpoints.")
@click.option(
    "--not-running",
    is_flag=True,
    help="The run that was backed up no longer runs: do not check for its coordinator at its address.",
)
@json_option("Print one JSON object.")
def restore(
    backup: Path, run_dir: Path, learner_dir: Path | None, *, not_running: bool, as_json: bool
) -> None:
    """Make a run directory from BACKUP, with which the run continues.

    The run that was backed up must be stopped. Nothing is overwritten.
    """
    from echo2d.runtime.run_dir import restore as restoring

    with progress_bar("restoring") as tell:
        ask = _nobody_at if not_running else _run_at
        facts = restoring.restore(backup, run_dir, learner_dir, tell, ask)
    if as_json:
        click.echo(json.dumps({**asdict(facts), "files": len(facts.files), "bytes": facts.size}))
        return
    for line in restoring.how_to_go_on(facts, run_dir, learner_dir):
        click.echo(line)


@keep.command()
@click.argument("directory", metavar="[DIR]", type=DIRECTORY, required=False)
@run_dir_option
@click.option("--version", type=click.IntRange(0), help="Export this version.")
@click.option(
    "--best", metavar="EVAL", help="Export the version with the best score in this [[eval]]."
)
@click.option("--last", is_flag=True, help="Export the last version.")
@json_option("Print JSON: the exported version, or without DIR one line per version.")
def export(
    directory: Path | None,
    run_dir: Path,
    *,
    version: int | None,
    best: str | None,
    last: bool,
    as_json: bool,
) -> None:
    """Copy a trained version to DIR, as a model that transformers and SGLang load.

    Without DIR, list the run's versions. It works with and without a running coordinator, and needs
    no torch. Every copied byte is verified. For a LoRA run DIR is an adapter in PEFT's format; `echo2d
    learn --export` can merge it into the base model.
    """
    from echo2d.runtime.run_dir import results

    found = results.find_results(run_dir)
    chosen = [version is not None, best is not None, last]
    if directory is None:
        if any(chosen):
            raise OperatorFault(
                "export: name the directory to write, as in `echo2d keep export DIR`"
            )
        _list(found, as_json=as_json)
        return
    if sum(chosen) != 1:
        raise OperatorFault("export: expected one of --version N, --best EVAL and --last")
    result = results.choose(found, version=version, best=best)
    with progress_bar(f"exporting version {result.version}", size=result.size) as tell:
        results.export(run_dir, result, directory, tell)
    if as_json:
        click.echo(json.dumps({**result.as_dict(), "directory": str(directory)}))
        return
    what = "adapter" if result.is_adapter else "model"
    click.echo(f"version {result.version} is in {directory}: {what}, {_size(result.size)}")
    click.echo(_how_to_load(result, directory))


def _list(found: "list[Result]", *, as_json: bool) -> None:
    if as_json:
        for each in found:
            click.echo(json.dumps(each.as_dict()))
        return
    from rich.table import Table

    from echo2d.views.status import plain_console, scored_words

    names = list(dict.fromkeys(name for each in found for name in each.scores))
    table = Table(box=None, pad_edge=False)
    for head in ("version", "size", *names, ""):
        table.add_column(head, justify="right" if head else "left")
    for each in found:
        scores = (each.scores.get(name) for name in names)
        words = [f"best {name}" for name in sorted(each.best)]
        table.add_row(
            str(each.version),
            _size(each.size),
            *("-" if score is None else scored_words(score.mean, score.se) for score in scores),
            ", ".join([*words, *(["last"] if each is found[-1] else [])]),
        )
    plain_console().print(table if found else "no version is published yet")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def _how_to_load(result: "Result", directory: Path) -> str:
    if result.is_adapter:
        return f"load it with peft: PeftModel.from_pretrained(BASE, {str(directory)!r})"
    return (
        f"load it with transformers: AutoModelForCausalLM.from_pretrained({str(directory)!r}); "
        f"or serve it: python -m sglang.launch_server --model-path {directory}"
    )


def _run_at(url: str, token_file: Path) -> str | None:
    """The id of the run whose coordinator answers at this URL; None: none answers.

    OperatorFault: something answers, but does not say which run it belongs to.
    """
    import asyncio

    from echo2d.client import TokenRefused
    from echo2d.views.watch import status_once

    try:
        return str(asyncio.run(status_once(lambda: (url, token_file)))["run_id"])
    except TokenRefused as refused:
        raise OperatorFault(
            f"a coordinator at {url} does not accept this backup's token: it may belong to this run, with a "
            "token that was made later; stop it first, or, if it belongs to another run, add --not-running"
        ) from refused
    except Fault as fault:
        if not _listens(url):
            return None
        raise OperatorFault(
            f"something answers at {url}, but does not say which run it belongs to ({fault}): it may be this "
            "run's coordinator; stop it first, or, if it is not, add --not-running"
        ) from fault


def _listens(url: str) -> bool:
    """Whether anything accepts a connection at this URL."""
    import socket

    at = urlsplit(url)
    try:
        port = at.port or (443 if at.scheme == "https" else 80)
        socket.create_connection((at.hostname or "", port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _nobody_at(url: str, token_file: Path) -> None:  # noqa: ARG001 - as `_run_at`
    """Takes the place of `_run_at` if the operator says that the run is stopped."""
    return
