"""The [run] table: the directories of a run on the learner's host, and the folders of its modules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Any, ClassVar

from echo2d.config.limits import DISK_BYTES_MAX
from echo2d.config.tables import folder_of, read_table, read_toml, table_of, with_settings
from echo2d.core.rules.table import Table, key


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable(Table):
    TABLE: ClassVar[str] = "run"

    run_dir: Path = key(
        "directory of this run: its key, tokens, ledger and versions (created with mode 0700)",
        Path("coordinator"),
    )
    snapshot_root: Path = key(
        "the learner may publish only directories inside this one", Path("snapshots")
    )
    base_model: Path | None = key(
        "model directory: gives the vocabulary size; LoRA adapters must belong to it", None
    )
    disk_bytes_max: int = key(
        "most bytes of versions and uploads on this host; frames may take as many bytes in addition",
        DISK_BYTES_MAX,
        low=1,
    )
    name: str = key("name of this run, for people; empty: that of this file's folder", "")
    modules: tuple[Path, ...] = key(
        "folders in which your own modules are looked for, besides this file's folder", ()
    )
    keep_every: int = key(
        "train steps between two versions that are kept for `echo2d keep export`, while there is room; 0: only"
        " the last version and those with the best scores are kept",
        0,
        low=0,
    )


def module_folders(path: Path, settings: Iterable[str] = ()) -> tuple[Path, ...]:
    """The same as `CoordinatorConfig.module_folders`, for a file that may have no [run] table."""
    return module_folders_of(with_settings(read_toml(path), settings), folder_of(path))


def module_folders_of(document: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    """The same for a parsed file. folder: the folder of the file."""
    values = table_of(document, RunTable.TABLE)
    return flat_folders((folder, *(read_table(RunTable, values, folder).modules if values else ())))


def flat_folders(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Return the absolute paths among these folders, without "..", as a traceback shows them."""
    return tuple(Path(normpath(each)) for each in folders if each.is_absolute())


def leads_a_run(path: Path) -> bool:
    """Whether this TOML file is for a learner's host: it has a [run] table."""
    return RunTable.TABLE in read_toml(path)
