"""`echo2d plan` and `echo2d simulate`: what would be, before it costs anything."""

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.parts import FILE, coordinator_at, json_option, progress_bar
from echo2d.errors import Fault, OperatorFault
from echo2d.registry import SHAPES

if TYPE_CHECKING:
    from echo2d.plan.fleet.spec import FleetSpec

PRICE = click.FloatRange(0, 1e6)


@click.command()
@click.argument("scenario", type=FILE, required=False)
@click.option(
    "--live",
    metavar="WHERE",
    help="Use what a coordinator has measured: its run directory or its URL.",
)
@click.option(
    "--token-file",
    type=FILE,
    help="For a URL: a token file with the role learner, gateway or viewer.",
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
@click.option(
    "--usd-per-gb-up",
    type=PRICE,
    help="Price of 10^9 bytes that the learner's host sends; overrides what is known of it.",
)
@click.option(
    "--seed", "rng_seed", type=int, default=0, show_default=True, help="Random seed of that order."
)
@click.option(
    "--plot",
    type=FILE,
    help="Also draw bubble and cost by throughput into this file (.png, .svg, .pdf).",
)
@click.option(
    "--map",
    "map_path",
    type=FILE,
    help="Also draw into this file where far-away rollouts are cheaper than a data centre. "
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
    usd_per_gb_up: float | None,
    rng_seed: int,
    plot: Path | None,
    map_path: Path | None,
    as_json: bool,
) -> None:
    """Predict how many workers keep the learner busy, which ones, and what a step costs.

    SCENARIO is a TOML file with [[fleet]] tables (see scenarios/). Give either it or --live. With a
    [centralized] table the answer says when a data centre would be cheaper. The exit code is 0 also
    if no choice of workers is enough.
    """
    from dataclasses import asdict

    from echo2d.plan.fleet.break_even import break_even
    from echo2d.plan.fleet.forecast import Ablation, provision, what_if

    for path in filter(None, (plot, map_path)):
        from echo2d.extras import check_plot

        check_plot(path)
    fleet, ablation = (
        _priced(_fleet(scenario, live, token_file), usd_per_gb_up),
        Ablation(not no_p2p, not no_cost, not no_delta, rng_seed),
    )
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
    if plot is not None:
        from echo2d.views.forecast import draw_provision

        draw_provision(found, plot)
    if map_path is not None and compared is not None:
        from echo2d.views.break_even import draw_map

        draw_map(compared, map_path)


def _priced(fleet: "FleetSpec", usd_per_gb_up: float | None) -> "FleetSpec":
    """The fleet, with this price of what the learner's host sends; None: with its own."""
    from dataclasses import replace

    if usd_per_gb_up is None:
        return fleet
    return replace(fleet, learner=replace(fleet.learner, usd_per_gb_up=usd_per_gb_up))


def _fleet(scenario: Path | None, live: str | None, token_file: Path | None) -> "FleetSpec":
    """The fleet of a file, or of a running coordinator."""
    from echo2d.plan.fleet.spec import load_fleet

    if (scenario is None) == (live is None):
        raise OperatorFault("plan needs either a scenario file or --live")
    if scenario is not None:
        return load_fleet(scenario)
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
    help="Number of peers besides the seed; overrides the file. Broadcasts only.",
)
@click.option(
    "--bytes",
    "size",
    help="Size of the version, such as 80MB or 1GiB; overrides the file. Broadcasts only.",
)
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Plan shape; overrides the file. Broadcasts only.",
)
@click.option(
    "--hours",
    type=click.FloatRange(0, 8760, min_open=True),
    help="Hours to simulate; overrides the file. Fleets only.",
)
@click.option(
    "--no-p2p",
    is_flag=True,
    help="The learner's host sends every version to every worker itself. Fleets only.",
)
@click.option(
    "--no-cost",
    is_flag=True,
    help="Workers are taken in random order, whatever they cost. Fleets only.",
)
@click.option("--no-delta", is_flag=True, help="Versions are sent in full. Fleets only.")
@click.option(
    "--usd-per-gb-up",
    type=PRICE,
    help="Price of 10^9 bytes that the learner's host sends; overrides the file. Fleets only.",
)
@json_option("Print one JSON object instead of sentences.")
def simulate(
    scenario: Path,
    *,
    peers: int | None,
    size: str | None,
    shape: str | None,
    hours: float | None,
    no_p2p: bool,
    no_cost: bool,
    no_delta: bool,
    usd_per_gb_up: float | None,
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
        if peers is not None or size is not None or shape is not None:
            raise OperatorFault(
                "--peers, --bytes and --shape are for broadcasts; this file describes a fleet"
            )
        facts = _simulate_fleet(
            scenario, hours, (not no_p2p, not no_cost, not no_delta), usd_per_gb_up
        )
    else:
        if hours is not None or usd_per_gb_up is not None or no_p2p or no_cost or no_delta:
            raise OperatorFault(
                "--hours, --no-p2p, --no-cost, --no-delta and --usd-per-gb-up are for fleets; "
                "this file has none"
            )
        facts = _simulate_broadcast(scenario, peers=peers, bytes=size, shape=shape)
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
    scenario: Path,
    hours: float | None,
    parts: tuple[bool, bool, bool],
    usd_per_gb_up: float | None,
) -> dict[str, Any]:
    from dataclasses import replace

    from echo2d.plan.fleet.forecast import Ablation
    from echo2d.plan.fleet.spec import load_fleet
    from echo2d.plan.fleet.world import FleetWorld

    fleet = _priced(load_fleet(scenario), usd_per_gb_up)
    if hours is not None:
        fleet = replace(fleet, simulate=replace(fleet.simulate, hours=hours))
    gc.disable()  # a fifth of the time; what a day leaves behind in circles is little
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
