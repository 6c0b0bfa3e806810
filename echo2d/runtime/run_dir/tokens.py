"""The commands of `echo2d token` for the tokens of a run, and the tokens of the coordinator's own host.

A token file has the only copy of a secret, so none is ever overwritten without an order.
"""

import re
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from echo2d.core.coordinator.own_status import earned_together
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import TokenFile, TokenRole, read_token_file, write_token_file
from echo2d.net.security.urls import CoordinatorUrls
from echo2d.runtime.run_dir.access_table import AccessTable, TokenRow
from echo2d.runtime.run_dir.authority import change_authority, known_authority, open_authority
from echo2d.runtime.run_dir.operator_log import note_order
from echo2d.runtime.run_dir.run_directory import (
    ACCESS_FILE,
    LEDGER_FILE,
    RunDirectory,
    existing_run,
    find_coordinator,
    in_use,
)
from echo2d.store.ledger import read_earned

OWN_TOKENS = "own-"  # with the role behind it, the name of one of this host's own tokens
DURATION_S_MAX = 100 * 365 * 86400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(text: str) -> float:
    """Seconds of "30d", "12h", "10m" or "45s"."""
    matched = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if matched is None:
        raise OperatorFault(
            f"--expires: expected a duration such as 30d, 12h or 10m, or never; found {text!r}"
        )
    duration_s = float(matched[1]) * _UNITS_S[matched[2]]
    if duration_s > DURATION_S_MAX:
        raise OperatorFault(f'--expires: expected at most 100 years, or "never"; found {text}')
    return duration_s


def create_token(
    run_dir: Path,
    name: str,
    *,
    role: str,
    url: str | None,
    out: Path,
    max_workers: int | None,
    expires: str,
) -> None:
    """Create a token of an existing run and write its file to `out`.

    url: None: the URL at which the run's coordinator listens now. expires: a duration from now, or
    "never".
    """
    run = existing_run(run_dir)
    url = str(CoordinatorUrls(url)) if url is not None else _url_of(run_dir)
    _require_free(out)
    table = AccessTable(run)
    token = table.create(name, role, max_workers=max_workers, expires_at=expires_at(expires))
    try:
        write_token_file(out, replace(token, url=url))
    except OperatorFault:
        # Without its file the secret is lost, and the name must stay free.
        table.discard(name)
        raise
    note_order(run_dir, f"token create ({role})", name)


def rotate_token(run_dir: Path, name: str, *, url: str | None, out: Path) -> int:
    """Give a token a new secret and write its file again; returns how many machines are enrolled.

    url: None: that of the token's old file, or where the coordinator listens. The token's own file
    is replaced, but never another file.
    """
    run = existing_run(run_dir)
    old = _file_of(out, run, name)
    if old is None:
        _require_free(out)
    found = str(CoordinatorUrls(url)) if url is not None else old.url if old else ""
    found = found or _url_of(run_dir)
    table = AccessTable(run)
    table.rotate(name, keep=lambda token: write_token_file(out, replace(token, url=found)))
    note_order(run_dir, "token change --new-secret", name)
    return len(table.peers_of(name))


def extend_token(run_dir: Path, name: str, expires: str) -> None:
    """Let a token expire this long after now. expires: a duration, or "never"."""
    AccessTable(existing_run(run_dir)).extend(name, expires_at(expires))
    note_order(run_dir, f"token change --expires {expires}", name)


def revoke_token(run_dir: Path, name: str) -> None:
    """Revoke a token of this run. OperatorFault: there is no such run or token."""
    AccessTable(existing_run(run_dir)).revoke(name)
    note_order(run_dir, "token revoke", name)


