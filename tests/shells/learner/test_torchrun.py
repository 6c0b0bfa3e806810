"""The program that starts the ranks also ends if torchrun waits for ever for a store that does not answer."""

import os
from collections.abc import Sequence

import pytest

from echo2d.learner import torchrun


def start(code: int) -> None:
    """Start a child that ends with this exit code, or by signal -code if the code is negative."""
    if not os.fork():
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)


def in_a_child(codes: Sequence[int]) -> int:
    """Call `_end_if_stuck` in a process whose only children end with these codes. Returns its exit code."""
    child = os.fork()
    if not child:
        try:
            for each in codes:
                start(each)
            torchrun._end_if_stuck()
        finally:
            os._exit(100)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, 1), 1), ((2, 1), 2), ((-9, 0), 1)])
def test_the_starting_program_ends_as_its_ranks_did(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], code: int
) -> None:
    monkeypatch.setattr(torchrun, "CHECK_S", 0.001)
    assert in_a_child(codes) == code
