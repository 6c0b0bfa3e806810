"""User ids that task processes borrow: never two at a time, free again when their holder has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.tasks import user_ids
from echo2d.tasks.user_ids import BorrowedUser, processes_of

# A process that forks and ends again and again, so that it is gone before anybody can signal it.
CHAIN = "import os, time\nos.setsid()\nwhile True:\n    time.sleep(0.003)\n    if os.fork():\n        os._exit(0)\n"
HOLDER = """
import sys
from pathlib import Path
from echo2d.tasks import user_ids
user_ids.LOCKS = Path(sys.argv[1])
user_ids.TASK_UIDS = (64000, 64001)
held = user_ids.BorrowedUser.borrow()
print(held.uid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _two_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_ids, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(user_ids, "TASK_UIDS", (64000, 64001))


def borrowed() -> int:
    """The next id, which is given back at once."""
    user = BorrowedUser.borrow()
    user.give_back()
    return user.uid


def test_no_process_gets_a_user_id_that_another_one_holds() -> None:
    one, two = BorrowedUser.borrow(), BorrowedUser.borrow()
    assert {one.uid, two.uid} == {64000, 64001}
    with pytest.raises(OperatorFault, match="all user ids for task processes of this host"):
        BorrowedUser.borrow()
    one.give_back()
    again = BorrowedUser.borrow()
    assert again.uid == one.uid
    for each in (again, two):
        each.give_back()


def test_the_user_id_of_a_killed_program_is_free_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "locks")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == 64000
        assert borrowed() == 64001
        holder.kill()
    assert borrowed() == 64000


def test_a_folder_without_locks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(user_ids, "LOCKS", tmp_path / "file" / "locks")
    with pytest.raises(OperatorFault, match="cannot be used: Not a directory"):
        BorrowedUser.borrow()


def test_user_ids_that_a_container_does_not_have_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "map").write_text("         0     100000      64001\n")
    monkeypatch.setattr(user_ids, "_UID_MAP", tmp_path / "map")
    only = BorrowedUser.borrow()
    assert only.uid == 64000
    with pytest.raises(OperatorFault, match="in use"):
        BorrowedUser.borrow()
    only.give_back()


def test_a_user_id_whose_lock_was_removed_is_lent_once(tmp_path: Path) -> None:
    one = BorrowedUser.borrow()
    (tmp_path / "locks" / str(one.uid)).unlink()
    two = BorrowedUser.borrow()
    three = BorrowedUser.borrow()
    assert {two.uid, three.uid} == {64000, 64001}
    for each in (one, two, three):
        each.give_back()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes as other users")
@pytest.mark.parametrize("code", ["import time; time.sleep(1000)", CHAIN])
def test_processes_of_a_user_id_end_before_another_task_gets_it(code: str) -> None:
    user = BorrowedUser.borrow()
    left = f"import os; os.setgid({user.uid}); os.setuid({user.uid})\n{code}"
    with subprocess.Popen([sys.executable, "-c", left]):
        while not processes_of(user.uid):
            pass
        user.give_back()
        assert code == CHAIN or borrowed() != user.uid, "somebody runs as it"
        user.end_all()
    assert not processes_of(user.uid)
    assert borrowed() == user.uid
