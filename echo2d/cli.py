"""The `echo2d` command: parse, build the config, hand over. Heavy imports happen inside the commands (--help is fast).

Exit codes: 0 done, 1 failed while running, 2 the operator's mistake (one clear line, no traceback).
"""

import gc
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from echo2d import __version__
from echo2d.errors import Fault, OperatorFault

if TYPE_CHECKING:
    from echo2d.sim.fleet import Fleet

FILE = click.Path(path_type=Path, dir_okay=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)


class Faultless(click.Group):
    """Turns faults into one line on stderr and the exit code that says whose mistake it was."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Fault as fault:
            click.echo(f"echo2d: {fault}", err=True)
            ctx.exit(2 if isinstance(fault, OperatorFault) else 1)


@click.group(cls=Faultless, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="echo2d")
def main() -> None:
    """RL post-training with one busy learner and rollouts from far-away GPU boxes."""


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """How a daemon logs."""
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning"]),
        default="info",
        show_default=True,
        help="debug has a line for every sample.",
    )
    return level(click.option("--log-json", is_flag=True, help="One JSON object a line.")(command))


def _serve(program: Callable[[], Coroutine[Any, Any, int]], log_level: str, *, log_json: bool) -> None:
    from echo2d.runtime.daemon import run_daemon
    from echo2d.runtime.logs import LEVELS, start_logging

    start_logging(LEVELS[log_level], as_json=log_json)
    _end(run_daemon(program))


def _end(code: int) -> NoReturn:
    """Without a search for garbage in all that was loaded: with torch that takes a second, and the process ends."""
    gc.freeze()
    sys.exit(code)


@main.command()
@click.option("--config", type=FILE, help="TOML file; see --print-config.")
@click.option("--no-tls", is_flag=True, help="No TLS beyond loopback: whoever is on the path reads and takes over.")
@click.option("--no-delta", is_flag=True, help="Send versions in full, whatever the workers have.")
@click.option("--no-p2p", is_flag=True, help="Send every version to every worker from here: workers pass nothing on.")
@click.option("--no-cost", is_flag=True, help="Activate workers in an order that has nothing to do with their prices.")
@click.option("--rent", is_flag=True, help="Rent boxes from [[provider]]s within the budget of [rent]. Costs money.")
@click.option("--print-config", is_flag=True, help="Print every key with its default and meaning, and end.")
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
        raise OperatorFault("coordinate needs --config FILE (echo2d coordinate --print-config shows one)")
    left_out = {"dissemination.delta": no_delta, "dissemination.p2p": no_p2p, "activation.by_cost": no_cost}
    overrides: dict[str, Any] = {key: False for key, out in left_out.items() if out}
    loaded = CoordinatorConfig.load(config, {**overrides, **({"coordinator.tls": "off"} if no_tls else {})})
    if rent:
        from echo2d.runtime.providers import print_rent_plan

        print_rent_plan(loaded, click.echo)
    from echo2d.runtime.coordinator import run_coordinator

    _serve(lambda: run_coordinator(loaded, rent=rent), log_level, log_json=log_json)


@main.command()
@click.option("--config", type=FILE, required=True, help="The coordinator's.")
@click.option("--stop", is_flag=True, help="Stop all that the run has rented; no coordinator may run meanwhile.")
@click.option(
    "--within", type=click.FloatRange(1.0), default=900.0, show_default=True, help="Seconds that --stop takes at most."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rented(config: Path, *, stop: bool, within: float, as_json: bool) -> None:
    """Show what a run has rented and spent, by its own book; or give everything back.

    Exit code 1: with --stop, something may still be there.
    """
    import asyncio

    from echo2d.config import CoordinatorConfig
    from echo2d.runtime import providers

    loaded = CoordinatorConfig.load(config)
    facts = asyncio.run(providers.give_back(loaded, within)) if stop else providers.rented(loaded)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for line in providers.rented_lines(facts):
            click.echo(line)
    sys.exit(1 if stop and facts["boxes"] else 0)


@main.command()
@click.argument("url", required=False)
@click.option("--token-file", type=FILE, help="Made by `echo2d token create NAME --role worker`.")
@click.option("--state-dir", type=DIRECTORY, help="Where this worker keeps its key, frames and snapshots.")
@click.option("--config", type=FILE, help="TOML file whose [worker] table holds what flags do not.")
@click.option(
    "--base-model", type=DIRECTORY, help="Model directory here: what it holds is not fetched; adapters need it."
)
@click.option("--name", help="Shown by status; the host's name if left out.")
@click.option("--engine", help="What generates: torch, sglang or fake.")
@click.option("--engine-python", type=FILE, help="Python of the environment that SGLang is in: start its servers.")
@click.option("--engine-args", metavar="FLAGS", help="For these servers, as on a command line.")
@click.option("--engine-url", metavar="URL,...", help="SGLang servers that run already, one per engine.")
@click.option("--engine-key-file", type=FILE, help="Their API key, then their admin key, a line each.")
@click.option("--refit-mode", help="How SGLang pauses for a new version: retract, abort or in_place.")
@click.option("--engines", type=int, help="Engines of this worker, one per GPU; they share one download.")
@click.option("--slots", type=int, help="Samples each engine runs at once.")
@click.option("--tokens-per-s-max", type=float, help="Generate at most so many tokens per second.")
@click.option("--threads", type=int, help="CPU threads of all torch engines.")
@click.option("--relay-only", is_flag=True, default=None, help="Forward versions, generate nothing.")
@click.option("--receive-only", is_flag=True, default=None, help="Pass nothing on to other workers.")
@click.option("--usd-per-h", type=float, help="What this worker costs, where the run's config says nothing of it.")
@click.option("--uplink-limit", metavar="RATE", help="Send at most so much to other workers, such as 50mbit.")
@click.option("--listen-host", help="Address the peer listener binds.")
@click.option("--listen-port", type=int, help="Port of the peer listener; 0: any free one.")
@click.option("--advertise", metavar="HOST:PORT", help="Where others reach it, if not where it listens (NAT).")
@click.option("--no-tls", is_flag=True, default=None, help="Go beyond loopback although the URL is http://.")
@log_options
def join(config: Path | None, *, log_level: str, log_json: bool, **flags: Any) -> None:
    """Join a run as a worker: receive versions, pass them on, make rollouts. URL is the coordinator's."""
    from echo2d.config import WorkerConfig

    loaded = WorkerConfig.load(config, {key: value for key, value in flags.items() if value is not None})
    from echo2d.runtime.worker import run_worker

    _serve(lambda: run_worker(loaded), log_level, log_json=log_json)


