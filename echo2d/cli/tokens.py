"""`echo2d token`: the credentials of a run."""

import json
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import FILE, FullSentences, json_option, run_dir_option

SHOWN_IDS = 3  # machines of a token in the list; --json has all
SHOWN_ID_CHARS = 8
SECONDS_PER_UNIT = {"d": 86400, "h": 3600, "min": 60}


@click.group(cls=FullSentences)
def token() -> None:
    """Create, list and end the credentials of a run.

    These commands work on the run directory, whether or not the coordinator is running.
    """


@token.command("create")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["worker", "learner", "gateway", "agent", "viewer", "operator"]),
    required=True,
    help="What the holder may do: join, train, generate, play, look, or cordon and drain workers.",
)
@run_dir_option
@click.option(
    "--url",
    help="URL at which the holder reaches the coordinator: https://HOST:PORT. Default: where the"
    " coordinator listens that runs now.",
)
@click.option("--out", type=FILE, help="Token file to write. Default: NAME.token.")
@click.option("--force", is_flag=True, help="Replace a token file that is there.")
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
    help="Lifetime, such as 90s, 12h or 30d; or never. A machine that has joined by then stays.",
)
def token_create(
    name: str,
    role: Any,
    run_dir: Path,
    url: str | None,
    out: Path | None,
    *,
    force: bool,
    max_workers: int,
    expires: str,
) -> None:
    """Create the credential NAME and write its token file (mode 0600)."""
    from echo2d.runtime.run_dir.tokens import create_token

    path = out or Path(f"{name}.token")
    create_token(
        run_dir,
        name,
        role=role,
        url=url,
        out=path,
        max_workers=max_workers,
        expires=expires,
        force=force,
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
    cells = [("NAME", "ROLE", "STATE", "EXPIRES", "MACHINES", "LAST USE"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of `list_tokens` for people."""
    expires, used, most = row["expires_in_s"], row["last_use_s_ago"], row["max_workers"]
    when = (
        "never" if expires is None else _ago(-expires) if expires <= 0 else f"in {_span(expires)}"
    )
    joined = [f"{len(row['peers'])}" if most is None else f"{len(row['peers'])} of {most}"]
    joined += [peer[:SHOWN_ID_CHARS] for peer in row["peers"][:SHOWN_IDS]]
    joined += ["..."] if len(row["peers"]) > SHOWN_IDS else []
    machines = " ".join(joined) if row["role"] == "worker" else "-"
    return (
        row["name"],
        row["role"],
        row["state"],
        when,
        machines,
        "-" if used is None else _ago(used),
    )


def _ago(seconds: float) -> str:
    return f"{_span(seconds)} ago" if seconds >= SECONDS_PER_UNIT["min"] else "just now"


def _span(seconds: float) -> str:
    """In the largest unit of which there are two or more, if any."""
    for unit, length in SECONDS_PER_UNIT.items():
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


@token.command("extend")
@click.argument("name")
@run_dir_option
@click.option(
    "--expires", required=True, help="New lifetime from now, such as 12h or 30d; or never."
)
def token_extend(name: str, run_dir: Path, expires: str) -> None:
    """Let the credential NAME expire later, or earlier. Its file stays as it is."""
    from echo2d.runtime.run_dir.tokens import extend_token

    extend_token(run_dir, name, expires)
    click.echo(f"{name} never expires" if expires == "never" else f"{name} expires in {expires}")


@token.command("rotate")
@click.argument("name")
@run_dir_option
@click.option("--url", help="URL for the token file. Default: that of the old one.")
@click.option("--out", type=FILE, help="Token file to write. Default: NAME.token.")
@click.option("--force", is_flag=True, help="Replace a file that is there and not this token's.")
def token_rotate(
    name: str, run_dir: Path, url: str | None, out: Path | None, *, force: bool
) -> None:
    """Give the credential NAME a new secret and write its token file anew.

    Machines that have joined stay members, also when they are started again with the old file. The
    old secret enrols no new machine, and does nothing for any other role. To end the machines too,
    delete the token.
    """
    from echo2d.runtime.run_dir.tokens import rotate_token

    path = out or Path(f"{name}.token")
    peers = rotate_token(run_dir, name, url=url, out=path, force=force)
    click.echo(f"wrote {path}; machines that have joined with {name} stay members: {peers}")


@token.command("revoke")
@click.argument("name")
@run_dir_option
def token_revoke(name: str, run_dir: Path) -> None:
    """Revoke the credential NAME. Its open sessions end within a second.

    It stays in the list until `echo2d token delete`, so that its holder is told that it was revoked.
    """
    from echo2d.runtime.run_dir.tokens import revoke_token

    revoke_token(run_dir, name)
    click.echo(f"revoked {name}")


@token.command("delete")
@click.argument("name")
@run_dir_option
def token_delete(name: str, run_dir: Path) -> None:
    """Delete the credential NAME and all that joined with it. Open sessions end within a second."""
    from echo2d.runtime.run_dir.tokens import delete_token

    peers = delete_token(run_dir, name)
    click.echo(f"deleted {name}; machines that lose access: {peers}")
