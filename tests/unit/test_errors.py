"""The fault class of a system call's error, and the sentence about it."""

import errno
import os
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault, of_the_host, path_fault


def refusal(path: Path) -> PermissionError:
    return PermissionError(errno.EACCES, "Permission denied", str(path))


def test_the_error_about_a_path_of_another_user_names_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.key").write_text("")
    user = tmp_path.owner()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for path, seen in (
        (tmp_path / "run.key", tmp_path / "run.key"),
        (tmp_path / "none" / "run.key", tmp_path),
    ):
        fault = path_fault("cannot read it", refusal(path))
        assert isinstance(fault, OperatorFault)
        assert str(fault) == (
            f"cannot read it: Permission denied; {seen} belongs to the user {user}: type this as that user, "
            f"with sudo -u {user}"
        )
        assert str(of_the_host(refusal(path))).startswith(f"{path}: Permission denied; {seen} ")


def test_the_error_about_a_path_of_this_user_is_unchanged(tmp_path: Path) -> None:
    assert (
        str(path_fault("cannot read it", refusal(tmp_path))) == "cannot read it: Permission denied"
    )
    assert of_the_host(refusal(tmp_path)) is None
