"""Whether a coordinator may begin a run in a directory, or go on with the one that is there.

    run.key, ledger.sqlite, access.sqlite    all there: it goes on; none: it begins a new run
    some of them                             a file is lost, and a new one would belong to another run
    none, but a run lies beside run.toml     the folder was moved, and run.run_dir was not

`echo2d init` makes key and access table, and the first start the ledger. Before there is a version, a
start that was killed may have left any of them.
"""

from pathlib import Path

from echo2d.errors import OperatorFault
from echo2d.runtime.run_dir.access_table import ACCESS_FILE
from echo2d.runtime.run_dir.authority import KEY_FILE
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE

RESTORE = "restore it from a backup (`echo2d keep restore`)"


def require_whole(run_dir: Path, folder: Path) -> None:
    """OperatorFault: to begin or to go on here would be a mistake. folder: of run.toml."""
    begun = any((run_dir / "versions").glob("*"))
    there = {name: (run_dir / name).exists() for name in (KEY_FILE, LEDGER_FILE, ACCESS_FILE)}
    if not any(there.values()):
        _require_not_moved(run_dir, folder)
    elif not there[KEY_FILE]:
        found = LEDGER_FILE if there[LEDGER_FILE] else ACCESS_FILE
        raise OperatorFault(
            f"{run_dir} has a {found}, but {KEY_FILE} is gone: without it this would be another run, which "
            f"no box believes; {RESTORE}"
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
    """OperatorFault: there is no run in a directory elsewhere, but one beside run.toml."""
    if run_dir.is_relative_to(folder):
        return
    for each in sorted(folder.glob(f"*/{LEDGER_FILE}")):
        if (each.parent / KEY_FILE).exists() and each.parent.resolve() != run_dir.resolve():
            raise OperatorFault(
                f"run.run_dir: there is no run in {run_dir}, but one in {each.parent}: if this folder was "
                f'moved, set run.run_dir = "{each.parent.name}" (paths count from run.toml\'s folder); for '
                "a new run, name another folder or move this run away"
            )
