"""`echo2d token`: the credentials of a run."""

import json
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import FILE, json_option, run_dir_option


@click.group()
def token() -> None:
    """Create, list and revoke the credentials of a run.

    These commands work on the run directory, whether or not the coordinator is running.
    """


@token.command("create")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["worker", "learner", "gateway", "agent", "viewer"]),
    required=True,
    help="What the holder may do: join, train, generate, or look.",
)
@run_dir_option
@click.option(
    "--url",
    required=True,
    help="URL at which the holder reaches the coordinator: https://HOST:PORT.",
)
@click.option("--out", type=FILE, help="Token file to write. Default: NAME.token.")
@click.option(
    "--max-workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of machines that may join with it.",
)
@click.option(
    "--expires",
    default="30d",
    show_default=True,
    help="Lifetime, such as 90s, 12h or 30d; or never.",
)
def token_create(
    name: str, role: Any, run_dir: Path, url: str, out: Path | None, max_workers: int, expires: str
) -> None:
    """Create the credential NAME and write its token file (mode 0600)."""
    from echo2d.runtime.run_dir.tokens import create_token

    path = out or Path(f"{name}.token")
    create_token(
        run_dir, name, role=role, url=url, out=path, max_workers=max_workers, expires=expires
    )
    click.echo(f"wrote {path}")


@token.command("list")
@run_dir_option
@json_option("Print one JSON array.")
def token_list(run_dir: Path, *, as_json: bool) -> None:
    """Show all credentials of a run, without their secrets."""
    from echo2d.runtime.run_dir.tokens import list_tokens

    rows = list_tokens(run_dir)
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo("  ".join(f"{key}={value}" for key, value in row.items()))


@token.command("revoke")
@click.argument("name")
@run_dir_option
def token_revoke(name: str, run_dir: Path) -> None:
    """Revoke the credential NAME. Its open sessions end within a second."""
    from echo2d.runtime.run_dir.tokens import revoke_token

    revoke_token(run_dir, name)
    click.echo(f"revoked {name}")
