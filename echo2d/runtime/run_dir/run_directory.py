"""The directory of a run: it has the run's key, and the file that says where its coordinator listens.

run_dir/ (0700)   run.key   authority.json   access.sqlite   tokens/NAME.token   coordinator.json
                  ledger.sqlite   versions/   uploads/
"""

import fcntl
import logging
import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import RunId
from echo2d.errors import OperatorFault, path_fault
from echo2d.net.security.auth import TokenFile, public_bytes, write_private
from echo2d.runtime.run_dir.authority import KEY_FILE, open_authority
from echo2d.store.sealed import sealed, unsealed

# The address file: where the running coordinator listens.
COORDINATOR_FILE = "coordinator.json"
LEDGER_FILE = "ledger.sqlite"
ACCESS_FILE = "access.sqlite"

log = logging.getLogger("echo2d.coordinator")


class RunDirectory:
    """The directory of a run. If it does not exist, it is made, together with the run's key.

    OperatorFault: the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            (path / "tokens").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise path_fault(f"cannot use run directory {path}", error) from error
        self.path = path
        self.keys = open_authority(path)
        self.key: Ed25519PrivateKey = self.keys.key
        self.public_key = public_bytes(self.key)
        self.run_id: RunId = self.keys.run_id
        self.authority = self.keys.certifier

    def token_path(self, name: str) -> Path:
        return self.path / "tokens" / f"{name}.token"

    def believed(self, token: TokenFile) -> TokenFile:
        """The token file, completed with the facts about this run that its holder will trust."""
        return replace(
            token,
            run_key=self.public_key.hex(),
            authority=self.authority.certificate,
            run=self.run_id,
            number=self.keys.number,
        )


def existing_run(run_dir: Path) -> RunDirectory:
    """Open a run directory, but never make one. OperatorFault: this is not a run directory."""
    if not (run_dir / KEY_FILE).exists():
        raise OperatorFault(
            f"{run_dir} is not a run directory: expected run.run_dir of a config with which "
            "`echo2d coordinate` was started, or that `echo2d init` has written"
        )
    return RunDirectory(run_dir)


def in_use(run_dir: Path) -> bool:
    """Whether a coordinator of this host runs in this directory."""
    try:
        with (run_dir / f"{LEDGER_FILE}.lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # the file is not on this host, or was deleted
    return False


def announce(run: RunDirectory, url: str) -> None:
    """Write the address file, which tells programs of this host where the coordinator listens."""
    facts = {"url": url, "port": urlsplit(url).port, "pid": os.getpid(), "run_id": run.run_id}
    write_private(run.path / COORDINATOR_FILE, sealed(facts).decode() + "\n")


def withdraw(run: RunDirectory) -> None:
    """Remove the address file: no coordinator listens."""
    try:
        (run.path / COORDINATOR_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s: %s", run.path / COORDINATOR_FILE, error.strerror)


def find_coordinator(run_dir: Path, role: str = "viewer") -> tuple[str, Path]:
    """The URL of the coordinator that runs in this directory, and this host's own token file of a role.

    OperatorFault: no coordinator runs there.
    """
    try:
        url = unsealed((run_dir / COORDINATOR_FILE).read_bytes())["url"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OperatorFault(f"no coordinator runs in {run_dir}") from error
    except OSError as error:
        raise path_fault(f"cannot read {run_dir / COORDINATOR_FILE}", error) from error
    except (ValueError, KeyError) as error:
        raise OperatorFault(
            f"{run_dir / COORDINATOR_FILE} is damaged; restart the coordinator, which writes it again"
        ) from error
    return url, run_dir / "tokens" / f"{role}.token"


# --- whether a coordinator may begin a run in a directory, or continue the one that is there
#
#     run.key, ledger.sqlite, access.sqlite    all exist: it continues; none: it begins a new run
#     some of them                             a file is lost, and a new one would belong to another run
#     none, but a run is beside run.toml       the folder was moved, and run.run_dir was not changed
#
# `echo2d init` makes key and access table, and the first start makes the ledger. Before there is a version,
# a killed start may have left any of them.

RESTORE = "restore it from a backup (`echo2d keep restore`)"


def require_new_or_whole(run_dir: Path, folder: Path) -> None:
    """OperatorFault: it would be a mistake to begin or to continue a run here. folder: the folder of run.toml."""
    begun = any((run_dir / "versions").glob("*"))
    there = {name: (run_dir / name).exists() for name in (KEY_FILE, LEDGER_FILE, ACCESS_FILE)}
    if not any(there.values()):
        _require_not_moved(run_dir, folder)
    elif not there[KEY_FILE]:
        found = LEDGER_FILE if there[LEDGER_FILE] else ACCESS_FILE
        raise OperatorFault(
            f"{run_dir} has a {found}, but {KEY_FILE} is gone: without it this would be another run, which "
            f"no box trusts; {RESTORE}"
        )
    elif begun and not there[ACCESS_FILE]:
        raise OperatorFault(
            f"{run_dir} has versions, but {ACCESS_FILE} is gone: no token and no box would be let in; "
            f"{RESTORE}"
        )
    elif begun and not there[LEDGER_FILE]:
        raise OperatorFault(
            f"{run_dir} has versions, but {LEDGER_FILE} is gone: the run would begin again at step 0; "
            f"{RESTORE}, or begin a new run in another run.run_dir"
        )


def _require_not_moved(run_dir: Path, folder: Path) -> None:
    """OperatorFault: run_dir is outside the folder of run.toml and has no run, but a run is beside run.toml."""
    if run_dir.is_relative_to(folder):
        return
    for each in sorted(folder.glob(f"*/{LEDGER_FILE}")):
        if (each.parent / KEY_FILE).exists() and each.parent.resolve() != run_dir.resolve():
            raise OperatorFault(
                f"run.run_dir: there is no run in {run_dir}, but one in {each.parent}: if this folder was "
                f'moved, set run.run_dir = "{each.parent.name}" (paths count from run.toml\'s folder); for '
                "a new run, name another folder or move this run away"
            )
