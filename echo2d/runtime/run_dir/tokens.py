"""What `echo2d token` does: create, list and revoke the tokens of a run; and the host's own tokens."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.net.security.auth import TokenRole, read_token_file, write_token_file
from echo2d.net.security.urls import coordinator_url
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory, existing_run

DURATION_S_MAX = 100 * 365 * 86400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(text: str) -> float:
    """Seconds of "30d", "12h", "10m" or "45s"."""
    matched = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if matched is None:
        raise OperatorFault(f"expected a duration such as 30d, 12h or 10m; found {text!r}")
    duration_s = float(matched[1]) * _UNITS_S[matched[2]]
    if duration_s > DURATION_S_MAX:
        raise OperatorFault(f'expected a duration of at most 100 years, or "never"; found {text}')
    return duration_s


def create_token(
    run_dir: Path,
    name: str,
    *,
    role: str,
    url: str,
    out: Path,
    max_workers: int | None,
    expires: str,
) -> None:
    """Create a token and write its file to `out`. expires: a duration from now, or "never"."""
    url = coordinator_url(url)
    expires_at = None if expires == "never" else time.time() + parse_duration_s(expires)
    table = AccessTable(RunDirectory(run_dir))
    token = table.create(name, role, max_workers=max_workers, expires_at=expires_at)
    try:
        write_token_file(out, replace(token, url=url))
    except OperatorFault:
        # Without its file the secret is lost, and the name must stay free.
        table.discard(name)
        raise


def list_tokens(run_dir: Path) -> list[dict[str, Any]]:
    """All tokens as rows for JSON; the secrets are not among them."""
    now_s = time.time()
    return [
        {
            "name": token.name,
            "role": token.role,
            "max_workers": token.max_workers,
            "expires_in_s": None if token.expires_at is None else round(token.expires_at - now_s),
            "state": fault.code if (fault := token.fault(now_s)) else "valid",
        }
        for token in AccessTable(existing_run(run_dir)).tokens()
    ]


def revoke_token(run_dir: Path, name: str) -> None:
    """Revoke a token of this run. OperatorFault: there is no such run or token."""
    AccessTable(existing_run(run_dir)).revoke(name)


def own_token(run: RunDirectory, access: AccessTable, role: TokenRole, url: str) -> Path:
    """Write the token file of this host's own learner or viewer. Returns the file's path.

    The token is made if its file is missing; the URL in the file is always brought up to date.
    """
    path, name = run.token_path(role), f"own-{role}"
    if path.exists():
        token = read_token_file(path)
    else:
        # The secret of an older token is lost with its file.
        access.discard(name)
        token = access.create(name, role)
    write_token_file(path, replace(token, url=url, authority=run.authority.certificate))
    return path
