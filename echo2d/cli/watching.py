"""`echo2d status` and `echo2d demo`: looking at a run, of one's own or a small one."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import DIRECTORY, FILE, coordinator_at, end


@click.command()
@click.option("--run-dir", type=DIRECTORY, help="Of a coordinator on this host.")
@click.option("--url", help="Of a coordinator elsewhere; needs --token-file.")
@click.option("--token-file", type=FILE, help="A learner, gateway or viewer token.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Everything, as one JSON object; with --watch one a line.",
)
@click.option("--watch", "again", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
def status(
    run_dir: Path | None,
    url: str | None,
    token_file: Path | None,
    *,
    as_json: bool,
    again: bool,
    interval: float,
) -> None:
    """Show what a running coordinator is doing, and what is wrong."""
    import asyncio

    from echo2d.views.status import print_status
    from echo2d.views.watch import Screen, status_once, watch

    find = coordinator_at(run_dir, url, token_file)
    if again:
        with suppress(KeyboardInterrupt):
            asyncio.run(watch(find, Screen(as_json=as_json), interval_s=interval))
        return
    facts = asyncio.run(status_once(find))
    if as_json:
        click.echo(json.dumps(facts))
    else:
        print_status(facts)


@click.command()
@click.option(
    "--steps",
    type=int,
    default=None,
    help="Train steps; the accuracy bar holds for the default only.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 16),
    default=3,
    show_default=True,
    help="Worker daemons to start.",
)
@click.option(
    "--staleness", type=click.IntRange(0), default=2, show_default=True, help="S, in train steps."
)
@click.option(
    "--kappa", type=click.IntRange(1), default=1, show_default=True, help="Train steps per publish."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of model, prompts and sampling."
)
@click.option(
    "--chaos",
    is_flag=True,
    help="kill -9 workers again and again, and everything else at least once.",
)
@click.option(
    "--delta/--no-delta", default=True, help="Send versions as differences (default), or in full."
)
@click.option(
    "--json", "as_json", is_flag=True, help="End with one JSON object instead of the table."
)
@click.option("--run-dir", type=DIRECTORY, help="Kept with all logs; runs/demo-N if left out.")
def demo(steps: int | None, **options: Any) -> None:
    """Watch a small language model get better: coordinator, workers and learner on this machine."""
    from echo2d.demo.run import STEPS, Demo, run_demo

    end(run_demo(Demo(steps=STEPS if steps is None else steps, **options)))
