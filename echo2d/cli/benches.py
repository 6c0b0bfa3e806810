"""`echo2d bench`: the real thing, measured under a bounded load."""

import sys
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import DIRECTORY, FILE
from echo2d.registry import SHAPES


@click.group()
def bench() -> None:
    """Measure the real thing under a bounded load."""


@bench.command("broadcast")
@click.option(
    "--peers",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Workers beside the seed.",
)
@click.option(
    "--uplink", default="100mbit", show_default=True, help="Of the seed and of every peer."
)
@click.option("--uplinks", help="SEED,P1,P2,... in Mbit/s, instead of --peers and --uplink.")
@click.option("--downlink", help="Of every peer; the fastest uplink if left out.")
@click.option("--rtt", default="50ms", show_default=True, help="Between any two.")
@click.option(
    "--loss",
    type=click.FloatRange(0, 0.5),
    default=0.0,
    show_default=True,
    help="Share of packets.",
)
@click.option("--bytes", "size", default="64MiB", show_default=True, help="Of a version.")
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    default="auto",
    show_default=True,
    help="Plans.",
)
@click.option(
    "--seed",
    "rng_seed",
    type=int,
    default=0,
    show_default=True,
    help="Of the versions' random bytes.",
)
@click.option("--scenario", type=FILE, help="TOML file instead of all the above.")
@click.option(
    "--undialable", type=click.FloatRange(0, 1), default=0.0, help="Share of the peers behind NAT."
)
@click.option(
    "--rounds", type=int, default=5, show_default=True, help="Warm ones, after a cold one."
)
@click.option(
    "--warm-up",
    type=int,
    default=4,
    show_default=True,
    help="Rounds between them that do not count.",
)
@click.option(
    "--queue", default="50ms", show_default=True, help="What is queued before a link at most."
)
@click.option(
    "--kill", type=float, help="SIGKILL for the busiest fast relay at this share of a version."
)
@click.option("--partition", type=float, help="Silence from it, likewise, instead.")
@click.option("--corrupt", type=float, help="The share of its frames that it spoils.")
@click.option(
    "--tls",
    is_flag=True,
    help="On all connections, as off loopback; for comparison without, if left out.",
)
@click.option(
    "--versions",
    type=DIRECTORY,
    help="Real ones (tools/rl_updates.py), as deltas, repeated up to --bytes.",
)
@click.option(
    "--against", default="", help="Also measure: star,libtorrent,aria2; after each warm round once."
)
@click.option("--run-dir", type=DIRECTORY, help="Kept with all logs; a temporary one if left out.")
@click.option(
    "--plot",
    type=FILE,
    help="Also measure 2, 4, 8, ... peers, and draw T_verify (.png, .svg, .pdf).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def bench_broadcast(
    scenario: Path | None,
    undialable: float,
    rounds: int,
    warm_up: int,
    queue: str,
    against: str,
    plot: Path | None,
    **options: Any,
) -> None:
    """Measure how long versions take to spread: real daemons, emulated links (Linux, root, cc).

    Coordinator, seed and workers run in network namespaces of their own. Exit code 1: somebody has not verified.
    """
    from echo2d.bench.broadcast.plot import run_plot
    from echo2d.bench.broadcast.run import BroadcastBench, run_broadcast, with_undialable
    from echo2d.quantities import parse_seconds
    from echo2d.sim.kernel.scenario_file import load_scenario, scenario_of

    trouble = {
        name: options.pop(name)
        for name in ("kill", "partition", "corrupt", "tls", "versions", "run_dir", "as_json")
    }
    played = scenario_of(**options) if scenario is None else load_scenario(scenario)
    rivals = tuple(filter(None, against.split(",")))
    played = with_undialable(played, undialable)
    wanted = BroadcastBench(
        played, rounds, warm_up, parse_seconds(queue), against=rivals, **trouble
    )
    sys.exit(run_broadcast(wanted) if plot is None else run_plot(wanted, plot))


@bench.command("coordinator")
@click.option(
    "--workers",
    type=click.IntRange(1, 1000),
    default=1000,
    show_default=True,
    help="Scripted workers that connect.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.1, 2000),
    default=200,
    show_default=True,
    help="Trajectories per second of all.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    help="Of a trajectory.",
)
@click.option(
    "--slots", type=click.IntRange(1, 256), default=4, show_default=True, help="Of a worker."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=60,
    show_default=True,
    help="Time measured.",
)
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    default="auto",
    show_default=True,
    help="dissemination.shape: how the versions are planned.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def bench_coordinator(*, as_json: bool, **options: Any) -> None:
    """Measure a real coordinator (own process, HTTP, WebSocket, SQLite, tasks) with scripted workers and learner.

    Lease latency: how long a slot of a worker stays empty, from its result being handed to the control link until the
    LeaseGranted that fills it has come. Everything is on loopback, in a temporary directory. Exit code 1: the load was
    not sustained.
    """
    from echo2d.bench.coordinator.load import Load
    from echo2d.bench.coordinator.run import run_coordinator_bench

    sys.exit(run_coordinator_bench(Load(**options), as_json=as_json))


@bench.command("delta")
@click.argument("old", type=DIRECTORY)
@click.argument("new", type=DIRECTORY)
@click.option(
    "--runs", type=int, default=5, show_default=True, help="In which the speeds are measured."
)
@click.option("--against", default="", help="Also encode as others do: xor,index-value,zstd.")
@click.option(
    "--out", type=DIRECTORY, help="Where NEW is built again, kept; a temporary folder if left out."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def bench_delta(*, against: str, as_json: bool, **options: Any) -> None:
    """Measure what it takes to send the snapshot NEW to who has OLD, and build it again from that.

    Exit code 1: what was built is not NEW, byte for byte.
    """
    from echo2d.bench.delta.run import DeltaBench, run_delta_bench

    sys.exit(
        run_delta_bench(
            DeltaBench(against=tuple(filter(None, against.split(","))), **options), as_json=as_json
        )
    )
