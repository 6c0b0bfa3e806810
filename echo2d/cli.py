"""The `echo2d` command: parse, build the config, hand over. Heavy imports happen inside the commands (--help is fast).

Exit codes: 0 done, 1 failed while running, 2 the operator's mistake (one clear line, no traceback).
"""

import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from echo2d import __version__
from echo2d.errors import Fault, OperatorFault

FILE = click.Path(path_type=Path, dir_okay=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)
STATUS_S = 5.0  # somebody waits at the terminal for an answer


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


def _serve(program: Callable[[], Coroutine[Any, Any, int]]) -> None:
    from echo2d.runtime.daemon import run_daemon
    from echo2d.runtime.logs import start_logging

    start_logging()
    sys.exit(run_daemon(program))


@main.command()
@click.option("--config", type=FILE, help="TOML file; see --print-config.")
@click.option("--insecure", is_flag=True, help="Listen beyond loopback although there is no TLS yet.")
@click.option("--print-config", is_flag=True, help="Print every key with its default and meaning, and end.")
def coordinate(config: Path | None, *, insecure: bool, print_config: bool) -> None:
    """Run the coordinator of a run: members, plans, leases, batches, the seed of every broadcast."""
    from echo2d.config import CoordinatorConfig
    from echo2d.config import print_config as all_keys

    if print_config:
        click.echo(all_keys(), nl=False)
        return
    if config is None:
        raise OperatorFault("coordinate needs --config FILE (echo2d coordinate --print-config shows one)")
    loaded = CoordinatorConfig.load(config, {"coordinator.insecure": True} if insecure else None)
    from echo2d.runtime.coordinator import run_coordinator

    _serve(lambda: run_coordinator(loaded))


@main.command()
@click.argument("url", required=False)
@click.option("--token-file", type=FILE, help="Made by `echo2d token create NAME --role worker`.")
@click.option("--state-dir", type=DIRECTORY, help="Where this worker keeps its key, frames and snapshots.")
@click.option("--config", type=FILE, help="TOML file whose [worker] table holds what flags do not.")
@click.option("--name", help="Shown by status; the host's name if left out.")
@click.option("--engine", help="What generates: torch or fake.")
@click.option("--engines", type=int, help="Engines of this worker, one per GPU; they share one download.")
@click.option("--slots", type=int, help="Samples each engine runs at once.")
@click.option("--tokens-per-s-max", type=float, help="Generate at most so many tokens per second.")
@click.option("--threads", type=int, help="CPU threads of all torch engines.")
@click.option("--relay-only", is_flag=True, default=None, help="Forward versions, generate nothing.")
@click.option("--listen-host", help="Address the peer listener binds.")
@click.option("--listen-port", type=int, help="Port of the peer listener; 0: any free one.")
@click.option("--insecure", is_flag=True, default=None, help="Talk beyond loopback although there is no TLS yet.")
def join(config: Path | None, **flags: Any) -> None:
    """Join a run as a worker: receive versions, pass them on, make rollouts. URL is the coordinator's."""
    from echo2d.config import WorkerConfig

    loaded = WorkerConfig.load(config, {key: value for key, value in flags.items() if value is not None})
    from echo2d.runtime.worker import run_worker

    _serve(lambda: run_worker(loaded))


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
@click.option("--url", required=True, help="How the holder reaches the coordinator: http://HOST:PORT.")
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
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
def status(run_dir: Path | None, url: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Show what a running coordinator is doing."""
    if run_dir is not None:
        from echo2d.runtime.tokens import find_coordinator

        url, token_file = find_coordinator(run_dir)
    if url is None or token_file is None:
        raise OperatorFault("status needs --run-dir, or --url and --token-file")
    import asyncio

    from echo2d.client import AsyncCoordinator

    async def ask() -> dict[str, Any]:
        async with AsyncCoordinator(url, token_file=token_file, timeout_s=STATUS_S) as coordinator:
            return await coordinator.status()

    facts = asyncio.run(ask())
    if as_json:
        click.echo(json.dumps(facts))
        return
    from echo2d.bench.live import print_status

    print_status(facts)


@main.command()
@click.option("--steps", type=int, default=None, help="Train steps; the accuracy bar holds for the default only.")
@click.option("--workers", type=click.IntRange(1, 16), default=3, show_default=True, help="Worker daemons to start.")
@click.option("--staleness", type=click.IntRange(0), default=2, show_default=True, help="S, in train steps.")
@click.option("--kappa", type=click.IntRange(1), default=1, show_default=True, help="Train steps per publish.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of model, prompts and sampling.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object instead of the table.")
@click.option("--run-dir", type=DIRECTORY, help="Kept with all logs; runs/demo-N if left out.")
def demo(steps: int | None, *, as_json: bool, **options: Any) -> None:
    """Watch a small language model get better: coordinator, workers and learner on this machine."""
    from echo2d.bench.demo import STEPS, Demo, run_demo

    sys.exit(run_demo(Demo(steps=STEPS if steps is None else steps, as_json=as_json, **options)))
