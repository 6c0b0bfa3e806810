"""`echo2d eval`: what each version scored on held-out questions."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from echo2d.cli.parts import DIRECTORY, FILE, coordinator_at, json_option


@click.command("eval")
@click.option("--run-dir", type=DIRECTORY, help="Run directory of a coordinator on this host.")
@click.option("--url", help="URL of a coordinator elsewhere; needs --token-file.")
@click.option(
    "--token-file", type=FILE, help="Token file with the role learner, gateway or viewer."
)
@click.option("--name", help="Only this [[eval]].")
@click.option("--version", type=click.IntRange(0), help="Only this version.")
@json_option("Print one JSON object per evaluation.")
def evaluations(
    run_dir: Path | None,
    url: str | None,
    token_file: Path | None,
    *,
    name: str | None,
    version: int | None,
    as_json: bool,
) -> None:
    """Show the scores of versions on held-out questions, with their standard errors."""
    import asyncio

    from echo2d.views.evaluations import ask_evaluations, print_evaluations

    found = [
        each
        for each in asyncio.run(ask_evaluations(coordinator_at(run_dir, url, token_file)))
        if name in (None, each.name) and version in (None, each.version)
    ]
    if as_json:
        for each in found:
            click.echo(json.dumps(asdict(each)))
    else:
        print_evaluations(found)
