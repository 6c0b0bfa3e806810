"""The command `echo2d box-script`: what makes a fresh machine a worker."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2d.cli.daemons import join
from echo2d.cli.parts import FILE
from echo2d.errors import OperatorFault

if TYPE_CHECKING:
    from echo2d.runtime.box.script import BoxStart

# What the script says itself.
OWN = {"token_file": "--token-file", "state_dir": "--state-dir", "config": "--config"}


@click.command("box-script", context_settings={"ignore_unknown_options": True})
@click.argument("url")
@click.option(
    "--token-file",
    type=FILE,
    required=True,
    help="Token file of the box, made by `echo2d token create NAME --role worker`.",
)
@click.option(
    "--systemd",
    "start",
    flag_value="systemd",
    default=True,
    help="A script for root that installs and starts a service (the default).",
)
@click.option(
    "--onstart",
    "start",
    flag_value="onstart",
    help="A script that joins in the foreground, for containers without systemd.",
)
@click.option("--cloud-init", "start", flag_value="cloud-init", help="User data for cloud-init.")
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="What pip installs, such as git+https://HOST/REPO@COMMIT or the URL of a wheel. "
    "Default: the coordinator gives its own wheel.",
)
@click.option("--out", type=FILE, help="Write it to this file, which only you can read.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def box_script(
    url: str,
    token_file: Path,
    start: "BoxStart",
    source: str | None,
    out: Path | None,
    options: tuple[str, ...],
) -> None:
    """Print a script that installs echo2d on a box and joins the run.

    URL is the coordinator's, as the box reaches it. OPTIONS are those of `echo2d join`, such as
    `--engine sglang --engines 4`. The script holds the token's secret: whoever can read it can join
    in the box's place.
    """
    from echo2d.runtime.box.script import BoxJob, box_script, join_options, save, token_of_box

    wanted = _join_options(url, options)
    engine = None if wanted["relay_only"] else wanted["engine"] or "torch"
    token = token_of_box(token_file)
    job = BoxJob(url, token, join_options(engine or "", options), engine, source)
    text = box_script(job, start)
    if out is None:
        click.echo(text, nl=False)
        click.echo("echo2d: this script holds a secret: keep it from others", err=True)
        return
    save(out, text)
    click.echo(f"wrote {out}, which holds a secret (mode 0600)")


def _join_options(url: str, options: tuple[str, ...]) -> dict[str, Any]:
    """The options as `echo2d join` reads them. OperatorFault: it would not take them."""
    try:
        taken: dict[str, Any] = join.make_context("echo2d join", [url, *options]).params
    except click.UsageError as error:
        raise OperatorFault(f"echo2d join: {error.format_message()}") from error
    for name, option in OWN.items():
        if taken[name] is not None:
            raise OperatorFault(f"{option} cannot be among the options of the box")
    return taken
