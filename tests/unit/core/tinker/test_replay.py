"""What of one model must be computed again when the learner has lost its memory."""

from echo2d.core.base.canonical import digest_of
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.core.tinker.replay import ModelReplay


def call(number: int, kind: OperationKind = "forward_backward", *, adds: bool = True) -> Operation:
    adds = adds and kind == "forward_backward"
    digest = digest_of(b"%d" % number)
    return Operation(ModelId("s:train:1"), number, kind, digest, body_bytes=100, adds=adds)


def ended(replay: ModelReplay, *operations: Operation, failed: bool = False) -> range:
    dropped = range(0)
    for each in operations:
        dropped = replay.ended(each, failed=failed)
        replay.check()
    return dropped


def numbers(replay: ModelReplay) -> list[int]:
    return [each.number for each in replay.again()]


def test_gradients_and_the_steps_that_applied_them_are_computed_again() -> None:
    replay = ModelReplay()
    ended(replay, call(0, "create"), call(1), call(2, "optim_step"), call(3, "save"))
    ended(replay, call(4), call(5, adds=False))
    assert numbers(replay) == [1, 2, 4]
    assert replay.bytes == 300
    assert replay.states() == [2]


def test_a_gradient_that_failed_spoils_the_next_step_and_no_later_one() -> None:
    replay = ModelReplay()
    ended(replay, call(1), call(2, "optim_step"), call(3))
    assert not replay.spoiled
    ended(replay, call(4), failed=True)
    assert numbers(replay) == [1, 2], "the step will drop it"
    assert ended(replay, call(5, "optim_step"), failed=True) == range(3, 6)
    ended(replay, call(6))
    assert numbers(replay) == [1, 2, 6]
    assert replay.spoiled is False


def test_a_failed_forward_pass_spoils_nothing() -> None:
    replay = ModelReplay()
    ended(replay, call(1, adds=False), failed=True)
    assert not replay.spoiled


def test_nothing_before_a_saved_step_is_needed() -> None:
    replay = ModelReplay()
    for number in (1, 3, 5):
        ended(replay, call(number), call(number + 1, "optim_step"))
    assert not replay.step_saved(3), "it is no step"
    assert replay.step_saved(4)
    assert not replay.step_saved(4)
    assert not replay.step_saved(2), "it is older"
    assert numbers(replay) == [5, 6]
    assert replay.states() == [4, 6]
    assert ended(replay, call(3)) == range(0), "the ledger may still have it"
    assert numbers(replay) == [5, 6]
