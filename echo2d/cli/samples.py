"""`echo2d samples`: prompts, answers and rewards of a run, as text."""

import json
from pathlib import Path

import click

from echo2d.cli.parts import json_option, run_dir_option


@click.command()
@run_dir_option
@click.option("--step", type=click.IntRange(1), help="Only the groups of this train step.")
@click.option("--worst", is_flag=True, help="The groups with the lowest mean reward first.")
@click.option(
    "--filtered", is_flag=True, help="Only groups that were filtered: all rewards were the same."
)
@click.option(
    "--count", type=click.IntRange(1), default=5, show_default=True, help="Groups at most."
)
@json_option("Print one JSON object per group.")
def samples(
    run_dir: Path, *, step: int | None, worst: bool, filtered: bool, count: int, as_json: bool
) -> None:
    """Show the newest groups of a run: their prompts, answers, rewards and versions.

    It reads the sample log in the run directory, whether or not the coordinator is running.
    """
    from echo2d.runtime.coordinator.sample_log import read_samples
    from echo2d.views.samples import print_groups

    found = read_samples(run_dir, step=step, filtered=filtered, worst=worst)[:count]
    if as_json:
        for line in found:
            click.echo(json.dumps(line))
    else:
        print_groups(found)
