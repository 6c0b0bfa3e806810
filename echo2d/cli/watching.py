"""`echo2d status`, `top` and `demo`: look at a run, or watch a small one on this machine."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import DIRECTORY, coordinator_at, coordinator_options, end, json_option


@click.command()
@coordinator_options
@json_option("Print everything as one JSON object; with --watch, one per line.")
@click.option("--watch", "again", is_flag=True, help="Refresh the display until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two refreshes of --watch.",
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
    """Show what a running coordinator is doing, and its alerts.

    With a worker's token it shows the boxes that enrolled with that token, and nothing of others.
    """
    import asyncio

    from echo2d.views.own_status import is_own, print_own_status
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
    elif is_own(facts):
        print_own_status(facts)
    else:
        print_status(facts)


@click.command()
@coordinator_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=2.0,
    show_default=True,
    help="Seconds between two refreshes.",
)
def top(run_dir: Path | None, url: str | None, token_file: Path | None, interval: float) -> None:
    """Show the workers of a run in a table: sort it, filter it, look into one of them.

    Arrow keys choose a worker and the column to sort by, / filters, Enter shows all of one, q quits.
    """
    import asyncio

    from echo2d.views.top import terminal_screen
    from echo2d.views.top import top as watch_workers

    find = coordinator_at(run_dir, url, token_file)

    async def watch_them() -> None:
        await watch_workers(find, terminal_screen(), interval_s=interval)

    with suppress(KeyboardInterrupt):
        asyncio.run(watch_them())


@click.command()
@click.option(
    "--steps",
    type=int,
    default=None,
    help="Train steps. The demo requires a final accuracy only with the default number.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 16),
    default=3,
    show_default=True,
    help="Worker daemons to start.",
)
@click.option(
    "--staleness",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="S: the oldest data allowed in a gradient, in train steps.",
)
@click.option(
    "--kappa",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Kappa: train steps per published version.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Random seed of the model, the prompts and the sampling.",
)
@click.option(
    "--task",
    type=click.Choice(["sort_digits", "two_turn_digits", "agents"]),
    default="sort_digits",
    show_default=True,
    help="What is trained: a task of one answer, an environment of two turns, or the same with tickets.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Kill workers (kill -9) again and again, and every other process at least once.",
)
@click.option(
    "--delta/--no-delta",
    default=True,
    help="Send versions as differences (the default), or in full.",
)
@json_option("Print one JSON object at the end instead of the table.")
@click.option(
    "--run-dir",
    type=DIRECTORY,
    help="Directory for the run and all its logs. Default: runs/demo-N.",
)
def demo(steps: int | None, **options: Any) -> None:
    """Train a small language model with a coordinator, workers and a learner on this machine."""
    from echo2d.demo.run import STEPS, Demo, run_demo

    end(run_demo(Demo(steps=STEPS if steps is None else steps, **options)))
