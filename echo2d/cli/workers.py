"""`echo2d worker`: take workers out of service and back, also on their box, and see what the audit found."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import (
    DIRECTORY,
    FILE,
    RUN_FOLDER,
    FullSentences,
    coordinator_at,
    end,
    json_option,
    run_dir_option,
)
from echo2d.errors import OperatorFault


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the arguments that the three commands share."""
    decorators = (
        click.argument("workers", nargs=-1, metavar="WORKER..."),
        click.option(
            "--all", "everyone", is_flag=True, help="Choose all workers that are connected."
        ),
        click.option(
            "--run-dir", type=RUN_FOLDER, help="Run directory of a coordinator on this host."
        ),
        click.option("--url", help="URL of a coordinator elsewhere; needs --token-file."),
        click.option("--token-file", type=FILE, help="Token file with the role operator."),
        json_option("Print one JSON object with the outcome for each worker."),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


@click.group(cls=FullSentences)
def worker() -> None:
    """Workers of a run: cordon, uncordon, drain, pause, resume; see what the audit found about them."""


@worker.command()
@_options
def cordon(**options: Any) -> None:
    """Give WORKER (its name, or the beginning of its id) no new leases until
    `echo2d worker uncordon`.

    The worker finishes the samples that it holds, and still receives versions and passes them on. A
    cordon outlives restarts of the worker and of the coordinator.
    """
    _order("cordon", **options)


@worker.command()
@_options
def uncordon(**options: Any) -> None:
    """Let WORKER work again. A drain that has not ended is called off."""
    _order("uncordon", **options)


@worker.command()
@_options
@click.option("--no-wait", is_flag=True, help="Return at once; the drain goes on.")
@click.option(
    "--within",
    type=click.FloatRange(0.0),
    metavar="SECONDS",
    help="After this time, hand the remaining samples to other workers. Default: no limit.",
)
def drain(*, no_wait: bool, within: float | None, **options: Any) -> None:
    """Let WORKER (its name, or the beginning of its id) finish the samples that it holds, and end.

    Another worker is activated in its place. Its daemon ends with exit code 0, and it stays cordoned: if
    its service manager starts it again, it is idle until `echo2d worker uncordon`. Ctrl-C ends the waiting,
    not the drain. Exit code 1: a worker has not ended.
    """
    if no_wait:
        if within:
            raise OperatorFault("drain: --within says how long to wait; leave out --no-wait")
        _order("drain", hand_over=within == 0.0, **options)
    else:
        _drain(within, **options)


def _of_box(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of the commands that are typed on the box itself."""
    state_dir = click.option(
        "--state-dir", type=DIRECTORY, required=True, help="The worker's state directory."
    )
    return state_dir(json_option("Print one JSON object.")(command))


@worker.command()
@_of_box
def pause(state_dir: Path, *, as_json: bool) -> None:
    """Pause the worker of this box until `echo2d worker resume`: it frees its GPUs and waits.

    The command needs no token and no coordinator. The worker's samples go to other workers, with the
    tokens that it has written; that takes some seconds. A pause outlives restarts of the worker and of
    the box. The service keeps running, and holds no GPU memory.
    """
    _set_paused(state_dir, as_json=as_json, paused=True)


@worker.command()
@_of_box
def resume(state_dir: Path, *, as_json: bool) -> None:
    """Let the paused worker of this box work again, within its configured hours."""
    _set_paused(state_dir, as_json=as_json, paused=False)


def _set_paused(state_dir: Path, *, as_json: bool, paused: bool) -> None:
    from echo2d.runtime.worker.owner import set_paused

    set_paused(state_dir, paused=paused)
    if as_json:
        click.echo(json.dumps({"state_dir": str(state_dir), "paused": paused}))
    else:
        click.echo("paused: the worker leaves its GPUs within seconds" if paused else "resumed")


def _order(
    order: str,
    *,
    workers: tuple[str, ...],
    everyone: bool,
    run_dir: Path | None,
    url: str | None,
    token_file: Path | None,
    as_json: bool,
    hand_over: bool = False,
) -> None:
    import asyncio

    from echo2d.views.orders import give_orders

    find = coordinator_at(run_dir, url, token_file, role="operator")
    answers = asyncio.run(
        give_orders(find, workers, everyone=everyone, order=order, hand_over=hand_over)
    )
    if as_json:
        click.echo(json.dumps({"workers": answers}))
        return
    done = {"cordon": "is cordoned", "uncordon": "works again", "drain": "drains"}[order]
    for each in answers:
        away = "" if each["connected"] else " (it is not connected)"
        click.echo(f"{each['name']} {done}{away}; it holds {each['leased']} samples")


def _drain(
    within: float | None,
    *,
    workers: tuple[str, ...],
    everyone: bool,
    run_dir: Path | None,
    url: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    import asyncio

    from echo2d.views.orders import drain_and_wait

    find = coordinator_at(run_dir, url, token_file, role="operator")
    tell: Callable[[str], None] = (lambda _: None) if as_json else click.echo
    with suppress(KeyboardInterrupt):
        answers = asyncio.run(
            drain_and_wait(find, workers, everyone=everyone, within_s=within, tell=tell)
        )
        if as_json:
            click.echo(json.dumps({"workers": answers}))
        # `drain && destroy` must not destroy a box that still works.
        end(0 if all(each["outcome"] == "ended" for each in answers) else 1)
    click.echo("the drain goes on; `echo2d worker uncordon` calls it off", err=True)
    end(1)


@worker.command()
@click.argument("worker", required=False)
@run_dir_option
@click.option("--pardon", is_flag=True, help="Let the convicted WORKER join again.")
@json_option("Print one JSON object.")
def audit(worker: str | None, run_dir: Path, *, pardon: bool, as_json: bool) -> None:
    """Show what the audit found about WORKER (its name, or the beginning of its id), or about all.

    The audit itself runs beside the coordinator, if its config has [audit] enabled = true. This
    command works on the run directory, whether or not the coordinator is running. After a pardon, the
    worker's owner must start `echo2d join` again.
    """
    from echo2d.runtime.audit import audit_log
    from echo2d.views.results import print_report, print_reports

    if pardon:
        if worker is None:
            raise OperatorFault("audit: --pardon needs the name or the id of one worker")
        click.echo(f"pardoned {audit_log.pardon(run_dir, worker)}")
        return
    found = audit_log.read_reports(run_dir, worker)
    if as_json:
        click.echo(json.dumps({"workers": [asdict(each) for each in found]}))
    elif worker is None:
        print_reports(found)
    else:
        for each in found:
            print_report(each)
