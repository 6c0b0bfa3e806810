"""Checkpoints on a real disk: each is whole or absent after any failure; and the one from which a learner continues."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2d.client import OperatorFault, StoreFault
from echo2d.learner.saving import checkpoint
from echo2d.learner.saving.checkpoint import OWN, PROGRESS, Checkpoints
from echo2d.learner.saving.remote import DIGESTS
from tests.support.full_disk import files_up_to

DISK_CALLS = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove"}
SAVED, REFUSED, UNTOUCHED, KILLED = 0, 3, 4, 9


TENSORS, PROGRESS_0 = "__0_0.distcp", PROGRESS.format(0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A forked process does not inherit torch's other threads, and would wait for them."""
    torch.set_num_threads(1)


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((100, 100), float(step))},
        "groups": [{"lr": step / 2, "params": ["w"]}],
    }


def save(checkpoints: Checkpoints, step: int, epoch: int) -> None:
    """Save a checkpoint. It is durable when this returns."""
    checkpoints.save(step, epoch, state(step), {"run": "a"}, {"rng": [(step, None, "x")]})
    assert checkpoints.settle()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def step_of(checkpoints: Checkpoints) -> int:
    """The step from which a learner resumes. All of its state is checked."""
    found = state(-1)
    progress = checkpoints.load_newest(found)
    step = int(progress["step"])
    assert (progress["run"], progress[OWN]) == ("a", {"rng": [(step, None, "x")]})
    assert torch.equal(found["model"]["w"], state(step)["model"]["w"])
    assert found["groups"] == state(step)["groups"]
    return step


def in_a_child(job: Callable[[], None]) -> int:
    """The child's exit code; KILLED also if a signal ended it."""
    child = os.fork()
    if not child:
        try:
            job()
            os._exit(SAVED)
        except StoreFault:
            os._exit(REFUSED)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    return KILLED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def at_call(number: int, strike: Callable[[], None]) -> list[int]:
    """Strike before the call of this number that changes the disk, in this process. Returns the calls so far."""
    calls: list[int] = []
    fsync = os.fsync

    def count() -> None:
        calls.append(len(calls) + 1)
        if len(calls) == number:
            strike()

    def struck_fsync(descriptor: int) -> None:
        count()
        fsync(descriptor)

    os.fsync = struck_fsync  # type: ignore[assignment]
    sys.addaudithook(lambda event, _: count() if event in DISK_CALLS else None)
    return calls


def killed() -> None:
    os._exit(KILLED)


def refused() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_third(directory: Path, number: int, strike: Callable[[], None]) -> None:
    calls = at_call(number, strike)
    save(Checkpoints(directory, 2), 3, 2)
    if len(calls) < number:
        os._exit(UNTOUCHED)


@pytest.mark.parametrize("strike", [killed, refused])
def test_a_fault_at_any_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, strike: Callable[[], None]
) -> None:
    """The third save also deletes the first checkpoint and what a killed learner left."""
    outcomes = set()
    for number in range(1, 100):
        directory = tmp_path / str(number)
        checkpoints = Checkpoints(directory, 2)
        save(checkpoints, 1, 1)
        save(checkpoints, 2, 1)
        (directory / ".tmp-step-00000003-epoch-1").mkdir()

        if (code := in_a_child(partial(save_third, directory, number, strike))) == UNTOUCHED:
            break
        found = step_of(checkpoints)
        outcomes.add((code, found))
        save(checkpoints, 4, 3)
        assert names(directory) == [
            f"step-0000000{found}-epoch-{found - 1}",
            "step-00000004-epoch-3",
        ]
        assert step_of(checkpoints) == 4
    assert number > 20
    ended = KILLED if strike is killed else REFUSED
    assert outcomes - {(SAVED, 3)} == {
        (ended, 2),
        (ended, 3),
    }  # what is only of no use any more may stay for once


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_checkpoint(
    tmp_path: Path, share: float
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1, 1)
    size = (tmp_path / "step-00000001-epoch-1" / TENSORS).stat().st_size

    def save_second() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with files_up_to(int(share * size)):
            save(checkpoints, 2, 1)

    assert in_a_child(save_second) == KILLED
    assert step_of(checkpoints) == 1
    save(checkpoints, 2, 2)
    assert names(tmp_path) == ["step-00000001-epoch-1", "step-00000002-epoch-2"]