@main.group()
def token() -> None:
    """Create, list and revoke credentials. Works on the run directory, whether or not a coordinator runs."""


@token.command("create")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["worker", "learner", "gateway", "viewer"]),
    required=True,
    help="What the holder may do: join, train, generate, or look.",
)
@click.option("--run-dir", type=DIRECTORY, required=True, help="run.run_dir of the coordinator's config.")
@click.option("--url", required=True, help="How the holder reaches the coordinator: https://HOST:PORT.")
@click.option("--out", type=FILE, help="The token file to write; NAME.token if left out.")
@click.option(
    "--max-workers", type=click.IntRange(1), default=1, show_default=True, help="Machines that may enrol with it."
)
@click.option("--expires", default="30d", show_default=True, help="From now: 90s, 12h, 30d or never.")
def token_create(
    name: str, role: Any, run_dir: Path, url: str, out: Path | None, max_workers: int, expires: str
) -> None:
    """Create the credential NAME and write its token file (mode 0600)."""
    from echo2d.runtime.tokens import create_token

    path = out or Path(f"{name}.token")
    create_token(run_dir, name, role=role, url=url, out=path, max_workers=max_workers, expires=expires)
    click.echo(f"wrote {path}")


@token.command("list")
@click.option("--run-dir", type=DIRECTORY, required=True, help="run.run_dir of the coordinator's config.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def token_list(run_dir: Path, *, as_json: bool) -> None:
    """Show all credentials of a run; never their secrets."""
    from echo2d.runtime.tokens import list_tokens

    rows = list_tokens(run_dir)
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo("  ".join(f"{key}={value}" for key, value in row.items()))


@token.command("revoke")
@click.argument("name")
@click.option("--run-dir", type=DIRECTORY, required=True, help="run.run_dir of the coordinator's config.")
def token_revoke(name: str, run_dir: Path) -> None:
    """Revoke the credential NAME; its live sessions end within a second."""
    from echo2d.runtime.tokens import revoke_token

    revoke_token(run_dir, name)
    click.echo(f"revoked {name}")


@main.command()
@click.option("--run-dir", type=DIRECTORY, help="Of a coordinator on this host.")
@click.option("--url", help="Of a coordinator elsewhere; needs --token-file.")
@click.option("--token-file", type=FILE, help="A learner, gateway or viewer token.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object; with --watch one a line.")
@click.option("--watch", "again", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
def status(
    run_dir: Path | None, url: str | None, token_file: Path | None, *, as_json: bool, again: bool, interval: float
) -> None:
    """Show what a running coordinator is doing, and what is wrong."""
    import asyncio

    from echo2d.bench.status_view import print_status
    from echo2d.bench.watch import Screen, status_once, watch

    find = _coordinator_at(run_dir, url, token_file)
    if again:
        with suppress(KeyboardInterrupt):
            asyncio.run(watch(find, Screen(as_json=as_json), interval_s=interval))
        return
    facts = asyncio.run(status_once(find))
    if as_json:
        click.echo(json.dumps(facts))
    else:
        print_status(facts)


def _coordinator_at(run_dir: Path | None, url: str | None, token_file: Path | None) -> Callable[[], tuple[str, Path]]:
    """Where to ask, each time anew: one that is started again may listen elsewhere."""
    if run_dir is not None:
        from echo2d.runtime.tokens import find_coordinator

        return partial(find_coordinator, run_dir)
    if url is None or token_file is None:
        raise OperatorFault("the coordinator's run directory is needed, or its URL and --token-file")
    at = (url, token_file)
    return lambda: at


@main.command()
@click.option("--steps", type=int, default=None, help="Train steps; the accuracy bar holds for the default only.")
@click.option("--workers", type=click.IntRange(1, 16), default=3, show_default=True, help="Worker daemons to start.")
@click.option("--staleness", type=click.IntRange(0), default=2, show_default=True, help="S, in train steps.")
@click.option("--kappa", type=click.IntRange(1), default=1, show_default=True, help="Train steps per publish.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of model, prompts and sampling.")
@click.option("--chaos", is_flag=True, help="kill -9 workers again and again, and everything else at least once.")
@click.option("--delta/--no-delta", default=True, help="Send versions as differences (default), or in full.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object instead of the table.")
@click.option("--run-dir", type=DIRECTORY, help="Kept with all logs; runs/demo-N if left out.")
def demo(steps: int | None, **options: Any) -> None:
    """Watch a small language model get better: coordinator, workers and learner on this machine."""
    from echo2d.bench.demo import STEPS, Demo, run_demo

    _end(run_demo(Demo(steps=STEPS if steps is None else steps, **options)))


@main.command()
@click.argument("scenario", type=FILE, required=False)
@click.option("--live", metavar="WHERE", help="With what a coordinator has measured: its run directory, or URL.")
@click.option("--token-file", type=FILE, help="For a URL: a learner, gateway or viewer token.")
@click.option("--no-p2p", is_flag=True, help="As if the learner's host sent every version to every worker itself.")
@click.option("--no-cost", is_flag=True, help="As if workers were taken in random order, whatever they cost.")
@click.option("--no-delta", is_flag=True, help="As if versions went out in full.")
@click.option("--seed", "rng_seed", type=int, default=0, show_default=True, help="Of the random order.")
@click.option("--plot", type=FILE, help="Also draw bubble and cost over throughput (.png, .svg, .pdf).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(
    scenario: Path | None,
    *,
    live: str | None,
    token_file: Path | None,
    no_p2p: bool,
    no_cost: bool,
    no_delta: bool,
    rng_seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Say how many workers keep the learner busy, which ones, and what a step costs, before any money is spent.

    Exit code 0 whether or not it is feasible: that is the answer.
    """
    from dataclasses import asdict

    from echo2d.sim.provision import Ablation, provision, what_if

    if plot is not None:
        from echo2d.bench.broadcast_plot import check_plot

        check_plot(plot)
    fleet, ablation = _fleet(scenario, live, token_file), Ablation(not no_p2p, not no_cost, not no_delta, rng_seed)
    found, cells = provision(fleet, ablation), what_if(fleet, ablation)
    if as_json:
        click.echo(json.dumps({**found.facts(), "what_if": [asdict(cell) for cell in cells]}))
    else:
        from echo2d.bench.provision_view import print_provision

        print_provision(found, cells)
    if plot is not None:
        from echo2d.bench.provision_view import draw_provision

        draw_provision(found, plot)


def _fleet(scenario: Path | None, live: str | None, token_file: Path | None) -> "Fleet":
    """Of a file, or of a coordinator that runs."""
    from echo2d.sim.fleet import load_fleet

    if (scenario is None) == (live is None):
        raise OperatorFault("plan needs either a file or --live")
    if scenario is not None:
        return load_fleet(scenario)
    import asyncio

    from echo2d.bench.watch import status_once
    from echo2d.sim.live_fleet import fleet_of

    assert live is not None
    is_url = live.startswith(("http://", "https://"))
    find = _coordinator_at(None if is_url else Path(live), live if is_url else None, token_file)
    return fleet_of(asyncio.run(status_once(find)))


@main.command()
@click.argument("scenario", type=FILE)
@click.option("--peers", type=click.IntRange(1, 10_000), help="Of a broadcast, beside the seed, instead of the file's.")
@click.option("--bytes", "size", help="Of a broadcast's version, instead of the file's: 80MB, 1GiB.")
@click.option("--shape", type=click.Choice(["auto", "star", "chain"]), help="Of a broadcast's plan, likewise.")
@click.option("--hours", type=click.FloatRange(0, 8760, min_open=True), help="Of a fleet, instead of the file's.")
@click.option("--no-p2p", is_flag=True, help="Of a fleet: the learner's host sends versions to everybody itself.")
@click.option("--no-cost", is_flag=True, help="Of a fleet: workers are taken in random order.")
@click.option("--no-delta", is_flag=True, help="Of a fleet: versions go out in full.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a line for each figure.")
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
    as_json: bool,
) -> None:
    """Play a fleet for hours, or one broadcast, in virtual time: whichever the TOML file describes.

    A fleet (a file with [[fleet]], see `echo2d plan`): the real leases, groups, gates, capacity and activation, with
    workers that come and go. A broadcast (a file with [[peers]]): the real relays and planner on its links.
    """
    import time

    from echo2d.sim.fleet import is_fleet

    began, cpu_began = time.perf_counter(), time.process_time()
    if is_fleet(scenario):
        if peers is not None or size is not None or shape is not None:
            raise OperatorFault("--peers, --bytes and --shape are for broadcasts; this file describes a fleet")
        facts = _simulate_fleet(scenario, hours, (not no_p2p, not no_cost, not no_delta))
    else:
        if hours is not None or no_p2p or no_cost or no_delta:
            raise OperatorFault("--hours, --no-p2p, --no-cost and --no-delta are for fleets; this file has none")
        facts = _simulate_broadcast(scenario, peers=peers, bytes=size, shape=shape)
    facts = {**facts, "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else f"{value}"
        click.echo(f"{name:20}{shown}")


def _simulate_fleet(scenario: Path, hours: float | None, parts: tuple[bool, bool, bool]) -> dict[str, Any]:
    from dataclasses import replace

    from echo2d.sim.fleet import load_fleet
    from echo2d.sim.fleet_world import FleetWorld
    from echo2d.sim.provision import Ablation

    fleet = load_fleet(scenario)
    if hours is not None:
        fleet = replace(fleet, simulate=replace(fleet.simulate, hours=hours))
    gc.disable()  # a fifth of the time; what a day leaves behind in circles is little
    with _progress() as tell:
        return FleetWorld(fleet, Ablation(*parts)).run(tell)


def _simulate_broadcast(scenario: Path, **instead: Any) -> dict[str, Any]:
    from echo2d.sim.scenario_file import load_scenario
    from echo2d.sim.world import CHECK_EVERY_LONG, StuckError, World

    world = World(load_scenario(scenario, **instead), check_every=CHECK_EVERY_LONG)
    with _progress() as tell:
        try:
            return world.run(tell).facts()
        except StuckError as error:
            raise Fault(str(error)) from error


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on a terminal: is told the share that is done."""
    with click.progressbar(length=1000, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        yield lambda share: bar.update(max(0, int(1000 * min(share, 1.0)) - bar.pos))


@main.group()
def bench() -> None:
    """Measure the real thing under a bounded load."""


@bench.command("broadcast")
@click.option("--peers", type=click.IntRange(1, 64), default=8, show_default=True, help="Workers beside the seed.")
@click.option("--uplink", default="100mbit", show_default=True, help="Of the seed and of every peer.")
@click.option("--uplinks", help="SEED,P1,P2,... in Mbit/s, instead of --peers and --uplink.")
@click.option("--downlink", help="Of every peer; the fastest uplink if left out.")
@click.option("--rtt", default="50ms", show_default=True, help="Between any two.")
@click.option("--loss", type=click.FloatRange(0, 0.5), default=0.0, show_default=True, help="Share of packets.")
@click.option("--bytes", "size", default="64MiB", show_default=True, help="Of a version.")
@click.option("--shape", type=click.Choice(["auto", "star", "chain"]), default="auto", show_default=True, help="Plans.")
@click.option("--seed", "rng_seed", type=int, default=0, show_default=True, help="Of the versions' random bytes.")
@click.option("--scenario", type=FILE, help="TOML file instead of all the above.")
@click.option("--undialable", type=click.FloatRange(0, 1), default=0.0, help="Share of the peers behind NAT.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Warm ones, after a cold one.")
@click.option("--warm-up", type=int, default=4, show_default=True, help="Rounds between them that do not count.")
@click.option("--queue", default="50ms", show_default=True, help="What is queued before a link at most.")
@click.option("--kill", type=float, help="SIGKILL for the busiest fast relay at this share of a version.")
@click.option("--partition", type=float, help="Silence from it, likewise, instead.")
@click.option("--corrupt", type=float, help="The share of its frames that it spoils.")
@click.option("--tls", is_flag=True, help="On all connections, as off loopback; for comparison without, if left out.")
@click.option("--versions", type=DIRECTORY, help="Real ones (tools/rl_updates.py), as deltas, repeated up to --bytes.")
@click.option("--against", default="", help="Also measure: star,libtorrent,aria2; after each warm round once.")
@click.option("--run-dir", type=DIRECTORY, help="Kept with all logs; a temporary one if left out.")
@click.option("--plot", type=FILE, help="Also measure 2, 4, 8, ... peers, and draw T_verify (.png, .svg, .pdf).")
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
    from echo2d.bench.broadcast import Broadcast, run_broadcast, with_undialable
    from echo2d.bench.broadcast_plot import run_plot
    from echo2d.quantities import parse_seconds
    from echo2d.sim.scenario_file import load_scenario, scenario_of

    trouble = {
        name: options.pop(name) for name in ("kill", "partition", "corrupt", "tls", "versions", "run_dir", "as_json")
    }
    played = scenario_of(**options) if scenario is None else load_scenario(scenario)
    rivals = tuple(filter(None, against.split(",")))
    played = with_undialable(played, undialable)
    wanted = Broadcast(played, rounds, warm_up, parse_seconds(queue), against=rivals, **trouble)
    sys.exit(run_broadcast(wanted) if plot is None else run_plot(wanted, plot))


@bench.command("coordinator")
@click.option(
    "--workers", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Scripted workers that connect."
)
@click.option(
    "--rate", type=click.FloatRange(0.1, 2000), default=200, show_default=True, help="Trajectories per second of all."
)
@click.option("--tokens", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Of a trajectory.")
@click.option("--slots", type=click.IntRange(1, 256), default=4, show_default=True, help="Of a worker.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60, show_default=True, help="Time measured.")
@click.option(
    "--shape",
    type=click.Choice(["auto", "star", "chain"]),
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
    from echo2d.bench.coordinator import run_coordinator_bench
    from echo2d.bench.load import Load

    sys.exit(run_coordinator_bench(Load(**options), as_json=as_json))


@bench.command("delta")
@click.argument("old", type=DIRECTORY)
@click.argument("new", type=DIRECTORY)
@click.option("--runs", type=int, default=5, show_default=True, help="In which the speeds are measured.")
@click.option("--against", default="", help="Also encode as others do: xor,index-value,zstd.")
@click.option("--out", type=DIRECTORY, help="Where NEW is built again, kept; a temporary folder if left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def bench_delta(*, against: str, as_json: bool, **options: Any) -> None:
    """Measure what it takes to send the snapshot NEW to who has OLD, and build it again from that.

    Exit code 1: what was built is not NEW, byte for byte.
    """
    from echo2d.bench.delta import DeltaBench, run_delta_bench

    sys.exit(run_delta_bench(DeltaBench(against=tuple(filter(None, against.split(","))), **options), as_json=as_json))
