"""`echo2d coordinate`, `join`, `rented`: what runs for days, and what one of it has rented."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import DIRECTORY, FILE, log_options, serve
from echo2d.errors import OperatorFault
from echo2d.registry import ENGINES, one_of


@click.command()
@click.option("--config", type=FILE, help="TOML file; see --print-config.")
@click.option(
    "--no-tls",
    is_flag=True,
    help="No TLS beyond loopback: whoever is on the path reads and takes over.",
)
@click.option("--no-delta", is_flag=True, help="Send versions in full, whatever the workers have.")
@click.option(
    "--no-p2p",
    is_flag=True,
    help="Send every version to every worker from here: workers pass nothing on.",
)
@click.option(
    "--no-cost",
    is_flag=True,
    help="Activate workers in an order that has nothing to do with their prices.",
)
@click.option(
    "--rent",
    is_flag=True,
    help="Rent boxes from [[provider]]s within the budget of [rent]. Costs money.",
)
@click.option(
    "--print-config", is_flag=True, help="Print every key with its default and meaning, and end."
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
) -> None:
    """Run the coordinator of a run: members, plans, leases, batches, the seed of every broadcast."""
    from echo2d.config import CoordinatorConfig
    from echo2d.config import print_config as all_keys

    if print_config:
        click.echo(all_keys(), nl=False)
        return
    if config is None:
        raise OperatorFault(
            "coordinate needs --config FILE (echo2d coordinate --print-config shows one)"
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

    serve(lambda: run_coordinator(loaded, rent=rent), log_level, log_json=log_json)


@click.command()
@click.option("--config", type=FILE, required=True, help="The coordinator's.")
@click.option(
    "--stop",
    is_flag=True,
    help="Stop all that the run has rented; no coordinator may run meanwhile.",
)
@click.option(
    "--within",
    type=click.FloatRange(1.0),
    default=900.0,
    show_default=True,
    help="Seconds that --stop takes at most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rented(config: Path, *, stop: bool, within: float, as_json: bool) -> None:
    """Show what a run has rented and spent, by its own book; or give everything back.

    Exit code 1: with --stop, something may still be there.
    """
    import asyncio

    from echo2d.config import CoordinatorConfig
    from echo2d.runtime.renting import renter

    loaded = CoordinatorConfig.load(config)
    facts = asyncio.run(renter.give_back(loaded, within)) if stop else renter.rented(loaded)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for line in renter.rented_lines(facts):
            click.echo(line)
    sys.exit(1 if stop and facts["boxes"] else 0)


@click.command()
@click.argument("url", required=False)
@click.option("--token-file", type=FILE, help="Made by `echo2d token create NAME --role worker`.")
@click.option(
    "--state-dir", type=DIRECTORY, help="Where this worker keeps its key, frames and snapshots."
)
@click.option("--config", type=FILE, help="TOML file whose [worker] table holds what flags do not.")
@click.option(
    "--base-model",
    type=DIRECTORY,
    help="Model directory here: what it holds is not fetched; adapters need it.",
)
@click.option("--name", help="Shown by status; the host's name if left out.")
@click.option("--engine", help=f"What generates: {one_of(ENGINES)}.")
@click.option(
    "--engine-python",
    type=FILE,
    help="Python of the environment that SGLang is in: start its servers.",
)
@click.option("--engine-args", metavar="FLAGS", help="For these servers, as on a command line.")
@click.option(
    "--engine-url", metavar="URL,...", help="SGLang servers that run already, one per engine."
)
@click.option(
    "--engine-key-file", type=FILE, help="Their API key, then their admin key, a line each."
)
@click.option(
    "--refit-mode", help="How SGLang pauses for a new version: retract, abort or in_place."
)
@click.option(
    "--engines", type=int, help="Engines of this worker, one per GPU; they share one download."
)
@click.option("--slots", type=int, help="Samples each engine runs at once.")
@click.option("--tokens-per-s-max", type=float, help="Generate at most so many tokens per second.")
@click.option("--threads", type=int, help="CPU threads of all torch engines.")
@click.option(
    "--relay-only", is_flag=True, default=None, help="Forward versions, generate nothing."
)
@click.option(
    "--receive-only", is_flag=True, default=None, help="Pass nothing on to other workers."
)
@click.option(
    "--usd-per-h",
    type=float,
    help="What this worker costs, where the run's config says nothing of it.",
)
@click.option(
    "--uplink-limit", metavar="RATE", help="Send at most so much to other workers, such as 50mbit."
)
@click.option("--listen-host", help="Address the peer listener binds.")
@click.option("--listen-port", type=int, help="Port of the peer listener; 0: any free one.")
@click.option(
    "--advertise", metavar="HOST:PORT", help="Where others reach it, if not where it listens (NAT)."
)
@click.option(
    "--no-tls", is_flag=True, default=None, help="Go beyond loopback although the URL is http://."
)
@log_options
def join(config: Path | None, *, log_level: str, log_json: bool, **flags: Any) -> None:
    """Join a run as a worker: receive versions, pass them on, make rollouts. URL is the coordinator's."""
    from echo2d.config import WorkerConfig

    loaded = WorkerConfig.load(
        config, {key: value for key, value in flags.items() if value is not None}
    )
    from echo2d.runtime.worker.main import run_worker

    serve(lambda: run_worker(loaded), log_level, log_json=log_json)
