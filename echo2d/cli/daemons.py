"""The three programs of a run, `echo2d coordinate`, `join` and `learn`, and its rented boxes."""

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from echo2d import hub
from echo2d.cli.parts import FILE, Sectioned, end, json_option, log_options, serve, set_option
from echo2d.config.worker import WorkerConfig
from echo2d.errors import Fault, OperatorFault

if TYPE_CHECKING:
    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.runtime.box.script import BoxStart


@click.command()
@click.option("--config", type=FILE, help="TOML file of the run; --print-config shows its keys.")
@set_option("Override a key of the config: TABLE.KEY=VALUE, such as coordinator.tls=off")
@click.option(
    "--rent",
    is_flag=True,
    help="Rent boxes from the config's [[provider]]s, within the budget of [rent]. Costs money.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print every config key with its default and meaning, and exit.",
)
@log_options
def coordinate(
    config: Path | None,
    *,
    settings: tuple[str, ...],
    rent: bool,
    print_config: bool,
    log_level: str,
    log_json: bool,
    log_file: Path | None,
) -> None:
    """Run the coordinator: it leads the workers and serves the learner.

    It accepts workers, leases prompts to them, collects their samples into batches for the learner,
    and spreads every version that the learner publishes. Stop it with Ctrl-C or SIGTERM; started
    again with the same config, it continues the run.
    """
    from echo2d.config.coordinator import print_config as all_keys
    from echo2d.recipes.learner_table import learner_keys

    if print_config:
        click.echo(f"{all_keys()}\n{learner_keys()}", nl=False)
        return
    if config is None:
        raise OperatorFault(
            "coordinate needs --config FILE; echo2d coordinate --print-config prints a template"
        )
    _coordinate(config, settings, rent, "coordinate", log_level, log_json, log_file)


@click.command()
@click.option("--config", type=FILE, required=True, help="TOML file of the run, with [tinker].")
@set_option("Override a key of the config: TABLE.KEY=VALUE, such as coordinator.tls=off")
@log_options
def tinker(
    config: Path,
    *,
    settings: tuple[str, ...],
    log_level: str,
    log_json: bool,
    log_file: Path | None,
) -> None:
    """Serve the Tinker API: clients train adapters of their own on one base model.

    It is the coordinator, with [tinker] instead of [[task]]. `echo2d learn --serve` computes for it.
    A client needs a token: `echo2d token create NAME --role tinker`.
    """
    _coordinate(config, settings, False, "tinker", log_level, log_json, log_file)


def _coordinate(
    config: Path,
    settings: tuple[str, ...],
    rent: bool,  # noqa: FBT001 - an option
    command: Literal["coordinate", "tinker"],
    log_level: str,
    log_json: bool,  # noqa: FBT001 - an option
    log_file: Path | None,
) -> None:
    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.recipes.learner_table import check_learner_of

    loaded = CoordinatorConfig.load(config, settings)
    loaded.require(command)
    # `echo2d learn --serve` needs no learner.steps either.
    given = ("learner.steps=1",) if command == "tinker" else ()
    check_learner_of(loaded, config, (*given, *settings))
    if rent:
        from echo2d.runtime.renting.renter import print_rent_plan

        print_rent_plan(loaded, click.echo)
    from echo2d.runtime.coordinator.main import run_coordinator

    serve(
        lambda: run_coordinator(loaded, rent=rent), log_level, log_json=log_json, log_file=log_file
    )


