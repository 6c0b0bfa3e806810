"""A coordinator begins a new run in an empty directory, continues a whole run, and refuses anything else."""

import shutil
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.run_dir.run_directory import require_new_or_whole

FILES = ("run.key", "ledger.sqlite", "access.sqlite")


def make(run_dir: Path, *names: str, versions: bool = True) -> Path:
    run_dir.mkdir(parents=True)
    for name in names:
        (run_dir / name).touch()
    if versions:
        (run_dir / "versions" / "0-ab12").mkdir(parents=True)
    return run_dir


@pytest.mark.parametrize("names", [(), ("run.key", "access.sqlite"), FILES])
def test_a_new_or_a_whole_run_is_accepted(tmp_path: Path, names: tuple[str, ...]) -> None:
    run_dir = tmp_path / "coordinator"
    if names:
        make(run_dir, *names, versions=names == FILES)
    require_new_or_whole(run_dir, tmp_path)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("run.key", "run.key is gone: without it this would be another run"),
        ("ledger.sqlite", "ledger.sqlite is gone: the run would begin again at step 0"),
        ("access.sqlite", "access.sqlite is gone: no token and no box would be let in"),
    ],
)
def test_a_run_that_lost_a_file_is_refused(tmp_path: Path, lost: str, said: str) -> None:
    run_dir = make(tmp_path / "coordinator", *FILES)
    (run_dir / lost).unlink()
    with pytest.raises(OperatorFault, match=said):
        require_new_or_whole(run_dir, tmp_path)
    assert not (run_dir / lost).exists()


@pytest.mark.parametrize("lost", ["run.key", "access.sqlite"])
def test_a_run_that_was_set_up_but_lost_a_file_is_refused(tmp_path: Path, lost: str) -> None:
    run_dir = make(tmp_path / "coordinator", "run.key", "access.sqlite", versions=False)
    (run_dir / lost).unlink()
    if lost == "access.sqlite":
        return require_new_or_whole(
            run_dir, tmp_path
        )  # a key alone is what a first start leaves that was killed
    with pytest.raises(OperatorFault, match=r"run\.key is gone"):
        require_new_or_whole(run_dir, tmp_path)
    return None


def test_a_folder_that_was_moved_is_refused(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make(old / "coordinator", *FILES)
    shutil.move(old, new)
    with pytest.raises(OperatorFault, match=r'set run\.run_dir = "coordinator"'):
        require_new_or_whole(old / "coordinator", new)
    require_new_or_whole(new / "coordinator", new)
