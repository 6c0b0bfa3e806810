"""`echo2d audit`: what the audit of a run found, and pardons."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from echo2d.cli.parts import FullSentences, json_option, run_dir_option


@click.group(cls=FullSentences)
def audit() -> None:
    """See what the audit found about workers, and pardon convicted ones.

    The audit itself runs beside the coordinator, if its config has [audit] enabled = true. These
    commands work on the run directory, whether or not the coordinator is running.
    """


@audit.command("show")
@click.argument("worker", required=False)
@run_dir_option
@json_option("Print one JSON object.")
def audit_show(worker: str | None, run_dir: Path, *, as_json: bool) -> None:
    """Show what was found about WORKER (its name, or the beginning of its id), or about all."""
    from echo2d.runtime.audit.report import read_reports
    from echo2d.views.audit import print_report, print_reports

    reports = read_reports(run_dir, worker)
    if as_json:
        click.echo(json.dumps({"workers": [asdict(report) for report in reports]}))
    elif worker is None:
        print_reports(reports)
    else:
        for report in reports:
            print_report(report)


@audit.command("pardon")
@click.argument("worker")
@run_dir_option
def audit_pardon(worker: str, run_dir: Path) -> None:
    """Let the convicted WORKER (its name or id) join again. Its owner starts `echo2d join` again."""
    from echo2d.runtime.audit.report import pardon

    click.echo(f"pardoned {pardon(run_dir, worker)}")