@pytest.mark.parametrize("size", [0, 100, 20_000, 41_000])
def test_a_full_disk_is_reported_in_one_line_and_costs_no_checkpoint(
    tmp_path: Path, size: int
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1, 1)
    with (
        files_up_to(size),
        pytest.raises(StoreFault, match=r"cannot write the checkpoint .*step-00000002.*: File too"),
    ):
        save(checkpoints, 2, 1)
    assert names(tmp_path) == ["step-00000001-epoch-1"]
    assert step_of(checkpoints) == 1
    save(checkpoints, 2, 1)
    assert step_of(checkpoints) == 2


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of the weights, where reading alone does not notice it."""
    data = bytearray((path / TENSORS).read_bytes())
    data[len(data) // 2] ^= 1
    (path / TENSORS).write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bytes are not those that were saved": flip_a_bit,
    "were saved": lambda path: os.truncate(path / TENSORS, 1000),
    "those": lambda path: (path / DIGESTS).write_text("x"),
    "its bytes are not": lambda path: (path / TENSORS).unlink(),
    "No such": lambda path: (path / DIGESTS).unlink(),
    "bytes are not": lambda path: (path / PROGRESS_0).unlink(),
}


@pytest.mark.parametrize("line", DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (10, 20):
        save(checkpoints, step, 1)
    DAMAGES[line](tmp_path / "step-00000020-epoch-1")
    assert step_of(checkpoints) == 10
    (said,) = [each.getMessage() for each in caplog.records if each.name == "echo2d.learner"]
    assert said.startswith(f"cannot read the checkpoint {tmp_path}/step-00000020-epoch-1: ")
    assert line in said
    DAMAGES[line](tmp_path / "step-00000010-epoch-1")
    with pytest.raises(OperatorFault, match="cannot read any checkpoint in"):
        step_of(checkpoints)


def test_an_empty_folder_gives_no_checkpoint_to_continue_from(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", 2)
    assert not checkpoints
    assert not checkpoints.settle()
    assert checkpoints.durable == 0


@pytest.mark.parametrize(
    ("keep", "durable"), [(1, [10, 20, 30, 40]), (2, [0, 10, 20, 30]), (3, [0, 0, 10, 20])]
)
def test_the_oldest_kept_checkpoint_is_durable(
    tmp_path: Path, keep: int, durable: list[int]
) -> None:
    checkpoints, found = Checkpoints(tmp_path, keep), []
    for step in (10, 20, 30, 40):
        save(checkpoints, step, 1)
        found.append(checkpoints.durable)
    assert found == durable
    assert len(names(tmp_path)) == keep


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (10, 20):
        save(checkpoints, step, 1)
    newest = max(tmp_path.iterdir())
    newest.rename(newest.with_name("step-00000030-epoch-1"))
    assert step_of(checkpoints) == 10


def test_checkpoints_beyond_the_resumed_step_are_removed(tmp_path: Path) -> None:
    """A learner resumed at step 10, because checkpoint 20 is damaged, and saves steps 15 and 20 again."""
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (10, 20):
        save(checkpoints, step, 1)
    flip_a_bit(tmp_path / "step-00000020-epoch-1")
    save(checkpoints, 15, 2)
    assert names(tmp_path) == ["step-00000010-epoch-1", "step-00000015-epoch-2"]
    save(checkpoints, 20, 2)
    save(checkpoints, 20, 3)
    assert names(tmp_path) == ["step-00000015-epoch-2", "step-00000020-epoch-3"]


def test_a_late_fenced_learner_removes_no_checkpoint_of_the_newer_learner(tmp_path: Path) -> None:
    """It saves in a thread, and hears that it is fenced only when it calls next."""
    older, newer = Checkpoints(tmp_path, 2), Checkpoints(tmp_path, 2)
    save(older, 10, 1)
    save(newer, 20, 2)
    save(older, 20, 1)
    assert names(tmp_path) == [
        f"step-000000{name}" for name in ("10-epoch-1", "20-epoch-1", "20-epoch-2")
    ]
    assert newer.durable == 10
    save(newer, 30, 2)
    assert names(tmp_path) == [f"step-000000{name}" for name in ("20-epoch-2", "30-epoch-2")]


def test_a_checkpoint_has_the_state_of_the_moment_when_saving_began(tmp_path: Path) -> None:
    """Training goes on meanwhile, in place."""
    checkpoints, changing = Checkpoints(tmp_path, 2), state(1)
    checkpoints.save(1, 1, changing, {"run": "a"}, {"rng": [(1, None, "x")]})
    changing["model"]["w"].fill_(9.0)
    changing["groups"][0]["lr"] = 9.0
    checkpoints.settle()
    assert step_of(checkpoints) == 1


def test_shards_that_another_host_wrote_to_another_folder_are_reported_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has its own directory of that name. The missing files are noticed before the checkpoint counts."""
    save_shards = checkpoint._save_shards

    def save_elsewhere(directory: Path, *rest: Any) -> dict[str, str]:
        digests = save_shards(directory, *rest)
        (directory / TENSORS).unlink()
        return digests

    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1, 1)
    monkeypatch.setattr(checkpoint, "_save_shards", save_elsewhere)
    with pytest.raises(
        OperatorFault, match=r"learner\.out_dir: .* lacks __0_0.distcp, which another host wrote"
    ):
        save(checkpoints, 2, 1)
    assert names(tmp_path) == ["step-00000001-epoch-1"]


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1, 1)
    for other in ({"model": {"w": torch.zeros(3)}}, {"model": {"v": torch.zeros(100, 100)}}):
        with pytest.raises(
            OperatorFault,
            match=r"the checkpoint .*step-00000001-epoch-1 does not fit learner\.model: \S",
        ):
            checkpoints.load_newest(other)


@pytest.mark.parametrize("found", [2, "another"])
def test_a_checkpoint_of_another_format_is_refused_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1, 1)
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "CHECKPOINT_FORMAT", found)
        save(checkpoints, 2, 1)
    with pytest.raises(
        OperatorFault, match=f"has format {found}; this learner reads format 1: go on"
    ):
        checkpoints.load_newest(state(-1))
