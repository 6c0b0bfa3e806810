"""The daemons `echo2d coordinate` and `echo2d join`, and `echo2d rented` for rented boxes."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.parts import DIRECTORY, FILE, Sectioned, json_option, log_options, serve
from echo2d.errors import Fault, OperatorFault
from echo2d.registry import ENGINES, one_of

if TYPE_CHECKING:
    from echo2d.config.coordinator import CoordinatorConfig


@click.command()
@click.option("--config", type=FILE, help="TOML file of the run; --print-config shows its keys.")
@click.option(
    "--no-tls",
    is_flag=True,
    help="Use no TLS: anybody on the network path can read everything and take over.",
)
@click.option(
    "--no-delta", is_flag=True, help="Send every version in full instead of as a difference."
)
@click.option(
    "--no-p2p",
    is_flag=True,
    help="Send every version to every worker from this host; workers pass nothing on.",
)
@click.option(
    "--no-cost",
    is_flag=True,
    help="Ignore prices when choosing which workers to activate.",
)
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
    no_tls: bool,
    no_delta: bool,
    no_p2p: bool,
    no_cost: bool,
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
    from echo2d.config.all_keys import print_config as all_keys
    from echo2d.config.coordinator import CoordinatorConfig

    if print_config:
        from echo2d.recipes.learner_table import learner_keys

        click.echo(f"{all_keys()}\n{learner_keys()}", nl=False)
        return
    if config is None:
        raise OperatorFault(
            "coordinate needs --config FILE; echo2d coordinate --print-config prints a template"
        )
    left_out = {
        "dissemination.delta": no_delta,
        "dissemination.p2p": no_p2p,
        "activation.by_cost": no_cost,
    }
    overrides: dict[str, Any] = {key: False for key, out in left_out.items() if out}
    loaded = CoordinatorConfig.load(
        config, {**overrides, **({"coordinator.tls": "off"} if no_tls else {})}
    )
    if rent:
        from echo2d.runtime.renting.renter import print_rent_plan

        print_rent_plan(loaded, click.echo)
    from echo2d.runtime.coordinator.main import run_coordinator

    serve(
        lambda: run_coordinator(loaded, rent=rent), log_level, log_json=log_json, log_file=log_file
    )


@click.command()
@click.option("--config", type=FILE, required=True, help="The coordinator's TOML file.")
@click.option(
    "--stop",
    is_flag=True,
    help="Stop all boxes that the run has rented. The coordinator must not be running.",
)
@click.option(
    "--within",
    type=click.FloatRange(1.0),
    default=900.0,
    show_default=True,
    help="Most seconds that --stop may take.",
)
@json_option("Print one JSON object instead of lines.")
def rented(config: Path, *, stop: bool, within: float, as_json: bool) -> None:
    """Show which boxes a run has rented and what it has spent, or stop them all.

    The figures come from the run's own records; which worker a box has, and for how long that has been
    idle, from the coordinator if it runs. Exit code 1: after --stop, some boxes may still be
    running.
    """
    import asyncio

    from echo2d.config.coordinator import CoordinatorConfig
    from echo2d.runtime.renting import renter

    loaded = CoordinatorConfig.load(config)
    facts = asyncio.run(renter.give_back(loaded, within)) if stop else _rented(loaded)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for line in renter.rented_lines(facts):
            click.echo(line)
    sys.exit(1 if stop and facts["boxes"] else 0)


def _rented(config: "CoordinatorConfig") -> Mapping[str, Any]:
    """The run's record, with what a running coordinator knows besides."""
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
    sections={
        "What it joins, and as what": "token_file state_dir config base_model name usd_per_h",
        "Its engines": "engine engine_python engine_args engine_url engine_key_file refit_mode"
        " engines slots tokens_per_s_max threads",
        "What it gives to other workers": "relay_only receive_only uplink_limit listen_host"
        " listen_port advertise no_tls",
    },
)
@click.argument("url", required=False)
@click.option(
    "--token-file", type=FILE, help="Token file, made by `echo2d token create NAME --role worker`."
)
@click.option(
    "--state-dir", type=DIRECTORY, help="Directory for this worker's key, frames and snapshots."
)
@click.option("--config", type=FILE, help="TOML file with a [worker] table; flags override it.")
@click.option(
    "--base-model",
    type=DIRECTORY,
    help="Model directory on this box: its data are not fetched again; adapters need it.",
)
@click.option("--name", help="Name shown by `echo2d status`. Default: the host's name.")
@click.option("--engine", help=f"Inference engine: {one_of(ENGINES)}.")
@click.option(
    "--engine-python",
    type=FILE,
    help="Start SGLang servers with this python, in whose environment SGLang is installed.",
)
@click.option(
    "--engine-args", metavar="FLAGS", help="Flags for these servers, written as on a command line."
)
@click.option(
    "--engine-url",
    metavar="URL,...",
    help="Use SGLang servers that are running already, one per engine.",
)
@click.option(
    "--engine-key-file",
    type=FILE,
    help="File with the API key of these servers, and their admin key on a second line.",
)
@click.option(
    "--refit-mode",
    help="How SGLang pauses for a new version: retract, abort or in_place (docs/sglang.md).",
)
@click.option(
    "--engines", type=int, help="Number of engines, one per GPU; they share one download."
)
@click.option("--slots", type=int, help="Samples that each engine runs at once.")
@click.option(
    "--tokens-per-s-max", type=float, help="Most tokens per second, all engines together."
)
@click.option("--threads", type=int, help="CPU threads of all torch engines together.")
@click.option(
    "--relay-only", is_flag=True, default=None, help="Pass versions on and generate nothing."
)
@click.option(
    "--receive-only",
    is_flag=True,
    default=None,
    help="Receive versions and pass none on to other workers.",
)
@click.option(
    "--usd-per-h",
    type=float,
    help="Usd per hour of this worker, unless the run's config has a price for it.",
)
@click.option(
    "--uplink-limit",
    metavar="RATE",
    help="Most that is sent to other workers, all together, such as 50mbit.",
)
@click.option("--listen-host", help="Address on which to listen for peers.")
@click.option(
    "--listen-port", type=int, help="Port on which to listen for peers; 0: any free port."
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Where peers reach this worker, if not where it listens (NAT).",
)
@click.option(
    "--no-tls",
    is_flag=True,
    default=None,
    help="Allow an http:// URL beyond loopback, without TLS.",
)
@log_options
def join(
    config: Path | None, *, log_level: str, log_json: bool, log_file: Path | None, **flags: Any
) -> None:
    """Run a worker: receive versions, pass them on and make rollouts.

    URL is the coordinator's, https://HOST:PORT; without it, the one in the token file. --token-file
    and --state-dir are required, as flags or in the [worker] table of --config; `echo2d coordinate
    --print-config` shows its keys.
    """
    from echo2d.config.worker import WorkerConfig

    loaded = WorkerConfig.load(
        config, {key: value for key, value in flags.items() if value is not None}
    )
    from echo2d.runtime.worker.main import run_worker
    from echo2d.views.progress import progress_line

    with progress_line() as line:
        show, tell = (None, None) if line is None else (line.show, line.print)
        serve(
            lambda: run_worker(loaded, show),
            log_level,
            log_json=log_json,
            log_file=log_file,
            tell=tell,
        )
