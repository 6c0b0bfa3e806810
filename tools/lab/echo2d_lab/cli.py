"""`echo2d bench`: measures real daemons under a bounded load."""

import sys
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import DIRECTORY, FILE, FullSentences, json_option
from echo2d.errors import OperatorFault
from echo2d.registry import SHAPES
from echo2d_lab.bench.liars.kinds import LIES


@click.group(cls=FullSentences)
def bench() -> None:
    """Measure real daemons under a bounded load."""


@bench.command("broadcast")
@click.option(
    "--peers",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Number of workers besides the seed.",
)
@click.option(
    "--uplink", default="100mbit", show_default=True, help="Uplink of the seed and of every peer."
)
@click.option(
    "--uplinks", help="Uplinks SEED,P1,P2,... in Mbit/s, instead of --peers and --uplink."
)
@click.option("--downlink", help="Downlink of every peer. Default: the fastest uplink.")
@click.option(
    "--rtt", default="50ms", show_default=True, help="Round-trip time between any two peers."
)
@click.option(
    "--loss",
    type=click.FloatRange(0, 0.5),
    default=0.0,
    show_default=True,
    help="Share of lost packets.",
)
@click.option("--bytes", "size", default="64MiB", show_default=True, help="Size of a version.")
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    default="auto",
    show_default=True,
    help="Plan shape.",
)
@click.option(
    "--seed",
    "rng_seed",
    type=int,
    default=0,
    show_default=True,
    help="Random seed of the versions' bytes.",
)
@click.option("--scenario", type=FILE, help="TOML file that replaces all options above.")
@click.option(
    "--undialable",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Share of the peers that are behind NAT.",
)
@click.option(
    "--rates",
    type=click.FloatRange(0.01, 100),
    default=1.0,
    show_default=True,
    help="Multiply all rates by this: 0.5 shows whether the machine was the limit.",
)
@click.option(
    "--rounds",
    type=int,
    default=5,
    show_default=True,
    help="Number of measured broadcasts with open links, after one from cold.",
)
@click.option(
    "--warm-up",
    type=int,
    default=4,
    show_default=True,
    help="Number of broadcasts that do not count, between the cold one and the measured ones.",
)
@click.option(
    "--queue",
    default="50ms",
    show_default=True,
    help="Size of the queue in front of a link, as a time.",
)
@click.option(
    "--kill", type=float, help="Kill (SIGKILL) the busiest fast relay at this share of a version."
)
@click.option(
    "--partition",
    type=float,
    help="Cut the busiest fast relay off the network at this share of a version.",
)
@click.option(
    "--corrupt", type=float, help="Share of the frames that the busiest fast relay corrupts."
)
@click.option(
    "--swing",
    type=click.FloatRange(0, 0.9),
    default=0.0,
    help="Every 2 s each uplink becomes slower or faster by this share, at random.",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Use TLS on all connections, as a run does beyond loopback. Default: no TLS.",
)
@click.option(
    "--versions",
    type=DIRECTORY,
    help="Spread these real versions (tools/lab/echo2d_lab/research/rl_updates.py) as deltas, repeated up to --bytes.",
)
@click.option(
    "--against",
    default="",
    help="Also measure any of star,libtorrent,aria2,relay-tree,object-store, cold and warm like echo2d.",
)
@click.option(
    "--run-dir", type=DIRECTORY, help="Directory to keep, with all logs. Default: a temporary one."
)
@click.option(
    "--plot",
    type=FILE,
    help="Also measure 2, 4, 8, ... peers and draw T_verify into this file (.png, .svg, .pdf).",
)
@json_option("Print one JSON object instead of a table.")
def bench_broadcast(
    scenario: Path | None,
    undialable: float,
    rates: float,
    rounds: int,
    warm_up: int,
    queue: str,
    against: str,
    plot: Path | None,
    **options: Any,
) -> None:
    """Measure how long versions take to spread.

    Real coordinator, seed and workers run in network namespaces with emulated links; this needs
    Linux, root and cc. Exit code 1: some worker did not verify a version.
    """
    from echo2d.plan.kernel.scenario_file import load_scenario
    from echo2d.quantities import parse_seconds
    from echo2d_lab.bench.broadcast.plot import run_plot
    from echo2d_lab.bench.broadcast.run import (
        BroadcastBench,
        run_broadcast,
        with_rates,
        with_undialable,
    )
    from echo2d_lab.bench.broadcast.scenario_flags import scenario_of

    trouble = {
        name: options.pop(name)
        for name in (
            "kill",
            "partition",
            "corrupt",
            "swing",
            "tls",
            "versions",
            "run_dir",
            "as_json",
        )
    }
    played = scenario_of(**options) if scenario is None else load_scenario(scenario)
    rivals = tuple(filter(None, against.split(",")))
    played = with_rates(with_undialable(played, undialable), rates)
    wanted = BroadcastBench(
        played, rounds, warm_up, parse_seconds(queue), against=rivals, **trouble
    )
    sys.exit(run_broadcast(wanted) if plot is None else run_plot(wanted, plot))