@click.command("run")
@click.option("--config", type=FILE, required=True, help="TOML file of the run, with [learner].")
@set_option("Override a key of the coordinator, the learner or the workers: TABLE.KEY=VALUE")
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    default=1,
    show_default=True,
    help="Workers on this host, with the keys of [worker]; others may join from elsewhere.",
)
@click.option(
    "--log-file",
    type=FILE,
    help="Also write the log to this file, with the lines of each group, which the terminal leaves out.",
)
def run_all(
    config: Path, *, settings: tuple[str, ...], workers: int, log_file: Path | None
) -> None:
    """Run a whole run on this host: coordinator, workers and learner, with one log.

    It starts the programs of `coordinate`, `join` and `learn`, and restarts each that fails. If the
    run exists already, the same command continues it. At Ctrl-C the learner saves its step and all
    programs stop; a second Ctrl-C stops them at once.
    """
    import signal

    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.learner.config import LearnerConfig
    from echo2d.runtime.one_host import OneHost
    from echo2d.views.results import closing_lines

    of_run = [each for each in settings if not each.startswith("worker.")]
    loaded = CoordinatorConfig.load(config, of_run)
    loaded.require("coordinate")
    learner = LearnerConfig.load(config, of_run)
    resume = any((learner.out_dir / "checkpoints").glob("*"))
    with ExitStack() as stack:
        sink = None if log_file is None else stack.enter_context(log_file.open("a"))

        def say(line: str, *, minor: bool = False) -> None:
            if not minor:
                click.echo(line, err=True)
            if sink is not None:
                print(line, file=sink, flush=True)

        host = OneHost(config, loaded, settings, say)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: host.stop())
        code = host.run(workers, resume=resume)
    for line in closing_lines(learner.out_dir / "metrics.jsonl", loaded.run.run_dir, learner.steps):
        click.echo(line, err=True)
    end(code)


@click.command()
@click.option("--config", type=FILE, required=True, help="The coordinator's TOML file.")
@click.option(
    "--stop",
    is_flag=True,
    help="Stop all boxes that the run has rented. The coordinator must not be running.",
)
@json_option("Print one JSON object instead of lines.")
def rented(config: Path, *, stop: bool, as_json: bool) -> None:
    """Show which boxes a run has rented and what it has spent, or stop them all.

    The figures come from the run's own records. While the coordinator runs, it adds the worker of
    each box, and how long that worker has been idle. Exit code 1: after --stop, some boxes may still
    be running.
    """
    import asyncio

    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.runtime.renting import renter

    loaded = CoordinatorConfig.load(config)
    # Giving boxes back may take 900 s, because a cloud may need minutes to end a box.
    facts = asyncio.run(renter.give_back(loaded, 900.0)) if stop else _rented(loaded)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for line in renter.rented_lines(facts):
            click.echo(line)
    sys.exit(1 if stop and facts["boxes"] else 0)


def _rented(config: "CoordinatorConfig") -> Mapping[str, Any]:
    """The run's records; a running coordinator adds the workers of the boxes."""
    import asyncio
    from functools import partial

    from echo2d.runtime.renting import renter
    from echo2d.runtime.run_dir.run_directory import find_coordinator
    from echo2d.views.watch import typed_status_once

    facts = renter.rented(config)
    find = partial(find_coordinator, config.run.run_dir)
    try:
        status = asyncio.run(typed_status_once(find))
    except Fault:
        return facts
    return renter.with_workers(facts, status)


@click.command(
    cls=Sectioned,
    table=WorkerConfig,
    sections={
        "What it joins, and as what": "token_file state_dir config base_model name",
        "Its engines": "engine engine_python engine_args engine_url trust_network engines slots threads",
        "When it works": "hours only_when_idle",
        "What it gives to other workers": "relay_only uplink_limit listen_host listen_port advertise"
        " no_tls",
        "A script instead": "print_script install_from",
    },
)
@click.argument("url", required=False)
@click.option("--config", type=FILE, help="TOML file with a [worker] table; options override it.")
@set_option("Override a key of the [worker] table: KEY=VALUE")
@click.option(
    "--print-script",
    type=click.Choice(["systemd", "onstart", "cloud-init"]),
    help="Print a script that turns a fresh machine into this worker. It installs echo2d and starts a "
    "service (systemd), or joins in the foreground, for containers without systemd (onstart), or is "
    "user data (cloud-init). It holds the token's secret.",
)
@click.option(
    "--install-from",
    metavar="SOURCE",
    help="What the script installs with pip, such as git+https://HOST/REPO@COMMIT or the URL of a "
    "wheel. Default: the wheel that the coordinator serves.",
)
@log_options
def join(
    config: Path | None,
    *,
    settings: tuple[str, ...],
    print_script: "BoxStart | None",
    install_from: str | None,
    log_level: str,
    log_json: bool,
    log_file: Path | None,
    **flags: Any,
) -> None:
    """Run a worker: receive versions, pass them on and make rollouts.

    URL is the coordinator's, https://HOST:PORT; the default is the URL in the token file. --token-file
    and --state-dir are required, here or in the [worker] table of --config; `echo2d coordinate
    --print-config` shows all keys of this table.
    """
    if print_script is not None:
        _print_script(click.get_current_context(), print_script, install_from)
        return
    given, more = {key: value for key, value in flags.items() if value is not None}, []
    if hub.names_a_repository(named := str(given.get("base_model", ""))):
        given["base_model"] = hub.load_model(named)
        # The directory replaces the name, so that a worker that starts again after a pause does not ask the hub.
        more = [f"--base-model={given['base_model']}"]
    loaded = WorkerConfig.load(config, given, settings)
    from echo2d.runtime.process.lifecycle import start_again
    from echo2d.runtime.worker.main import run_worker
    from echo2d.views.progress import progress_line

    with progress_line() as line:
        show, tell = (None, None) if line is None else (line.show, line.print)
        serve(
            lambda: run_worker(loaded, show, lambda: start_again(more)),
            log_level,
            log_json=log_json,
            log_file=log_file,
            tell=tell,
        )


