"""The order of one model's operations."""

from random import Random

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.tinker.operations import (
    AHEAD_MAX,
    GAP_S,
    ModelId,
    NumberRefusedError,
    Operation,
    OperationKind,
    Operations,
)

MODEL = ModelId("s:train:1")


def call(number: int, kind: OperationKind = "forward_backward", said: str = "") -> Operation:
    adds = kind == "forward_backward"
    return Operation(MODEL, number, kind, digest_of(f"{number}{said}".encode()), adds=adds)


def run(operations: Operations, *, now: float = 0.0) -> int:
    number = operations.begin().number
    operations.end(now=now)
    operations.check()
    return number


def begun() -> Operations:
    """The model is made."""
    operations = Operations()
    operations.submit(call(0, "create"), now=0.0)
    assert run(operations) == 0
    return operations


@pytest.mark.parametrize("seed", range(20))
def test_operations_run_in_the_order_of_their_numbers_however_they_arrive(seed: int) -> None:
    numbers, operations, ran = list(range(1, 30)), begun(), []
    Random(seed).shuffle(numbers)
    for number in numbers:
        assert operations.submit(call(number), now=0.0)
        while operations.ready:
            ran.append(run(operations))
    assert ran == list(range(1, 30))
    assert operations.gap_at is None


def test_a_number_that_comes_again_is_taken_once() -> None:
    operations = begun()
    assert operations.submit(call(1), now=0.0)
    assert not operations.submit(call(1), now=0.0)
    run(operations)
    assert not operations.submit(call(1), now=0.0)
    assert not operations.ready


def test_a_number_with_other_bytes_is_refused_also_after_it_has_ended() -> None:
    operations = begun()
    operations.submit(call(1), now=0.0)
    with pytest.raises(NumberRefusedError, match="number 1 was used for another call"):
        operations.submit(call(1, said="other"), now=0.0)
    run(operations)
    with pytest.raises(NumberRefusedError, match="number 1 was used"):
        operations.submit(call(1, said="other"), now=0.0)


def test_a_number_far_ahead_is_refused() -> None:
    with pytest.raises(NumberRefusedError, match="is too far ahead: 1 has not ended"):
        begun().submit(call(1 + AHEAD_MAX), now=0.0)


def test_a_missing_number_fails_after_a_minute() -> None:
    operations = begun()
    operations.submit(call(3, "optim_step"), now=5.0)
    assert operations.gap_at == 5.0 + GAP_S
    assert operations.skip_missing(now=5.0 + GAP_S - 0.1) is None
    assert operations.skip_missing(now=5.0 + GAP_S) == 1
    # Number 2 is missing too, and has a minute of its own.
    assert operations.skip_missing(now=5.0 + GAP_S) is None
    operations.submit(call(2), now=70.0)
    assert run(operations, now=70.0) == 2
    assert run(operations, now=70.0) == 3
    assert not operations.submit(call(1), now=71.0), "it has failed already"


def test_no_number_is_missing_while_an_earlier_one_runs() -> None:
    operations = begun()
    operations.submit(call(1), now=0.0)
    operations.begin()
    operations.submit(call(3), now=0.0)
    assert operations.gap_at is None
    operations.end(now=1000.0)
    assert operations.gap_at == 1000.0 + GAP_S


def test_an_operation_that_is_given_back_runs_again() -> None:
    operations = begun()
    operations.submit(call(1), now=0.0)
    operations.begin()
    operations.give_back()
    assert run(operations) == 1


def test_the_order_goes_on_from_what_the_ledger_has() -> None:
    operations = Operations()
    operations.ended_up_to(3)
    operations.recover(call(5), ended=True)
    operations.recover(call(6), ended=False)
    operations.recover(call(8), ended=False)
    assert operations.waiting == 2
    assert run(operations) == 6
    with pytest.raises(NumberRefusedError, match="number 5 was used"):
        operations.submit(call(5, said="other"), now=0.0)
    assert not operations.submit(call(2), now=0.0), "it has ended"
    # Number 7 has a minute from now on.
    assert operations.gap_at == GAP_S
