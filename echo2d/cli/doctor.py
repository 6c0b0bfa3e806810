"""`echo2d doctor`: checks whether this host can take part in a run."""

import json
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.daemons import worker_options
from echo2d.cli.parts import FILE, end, json_option
from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.runtime.doctor.finding import HostFinding


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[URL] [OPTIONS OF JOIN]")
@click.option("--config", type=FILE, help="TOML file of a run, or of a box (table [worker]).")
@click.option("--model-bytes", metavar="SIZE", help="On a box: bytes of a version, such as 16GB.")
@json_option("Print one JSON object.")
def doctor(
    words: tuple[str, ...], config: Path | None, model_bytes: str | None, *, as_json: bool
) -> None:
    """Check this host: ports, credentials, clock, disk, GPU, limits; say what to do.

    On the learner's host: `echo2d doctor --config run.toml`. On a box: the same URL and options as
    for `echo2d join`, or --config with its [worker] table; with --state-dir it also tries the ports,
    by joining for a moment. It changes nothing. Exit code 1: something must be done.
    """
    import asyncio

    from echo2d.config.run import leads_a_run
    from echo2d.runtime.doctor.finding import exit_code

    given, settings = worker_options(words)
    examination = (
        _of_the_learner_host(config)
        if config is not None and not words and leads_a_run(config)
        else _of_the_box(config, given, settings, model_bytes)
    )
    findings = asyncio.run(examination)
    code = exit_code(findings)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(each) for each in findings], "code": code}))
    else:
        for each in findings:
            click.echo(f"{each.level:<8} {each.check:<16} {each.text}")
            if each.todo:
                click.echo(f"{'':<25} -> {each.todo}")
    end(code)


def _of_the_learner_host(config: Path) -> Coroutine[Any, Any, list["HostFinding"]]:
    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.runtime.doctor.learner_host import examine_learner_host

    return examine_learner_host(CoordinatorConfig.load(config))


def _of_the_box(
    config: Path | None,
    given: dict[str, Any],
    settings: Sequence[str],
    model_bytes: str | None,
) -> Coroutine[Any, Any, list["HostFinding"]]:
    from echo2d.config.worker import WorkerConfig
    from echo2d.quantities import parse_bytes
    from echo2d.runtime.doctor.box import Box, examine_box

    if config is None and not {"url", "token_file"} <= given.keys():
        raise OperatorFault(
            "doctor needs --config FILE; on a box also URL --token-file FILE [--state-dir DIR]"
        )
    # `echo2d join` needs a state directory. `echo2d doctor` does not, if there is no --config.
    unused = {} if config is not None else {"state_dir": Path("unused")}
    loaded = WorkerConfig.load(config, {**unused, **given}, settings)
    folder = loaded.state_dir if config is not None else given.get("state_dir")
    size = None if model_bytes is None else parse_bytes(model_bytes)
    return examine_box(Box(loaded, folder, size))
