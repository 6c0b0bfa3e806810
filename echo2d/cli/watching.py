"""`echo2d status`, `samples` and `demo`: look at a run, or watch a small one on this machine."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.parts import (
    DIRECTORY,
    coordinator_at,
    coordinator_options,
    end,
    json_option,
    run_dir_option,
)
from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.views.watch import Find


@click.command()
@coordinator_options
@json_option("Print everything as one JSON object; with --watch, one per line.")
@click.option(
    "--scores",
    is_flag=True,
    help="Show only the scores of each version on held-out questions, with standard errors.",
)
@click.option("--watch", "again", is_flag=True, help="Refresh the display until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="With --watch: seconds between two refreshes.",
)
@click.option(
    "--worker",
    "only",
    default="",
    metavar="TEXT",
    help="Show only workers whose name, id or state contains TEXT.",
)
def status(
    run_dir: Path | None,
    url: str | None,
    token_file: Path | None,
    *,
    as_json: bool,
    scores: bool,
    again: bool,
    interval: float,
    only: str,
) -> None:
    """Show what a running coordinator is doing, and its alerts.

    With a worker's token it shows only the boxes that enrolled with that token. The scores in a run
    directory can be shown without a running coordinator.
    """
    import asyncio

    from echo2d.views.own_status import is_own, print_own_status
    from echo2d.views.status import narrowed, print_status
    from echo2d.views.watch import Screen, status_once, watch

    find = coordinator_at(run_dir, url, token_file)
    if scores:
        if again or only:
            raise OperatorFault("status: --scores cannot be used with --watch or --worker")
        _show_scores(run_dir, find, as_json=as_json)
        return
    if again:
        with suppress(KeyboardInterrupt):
            asyncio.run(watch(find, Screen(as_json=as_json, only=only), interval_s=interval))
        return
    facts = asyncio.run(status_once(find))
    meant = narrowed(facts, only, must=True)
    if as_json:
        click.echo(json.dumps(meant))
    elif is_own(facts):
        print_own_status(meant)
    else:
        print_status(facts, only=only)


def _show_scores(run_dir: Path | None, find: "Find", *, as_json: bool) -> None:
    """Show the scores that are in the run directory, for which no coordinator must run, or those of a coordinator
    elsewhere.
    """
    import asyncio

    from echo2d.client import Evaluation
    from echo2d.runtime.run_dir.results import find_scores
    from echo2d.views.results import ask_evaluations, print_evaluations

    if run_dir is None:
        found = asyncio.run(ask_evaluations(find))
    else:
        found = [Evaluation(**each) for each in find_scores(run_dir)]
    if as_json:
        for each in found:
            click.echo(json.dumps(asdict(each)))
    else:
        print_evaluations(found)


@click.command()
@run_dir_option
@click.option("--step", type=click.IntRange(1), help="Show only the groups of this train step.")
@click.option("--worst", is_flag=True, help="Show the groups with the lowest mean reward first.")
@click.option(
    "--filtered",
    is_flag=True,
    help="Show only groups that were dropped because all their rewards were the same.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Show at most this many groups.",
)
@json_option("Print one JSON object per group.")
def samples(
    run_dir: Path, *, step: int | None, worst: bool, filtered: bool, count: int, as_json: bool
) -> None:
    """Show the newest groups of a run: their prompts, answers, rewards and versions.

    It reads the sample log in the run directory, whether or not the coordinator is running.
    """
    from echo2d.runtime.coordinator.sample_log import read_samples
    from echo2d.views.results import print_groups

    found = read_samples(run_dir, step=step, filtered=filtered, worst=worst)[:count]
    if as_json:
        for line in found:
            click.echo(json.dumps(line))
    else:
        print_groups(found)


@click.command()
@click.option(
    "--steps",
    type=int,
    default=None,
    help="Train steps. Only with the default number does the demo require a final accuracy.",
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
    help="What to train on: a task of one answer, an environment of two turns, or the same "
    "environment played by an outside program (agents).",
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
