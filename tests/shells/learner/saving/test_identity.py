"""The identity of a learner, also after restarts."""

import dataclasses
import errno
import fcntl
import logging
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.identity import SETTINGS_FILE, own, tell_changes
from tests.support.polling import poll


def test_a_learner_has_the_same_identity_after_a_restart(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = own(tmp_path / "out", stack)
    with ExitStack() as stack:
        assert own(tmp_path / "out", stack) == first
        assert own(tmp_path / "elsewhere", stack) != first


def test_two_learners_never_run_in_one_directory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = own(tmp_path, stack)
        with pytest.raises(OperatorFault, match="another learner runs on"):
            own(tmp_path, stack, wait_s=0.0)
        # This learner takes over, which ends the other one's session.
        assert own(tmp_path, stack, take_over=True) == found


def test_a_killed_learner_may_still_hold_the_lock_for_a_moment(tmp_path: Path) -> None:
    with ExitStack() as stack, ExitStack() as killed:
        found = own(tmp_path, killed)
        freed = threading.Timer(0.2, killed.close)
        freed.start()
        assert own(tmp_path, stack) == found
        freed.join()


def test_a_learner_that_took_over_holds_the_lock_once_the_other_has_ended(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with ExitStack() as first:
            own(tmp_path, first)
            own(tmp_path, stack, take_over=True)
        poll(lambda: not is_free(tmp_path / "learner.lock"))


def is_free(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_learner_starts_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with ExitStack() as stack:
        assert own(tmp_path, stack)


def test_a_flipped_bit_or_a_cut_never_gives_another_identity(tmp_path: Path) -> None:
    with ExitStack() as stack:
        known = own(tmp_path, stack)
    path = tmp_path / "learner.id"
    content = path.read_bytes()
    flipped = [
        bytes(b ^ (1 << bit % 8 if at == bit // 8 else 0) for at, b in enumerate(content))
        for bit in range(8 * len(content))
    ]
    for damaged in (*flipped, *(content[:end] for end in range(len(content)))):
        path.write_bytes(damaged)
        with ExitStack() as stack, suppress(OperatorFault):
            assert own(tmp_path, stack) == known, damaged


@pytest.mark.parametrize("data", [b"", b"x" * 200, b"a\x07b", b"\xff\xfe"])
def test_a_damaged_identity_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "learner.id").write_bytes(data)
    with ExitStack() as stack, pytest.raises(OperatorFault, match="delete the damaged file"):
        own(tmp_path, stack)


# --- settings


def test_changed_settings_are_listed(
    config: LearnerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config.out_dir.mkdir()
    caplog.set_level(logging.INFO)
    tell_changes(config)
    tell_changes(config)
    assert not caplog.messages
    tell_changes(dataclasses.replace(config, lr=3e-5, objective="gspo"))
    assert caplog.messages == [
        "changed key=learner.objective before='grpo' now='gspo'",
        f"changed key=learner.lr before={config.lr!r} now=3e-05",
    ]
    (config.out_dir / SETTINGS_FILE).write_text("no json")
    tell_changes(config)
    assert len(caplog.messages) == 2
