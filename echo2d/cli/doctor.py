"""`echo2d doctor`: finds out what would keep this host from working."""

import json
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.parts import DIRECTORY, FILE, end, json_option
from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.runtime.doctor.finding import HostFinding


@click.command()
@click.argument("url", required=False)
@click.option("--config", type=FILE, help="TOML file of the run, or a box's with a [worker] table.")
@click.option("--token-file", type=FILE, help="A box: its token file.")
@click.option(
    "--state-dir",
    type=DIRECTORY,
    help="A box: its state directory. With it the ports are tried, by joining for a moment.",
)
@click.option("--listen-host", help="A box: as for `echo2d join`.")
@click.option("--listen-port", type=int, help="A box: as for `echo2d join`.")
@click.option("--engine", help="A box: as for `echo2d join`.")
@click.option("--engine-python", type=FILE, help="A box: as for `echo2d join`.")
@click.option("--model-bytes", metavar="SIZE", help="A box: bytes of a version, such as 16GB.")
@json_option("Print one JSON object.")
def doctor(
    url: str | None,
    config: Path | None,
    state_dir: Path | None,
    model_bytes: str | None,
    *,
    as_json: bool,
    **flags: Any,
) -> None:
    """Check this host: ports, credentials, clock, disk, GPU, limits; say what to do.

    On the learner's host: `echo2d doctor --config run.toml`. On a box: `echo2d doctor URL
    --token-file FILE --state-dir DIR`, or --config with its [worker] table. Nothing is changed. Exit
    code 1: something must be done.
    """
    import asyncio

    from echo2d.config.coordinator import leads_a_run
    from echo2d.runtime.doctor.finding import exit_code

    given = {key: value for key, value in {"url": url, **flags}.items() if value is not None}
    examination = (
        _of_the_learner_host(config)
        if config is not None and not given and state_dir is None and leads_a_run(config)
        else _of_the_box(config, given, state_dir, model_bytes)
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
    config: Path | None, given: dict[str, Any], state_dir: Path | None, model_bytes: str | None
) -> Coroutine[Any, Any, list["HostFinding"]]:
    from echo2d.config.worker import WorkerConfig
    from echo2d.quantities import parse_bytes
    from echo2d.runtime.doctor.box import Box, examine_box

    if config is None and not {"url", "token_file"} <= given.keys():
        raise OperatorFault(
            "doctor needs --config FILE; on a box also URL --token-file FILE [--state-dir DIR]"
        )
    # `echo2d join` must have a state directory; without --config it may be left out here.
    unused = {} if config is not None else {"state_dir": Path("unused")}
    named = {} if state_dir is None else {"state_dir": state_dir}
    loaded = WorkerConfig.load(config, {**unused, **given, **named})
    folder = loaded.state_dir if config is not None else state_dir
    size = None if model_bytes is None else parse_bytes(model_bytes)
    return examine_box(Box(loaded, folder, size))