def worker_options(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The [worker] keys and the --set options in these words of an `echo2d join`.

    OperatorFault: `echo2d join` does not accept the words.
    """
    try:
        given: dict[str, Any] = join.make_context("echo2d join", list(words)).params
    except click.UsageError as error:
        raise OperatorFault(f"echo2d join: {error.format_message()}") from error
    keys = {each.name for each in fields(WorkerConfig)}
    flags = {name: each for name, each in given.items() if name in keys and each is not None}
    return flags, given["settings"]


def _print_script(ctx: click.Context, start: "BoxStart", install_from: str | None) -> None:
    """Print the script. OperatorFault: an option is missing, or was given although the script chooses its value."""
    from echo2d.runtime.box.script import BoxJob, box_script, join_options, token_of_box

    if ctx.params["token_file"] is None:
        raise OperatorFault("--print-script: expected --token-file, the token of the box")
    token = token_of_box(ctx.params["token_file"])
    for name in ("state_dir", "config"):
        if ctx.params[name] is not None:
            raise OperatorFault(f"--{name.replace('_', '-')}: leave it out; the script chooses it")
    given = {key.name: ctx.params.get(key.name) for key in fields(WorkerConfig)}
    given |= {"state_dir": Path("state")}  # the script chooses the real one
    WorkerConfig.load(
        None,
        {key: value for key, value in given.items() if value is not None},
        ctx.params["settings"],
    )
    options = tuple(_typed_options(ctx, besides=("token_file", "print_script", "install_from")))
    if ctx.params["name"] is None:
        # The token's name becomes the worker's name, because rented machines often share one host name.
        options += ("--name", token.name)
    engine = None if ctx.params["relay_only"] else ctx.params["engine"] or "torch"
    url = ctx.params["url"] or token.url
    job = BoxJob(url, token, join_options(engine or "", options), engine, install_from)
    text = box_script(job, start)
    with suppress(OSError):  # stdout may have no file descriptor, as in tests
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            os.fchmod(sys.stdout.fileno(), 0o600)
    click.echo(text, nl=False)
    click.echo("echo2d: this script holds the token's secret: keep it from others", err=True)


def _typed_options(ctx: click.Context, *, besides: Sequence[str]) -> Iterator[str]:
    """The options that were typed on this command line, as words for another command line."""
    for each in ctx.command.params:
        name = each.name or ""
        typed = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not (isinstance(each, click.Option) and typed) or name in besides:
            continue
        value = ctx.params[name]
        if each.is_flag:
            yield each.opts[0]
            continue
        for one in value if each.multiple else (value,):
            yield from (each.opts[0], str(one))


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def learn(options: tuple[str, ...]) -> None:
    """Train the policy: take batches, train, publish versions.

    `echo2d learn --help` shows the options. On several GPUs start it as
    `python -m echo2d.learner.torchrun --standalone --nproc-per-node N -m echo2d.learner OPTIONS`.
    """
    from echo2d.learner.__main__ import end_with, main

    end_with(main(list(options)))