@bench.command("coordinator")
@click.option(
    "--workers",
    type=click.IntRange(1, 2000),
    default=1000,
    show_default=True,
    help="Number of scripted workers that connect.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.1, 2000),
    default=200,
    show_default=True,
    help="Trajectories per second of all workers together.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    help="Output tokens of a trajectory.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Turns of an environment in which the tokens are written; 1: no environment.",
)
@click.option(
    "--slots", type=click.IntRange(1, 256), default=4, show_default=True, help="Slots of a worker."
)
@click.option(
    "--bombers",
    type=click.IntRange(0, 16),
    default=0,
    show_default=True,
    help="Number of further workers, which attack with messages that are expensive to refuse.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=60,
    show_default=True,
    help="Seconds to measure.",
)
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    default="auto",
    show_default=True,
    help="Plan shape (dissemination.shape).",
)
@json_option("Print one JSON object instead of a table.")
def bench_coordinator(*, as_json: bool, **options: Any) -> None:
    """Measure how many workers a coordinator can lead on this host.

    A real coordinator (its own process, HTTP, WebSocket, SQLite, tasks) gets scripted workers and a
    scripted learner, on loopback and in a temporary directory. Lease latency is the time for which a
    worker's slot stays empty: from handing its result to the control link until the LeaseGranted arrives
    that fills the slot. Exit code 1: the load was not sustained.
    """
    from echo2d_lab.bench.coordinator.load import Load
    from echo2d_lab.bench.coordinator.run import run_coordinator_bench

    sys.exit(run_coordinator_bench(Load(**options), as_json=as_json))


@bench.command("delta")
@click.argument("old", type=DIRECTORY)
@click.argument("new", type=DIRECTORY)
@click.option(
    "--runs",
    type=int,
    default=5,
    show_default=True,
    help="Number of runs in which the speeds are measured.",
)
@click.option("--against", default="", help="Also encode with any of xor,index-value,zstd.")
@click.option(
    "--codec",
    type=click.Choice(("numpy", "plain", "avx2", "avx512")),
    help="Code that encodes and decodes. Default: the best one of this machine.",
)
@click.option(
    "--out",
    type=DIRECTORY,
    help="Directory to keep, in which NEW is rebuilt. Default: a temporary one.",
)
@json_option("Print one JSON object instead of a table.")
def bench_delta(*, against: str, as_json: bool, **options: Any) -> None:
    """Measure the delta between two snapshots: its size, and the speed of encoding and applying it.

    NEW is encoded as a difference from OLD and rebuilt from it. Exit code 1: the rebuilt snapshot
    is not NEW, byte for byte.
    """
    from echo2d_lab.bench.delta.run import DeltaBench, run_delta_bench

    sys.exit(
        run_delta_bench(
            DeltaBench(against=tuple(filter(None, against.split(","))), **options), as_json=as_json
        )
    )