def new_authority(run_dir: Path, *, lost: bool, url: str | None, out: Path) -> list[Path]:
    """Change the run's authority while no coordinator runs; returns the token files written into `out`.

    lost: the old key was lost or stolen, so it does not sign the new one. Every valid token gets a new secret
    and a new file, and a box with the new file obeys nothing that the old key signs. url: the coordinator's URL in
    these files.
    """
    if not (run_dir / ACCESS_FILE).exists():
        raise OperatorFault(f"{run_dir} is not a run directory: it has no {ACCESS_FILE}")
    if in_use(run_dir):
        raise OperatorFault(
            f"a coordinator runs in {run_dir}: stop it first, and start it again after"
        )
    if not lost:
        change_authority(run_dir, open_authority(run_dir), named=True)
        note_order(run_dir, "token authority", "")
        return []
    if url is None:
        raise OperatorFault("--url: expected https://HOST:PORT, for the new token files")
    reached = str(CoordinatorUrls(url))
    out.mkdir(parents=True, exist_ok=True)
    change_authority(run_dir, known_authority(run_dir), named=False)
    table, written = AccessTable(RunDirectory(run_dir)), list[Path]()
    # The token files of this host are written by each start, so they are left out.
    own = {OWN_TOKENS + role for role in get_args(TokenRole)}
    for token in table.tokens():
        path = out / f"{token.name}.token"
        if _state(token, time.time()) == "valid" and token.name not in own:
            table.rotate(token.name, keep=partial(_write_at, path, reached))
            written.append(path)
    note_order(run_dir, "token authority --lost", f"{len(written)} tokens")
    return written


def _write_at(path: Path, url: str, token: TokenFile) -> None:
    write_token_file(path, replace(token, url=url))


def delete_token(run_dir: Path, name: str) -> int:
    """Delete a token and its peers; returns how many machines lose access."""
    table = AccessTable(existing_run(run_dir))
    peers = len(table.peers_of(name))
    if not table.retire(name):
        raise OperatorFault(
            f"there is no token named {name}; `echo2d token list` shows those of the run"
        )
    note_order(run_dir, "token revoke --delete", name)
    return peers


def list_tokens(run_dir: Path) -> list[dict[str, Any]]:
    """All tokens as rows for JSON, without the secrets. last_use_s_ago: None: not known."""
    now_s = time.time()
    table = AccessTable(existing_run(run_dir))
    return [
        {
            "name": token.name,
            "role": token.role,
            "max_workers": token.max_workers,
            "expires_in_s": None if token.expires_at is None else round(token.expires_at - now_s),
            "state": _state(token, now_s),
            "peers": table.peers_of(token.name),
            "last_use_s_ago": None
            if (used := table.last_use(token.name)) is None
            else max(0, round(now_s - used)),
        }
        for token in table.tokens()
    ]


def earned_of_tokens(run_dir: Path) -> dict[str, dict[str, int]]:
    """What the machines of each worker's token have earned (`EarnedStatus`), by the token's name.

    OperatorFault: the ledger is of another format.
    """
    run = existing_run(run_dir)
    table, by_worker = AccessTable(run), {w.worker: w for w in read_earned(run.path / LEDGER_FILE)}
    return {
        token.name: asdict(
            earned_together(w for p in table.peers_of(token.name) if (w := by_worker.get(p)))
        )
        for token in table.tokens()
        if token.role == "worker"
    }


def _state(token: TokenRow, now_s: float) -> str:
    fault = token.fault(now_s) or token.expiry(now_s)
    return fault.code if fault else "valid"


def expires_at(expires: str) -> float | None:
    """Unix time of a duration from now; None: "never"."""
    return None if expires == "never" else time.time() + parse_duration_s(expires)


def _url_of(run_dir: Path) -> str:
    """The URL of the coordinator that runs here. OperatorFault: none runs."""
    try:
        return find_coordinator(run_dir)[0]
    except OperatorFault as fault:
        raise OperatorFault(f"{fault}; start it, or give --url https://HOST:PORT") from fault


def _require_free(out: Path) -> None:
    if out.exists():
        raise OperatorFault(
            f"{out} exists already, and may hold the only copy of a secret: choose another --out, or "
            "remove it first"
        )


def _file_of(out: Path, run: RunDirectory, name: str) -> TokenFile | None:
    """The token's own file, if it is at this path."""
    try:
        found = read_token_file(out)
    except OperatorFault:
        return None
    return found if (found.name, found.run_id) == (name, run.run_id) else None


def own_token(run: RunDirectory, access: AccessTable, role: TokenRole, url: str) -> Path:
    """Write the token file of this host's own learner or viewer. Returns the file's path.

    A new token is made if the file is missing, damaged, or no longer gives access; the URL in the file is always
    updated.
    """
    path, name = run.token_path(role), OWN_TOKENS + role
    token = _file_of(path, run, name)
    if token is None or not access.accepts(token, now_s=time.time()):
        # The secret of an older token is lost with its file.
        access.discard(name)
        token = access.create(name, role)
    write_token_file(path, replace(run.believed(token), url=url))
    return path
