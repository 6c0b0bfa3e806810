"""Who a learner is, after restarts too."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from echo2d.client import OperatorFault
from learner.saving.identity import own


def test_a_learner_is_the_same_after_a_restart(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = own(tmp_path / "out", stack)
    with ExitStack() as stack:
        assert own(tmp_path / "out", stack) == first
        assert own(tmp_path / "elsewhere", stack) != first


def test_two_learners_never_run_on_one_directory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = own(tmp_path, stack)
        with pytest.raises(OperatorFault, match="another learner runs on"):
            own(tmp_path, stack)
        # It is told to end the other one's session.
        assert own(tmp_path, stack, take_over=True) == found


@pytest.mark.parametrize("text", ["", "x" * 200, "a\x07b"])
def test_a_damaged_identity_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "learner.id").write_text(text)
    with ExitStack() as stack, pytest.raises(OperatorFault, match="delete the damaged file"):
        own(tmp_path, stack)