@bench.command("liars")
@click.option(
    "--lies",
    default=",".join(LIES),
    show_default=True,
    help="Lies to measure, one worker for each.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of a liar's samples about which it lies; lies about weights affect all samples.",
)
@click.option(
    "--audit-share",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Share of a clear worker's answers that is audited (audit.share).",
)
@click.option(
    "--newcomer",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Answers that are audited before any is trained on (audit.newcomer).",
)
@click.option(
    "--liars-from",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Train step from which liars join; before it an old version is hardly a lie.",
)
@click.option(
    "--unseeded",
    is_flag=True,
    help="Replay no seeds, as with SGLang in its usual settings (audit.seeds = none).",
)
@click.option(
    "--episodes",
    is_flag=True,
    help="The task is an environment of two turns (two_turn_digits) instead of sort_digits.",
)
@click.option(
    "--int8",
    is_flag=True,
    help="Add a trusted and an honest worker in int8; liars claim to be such workers.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=400, show_default=True, help="Train steps at most."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=900.0,
    show_default=True,
    help="Seconds at most.",
)
@click.option("--seed", "rng_seed", type=int, default=0, show_default=True, help="Random seed.")
@click.option("--out", type=DIRECTORY, help="Keep the run in this new directory.")
@json_option("Print one JSON object instead of a table.")
def bench_liars(*, lies: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure how soon the audit convicts workers that lie, each in another way.

    Coordinator, auditor, learner, honest and lying workers are real processes with the demo's model.
    Exit code 1: a liar was convicted too late or not at all, or an honest worker was convicted.
    """
    from echo2d_lab.bench.liars.run import LiarsPlan, run_liars_bench

    chosen = tuple(filter(None, lies.split(",")))
    if unknown := set(chosen) - set(LIES):
        raise OperatorFault(f"--lies: expected some of {', '.join(LIES)}; found {min(unknown)}")
    plan = LiarsPlan(lies=chosen, **options)  # type: ignore[arg-type]
    sys.exit(run_liars_bench(plan, out=out, as_json=as_json))


@bench.command("publish")
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=("500MB",),
    show_default=True,
    help="Size of the snapshots; may be repeated.",
)
@click.option(
    "--changed",
    type=click.FloatRange(0.0001, 0.5),
    default=0.01,
    show_default=True,
    help="Share of the words that a version changes.",
)
@click.option(
    "--rounds", type=int, default=5, show_default=True, help="Measured publishes of each size."
)
@click.option(
    "--workers", type=click.IntRange(1, 16), default=1, show_default=True, help="Number of workers."
)
@click.option("--predict", help="Also predict the time for this size, from the measured sizes.")
@click.option(
    "--dir",
    "directory",
    type=DIRECTORY,
    help="Directory on the disk to be measured. Default: a temporary one.",
)
@json_option("Print one JSON object instead of a table.")
def bench_publish(
    *, sizes: tuple[str, ...], predict: str | None, as_json: bool, **options: Any
) -> None:
    """Measure from the publish call until the last engine serves the version, stage by stage.

    A coordinator, workers and a client run on this machine, with TLS and files on its disk. Nothing
    emulates a network; `bench broadcast` does.
    """
    from echo2d.quantities import parse_bytes
    from echo2d_lab.bench.publish.run import PublishBench, run_publish_bench

    wanted = PublishBench(
        sizes=tuple(map(parse_bytes, sizes)),
        predict=0 if predict is None else parse_bytes(predict),
        **options,
    )
    sys.exit(run_publish_bench(wanted, as_json=as_json))


@bench.command("soak")
@click.option(
    "--minutes",
    type=click.FloatRange(12, 24 * 60),
    default=60,
    show_default=True,
    help="Length of the run; the first count is at a third of it.",
)
@click.option(
    "--scripted",
    type=click.IntRange(32, 2000),
    default=300,
    show_default=True,
    help="Number of scripted workers.",
)
@click.option(
    "--real",
    type=click.IntRange(2, 16),
    default=4,
    show_default=True,
    help="Number of real workers, with torch engines.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.1, 2000),
    default=20,
    show_default=True,
    help="Trajectories per second of all scripted workers together.",
)
@click.option("--seed", "rng_seed", type=int, default=0, show_default=True, help="Random seed.")
@click.option("--out", type=DIRECTORY, help="Keep the run in this new directory.")
@json_option("Print one JSON object instead of a table.")
def bench_soak(*, out: Path | None, as_json: bool, **options: Any) -> None:
    """Make all kinds of troubles for a run for an hour, and look for leaks, losses and missing alerts.

    Workers join and leave, programs are killed and frozen, tokens are revoked, workers of another build
    and attackers join. Exit code 1: something leaked, was lost or doubled, or an alert was wrong.
    """
    from echo2d_lab.bench.soak.plan import SoakPlan
    from echo2d_lab.bench.soak.run import run_soak

    sys.exit(run_soak(SoakPlan(**options), out=out, as_json=as_json))
