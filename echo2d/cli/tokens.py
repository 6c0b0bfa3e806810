"""`echo2d token`: the credentials of a run."""

import json
from pathlib import Path
from typing import Any

import click

from echo2d.cli.parts import DIRECTORY, FILE, FullSentences, json_option, run_dir_option
from echo2d.errors import OperatorFault

SHOWN_IDS = 3  # The list names this many machines of a token; --json has all.
SECONDS_PER_UNIT = {"d": 86400, "h": 3600, "min": 60}


@click.group(cls=FullSentences)
def token() -> None:
    """Credentials of a run: create, list, change, revoke.

    These commands work on the run directory, whether or not the coordinator is running.
    """


@token.command("create")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["worker", "learner", "gateway", "agent", "tinker", "viewer", "operator"]),
    required=True,
    help="What the holder may do: join, train, generate, play, call the Tinker API, look, or cordon and drain workers.",
)
@run_dir_option
@click.option(
    "--url",
    help="URL at which the holder reaches the coordinator: https://HOST:PORT, or several with commas between"
    " them, which are tried in turn. Default: the address of the coordinator that runs now.",
)
@click.option("--out", type=FILE, help="Token file to write. Default: NAME.token.")
@click.option(
    "--max-workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of machines that may join with the token.",
)
@click.option(
    "--expires",
    default="30d",
    show_default=True,
    help="Lifetime, such as 90s, 12h or 30d; or never. A machine that joins in this time stays a member.",
)
def token_create(
    name: str,
    role: Any,
    run_dir: Path,
    url: str | None,
    out: Path | None,
    *,
    max_workers: int,
    expires: str,
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
    """Show all credentials of a run, without their secrets.

    With --json, each worker's token also has what its machines have earned since the run began.
    """
    from echo2d.runtime.run_dir.tokens import earned_of_tokens, list_tokens

    rows = list_tokens(run_dir)
    if as_json:
        earned = earned_of_tokens(run_dir)
        click.echo(json.dumps([{**row, "earned": earned.get(row["name"])} for row in rows]))
        return
    cells = [("NAME", "ROLE", "STATE", "EXPIRES", "MACHINES", "LAST USE"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of `list_tokens`, formatted for people."""
    expires, used, most = row["expires_in_s"], row["last_use_s_ago"], row["max_workers"]
    when = (
        "never" if expires is None else _ago(-expires) if expires <= 0 else f"in {_span(expires)}"
    )
    joined = [f"{len(row['peers'])}" if most is None else f"{len(row['peers'])} of {most}"]
    joined += [peer[:8] for peer in row["peers"][:SHOWN_IDS]]
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
    """The duration in the largest unit that fits at least twice; if there is none, in seconds."""
    for unit, length in SECONDS_PER_UNIT.items():
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


@token.command("change")
@click.argument("name")
@run_dir_option
@click.option("--expires", help="New lifetime from now, such as 12h or 30d; or never.")
@click.option(
    "--new-secret", is_flag=True, help="Make a new secret, and write the token file again."
)
@click.option(
    "--url", help="With --new-secret: URL for the token file. Default: the URL of the old file."
)
@click.option(
    "--out", type=FILE, help="With --new-secret: token file to write. Default: NAME.token."
)
def token_change(
    name: str,
    run_dir: Path,
    expires: str | None,
    *,
    new_secret: bool,
    url: str | None,
    out: Path | None,
) -> None:
    """Let the credential NAME expire later or earlier, or give it a new secret.

    When the secret changes, machines that have joined stay members, even if they restart with the old file. The old
    secret lets no new machine join, and gives no access to holders of other roles. To shut out the machines too, use
    `echo2d token revoke`, with or without --delete.
    """
    from echo2d.runtime.run_dir.tokens import extend_token, rotate_token

    if expires is None and not new_secret:
        raise OperatorFault("token change: expected --expires, --new-secret or both")
    if not new_secret and (url is not None or out is not None):
        raise OperatorFault(
            "token change: --url and --out need --new-secret, which writes the file"
        )
    if expires is not None:
        extend_token(run_dir, name, expires)
        click.echo(
            f"{name} never expires" if expires == "never" else f"{name} expires in {expires}"
        )
    if new_secret:
        path = out or Path(f"{name}.token")
        peers = rotate_token(run_dir, name, url=url, out=path)
        click.echo(f"wrote {path}; machines that have joined with {name} stay members: {peers}")


@token.command("new-authority")
@run_dir_option
@click.option(
    "--lost",
    is_flag=True,
    help="The key was lost or stolen: write new token files. A box with its new file no longer obeys the old key.",
)
@click.option("--url", help="With --lost: URL for the token files, https://HOST:PORT.")
@click.option(
    "--out",
    type=DIRECTORY,
    default="new-tokens",
    show_default=True,
    help="With --lost: folder for the token files.",
)
def token_new_authority(run_dir: Path, *, lost: bool, url: str | None, out: Path) -> None:
    """Change the key that signs for the run, while its coordinator is stopped.

    The old key signs the new one, so boxes accept it when they next connect, and keep their token files.
    A thief who has the old key could also sign a new one. So with --lost the old key signs nothing: each box needs the
    new token file that this command writes.
    """
    from echo2d.runtime.run_dir.tokens import new_authority

    written = new_authority(run_dir, lost=lost, url=url, out=out)
    for path in written:
        click.echo(f"wrote {path}")
    click.echo(
        "the authority was changed; start the coordinator, then make a backup: older backups have the old key"
        + ("; copy its new file to each box and start its worker again with it" if lost else "")
    )


@token.command("revoke")
@click.argument("name")
@run_dir_option
@click.option("--delete", is_flag=True, help="Remove NAME and all machines that joined with NAME.")
def token_revoke(name: str, run_dir: Path, *, delete: bool) -> None:
    """Revoke the credential NAME. Its open sessions end within a second.

    Without --delete the credential stays in the list, and its holder gets the answer that it was revoked.
    """
    from echo2d.runtime.run_dir.tokens import delete_token, revoke_token

    if delete:
        peers = delete_token(run_dir, name)
        click.echo(f"deleted {name}; machines that lose access: {peers}")
    else:
        revoke_token(run_dir, name)
        click.echo(f"revoked {name}")
