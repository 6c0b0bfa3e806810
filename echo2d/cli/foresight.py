"""`echo2d plan` and `echo2d simulate`: predict a run before it costs anything."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.parts import FILE, coordinator_at, json_option, progress_bar, set_option
from echo2d.errors import Fault, OperatorFault

if TYPE_CHECKING:
    from echo2d.plan.fleet.spec import FleetSpec


@click.command()
@click.argument("scenario", type=FILE, required=False)
@click.option(
    "--live",
    metavar="WHERE",
    help="Use the measurements of a running coordinator: its run directory or its URL.",
)
@click.option(
    "--token-file",
    type=FILE,
    help="With a URL: a token file with the role learner, gateway or viewer.",
)
@click.option(
    "--no-p2p",
    is_flag=True,
    help="Assume that the learner's host sends every version to every worker itself.",
)
@click.option(
    "--no-cost",
    is_flag=True,
    help="Assume that workers are taken in random order, whatever they cost.",
)
@click.option("--no-delta", is_flag=True, help="Assume that versions are sent in full.")
@set_option("Override a key of SCENARIO: TABLE.KEY=VALUE, such as learner.usd_per_gb_up=0.09")
@click.option(
    "--map",
    "map_path",
    type=FILE,
    help="Also draw a map into this file: where far-away rollouts are cheaper than a data centre. "
    "Needs [centralized] in SCENARIO.",
)
@json_option("Print one JSON object instead of tables.")
def plan(
    scenario: Path | None,
    *,
    live: str | None,
    token_file: Path | None,
    no_p2p: bool,
    no_cost: bool,
    no_delta: bool,
    settings: tuple[str, ...],
    map_path: Path | None,
    as_json: bool,
) -> None:
    """Predict how many workers keep the learner busy, which ones, and what a step costs.

    SCENARIO is a TOML file with [[fleet]] tables (see scenarios/). Give either SCENARIO or --live.
    With a [centralized] table the answer says when a data centre would be cheaper. The exit code is 0
    even if no choice of workers is enough.
    """
    from dataclasses import asdict

    from echo2d.plan.fleet.break_even import break_even
    from echo2d.plan.fleet.forecast import Ablation, provision, what_if

    if map_path is not None:
        from echo2d.extras import check_plot

        check_plot(map_path)
    fleet = _fleet(scenario, settings, live, token_file)
    ablation = Ablation(not no_p2p, not no_cost, not no_delta)
    found, cells = provision(fleet, ablation), what_if(fleet, ablation)
    compared = break_even(fleet, found)
    if map_path is not None and compared is None:
        raise OperatorFault(
            "--map: there is nothing to compare with; add [centralized] to the file"
        )
    if as_json:
        facts = {**found.facts(), "break_even": None if compared is None else compared.facts()}
        click.echo(json.dumps({**facts, "what_if": [asdict(cell) for cell in cells]}))
    else:
        from echo2d.views.forecast import print_provision

        print_provision(found, cells, compared)
    if map_path is not None and compared is not None:
        from echo2d.views.break_even import draw_map

        draw_map(compared, map_path)


def _fleet(
    scenario: Path | None, settings: Sequence[str], live: str | None, token_file: Path | None
) -> "FleetSpec":
    """The fleet that the scenario file describes, or that a running coordinator has."""
    from echo2d.plan.fleet.spec import load_fleet

    if (scenario is None) == (live is None):
        raise OperatorFault("plan needs either a scenario file or --live")
    if scenario is not None:
        return load_fleet(scenario, settings)
    if settings:
        raise OperatorFault("plan: --set changes a scenario file; leave it out with --live")
    import asyncio

    from echo2d.plan.fleet.from_status import fleet_of
    from echo2d.views.watch import typed_status_once

    assert live is not None
    is_url = live.startswith(("http://", "https://"))
    find = coordinator_at(None if is_url else Path(live), live if is_url else None, token_file)
    return fleet_of(asyncio.run(typed_status_once(find)))


@click.command()
@click.argument("scenario", type=FILE)
@click.option(
    "--peers",
    type=click.IntRange(1, 10_000),
    help="Broadcasts only: number of peers besides the seed; overrides the file.",
)
@click.option(
    "--bytes",
    "size",
    help="Broadcasts only: size of the version, such as 80MB or 1GiB; overrides the file.",
)
@set_option("Fleets only: override a key of the file: TABLE.KEY=VALUE, such as simulate.hours=24")
@click.option(
    "--no-p2p",
    is_flag=True,
    help="Fleets only: assume that the learner's host sends every version to every worker itself.",
)
@click.option(
    "--no-cost",
    is_flag=True,
    help="Fleets only: assume that workers are taken in random order, whatever they cost.",
)
@click.option(
    "--no-delta", is_flag=True, help="Fleets only: assume that versions are sent in full."
)
@json_option("Print one JSON object instead of sentences.")
def simulate(
    scenario: Path,
    *,
    peers: int | None,
    size: str | None,
    settings: tuple[str, ...],
    no_p2p: bool,
    no_cost: bool,
    no_delta: bool,
    as_json: bool,
) -> None:
    """Simulate in virtual time: hours of a fleet, or one broadcast.

    A file with [[fleet]] tables describes a fleet: the real leases, groups, staleness gates and
    activation run with workers that come and go. A file with [[peers]] tables describes a
    broadcast: the real relays and planner run on its links. Examples of both are in scenarios/.
    """
    import time

    from echo2d.plan.fleet.spec import is_fleet

    began, cpu_began = time.perf_counter(), time.process_time()
    if is_fleet(scenario):
        if peers is not None or size is not None:
            raise OperatorFault(
                "--peers and --bytes are for broadcasts; this file describes a fleet"
            )
        facts = _simulate_fleet(scenario, settings, (not no_p2p, not no_cost, not no_delta))
    else:
        if settings or no_p2p or no_cost or no_delta:
            raise OperatorFault(
                "--set, --no-p2p, --no-cost and --no-delta are for fleets; this file has none"
            )
        facts = _simulate_broadcast(scenario, peers=peers, bytes=size)
    facts = {
        **facts,
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        from echo2d.views.simulated import print_simulated

        print_simulated(facts)


def _simulate_fleet(
    scenario: Path, settings: Sequence[str], parts: tuple[bool, bool, bool]
) -> dict[str, Any]:
    from echo2d.plan.fleet.forecast import Ablation
    from echo2d.plan.fleet.spec import load_fleet
    from echo2d.plan.fleet.world import FleetWorld

    fleet = load_fleet(scenario, settings)
    # Garbage collection would take a fifth of the time, and a simulated day leaves few reference cycles.
    gc.disable()
    with progress_bar("simulating") as tell:
        return FleetWorld(fleet, Ablation(*parts)).run(tell)


def _simulate_broadcast(scenario: Path, **instead: Any) -> dict[str, Any]:
    from echo2d.plan.broadcast.world import CHECK_EVERY_LONG, BroadcastStuckError, World
    from echo2d.plan.kernel.scenario_file import load_scenario

    world = World(load_scenario(scenario, **instead), check_every=CHECK_EVERY_LONG)
    with progress_bar("simulating") as tell:
        try:
            return world.run(tell).facts()
        except BroadcastStuckError as error:
            raise Fault(str(error)) from error
