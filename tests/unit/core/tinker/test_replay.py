"""What of one model must be computed again when the learner has lost its memory."""

from echo2d.core.base.canonical import digest_of
from echo2d.core.tinker.futures import ENTRY_BYTES
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.core.tinker.replay import Ended, ModelReplay


def call(number: int, kind: OperationKind = "forward_backward", *, adds: bool = True) -> Operation:
    adds = adds and kind == "forward_backward"
    digest = digest_of(b"%d" % number)
    return Operation(ModelId("s:train:1"), number, kind, digest, body_bytes=100, adds=adds)


def ended(replay: ModelReplay, *operations: Operation, failed: bool = False) -> Ended:
    found = Ended(needed=False)
    for each in operations:
        found = replay.ended(each, failed=failed)
        replay.check()
    return found


def numbers(replay: ModelReplay) -> list[int]:
    return [each.number for each in replay.again()]


def test_gradients_and_the_steps_that_applied_them_are_computed_again() -> None:
    replay = ModelReplay()
    assert ended(replay, call(0, "create")) == Ended(needed=False)
    assert ended(replay, call(1), call(2, "optim_step")) == Ended(needed=True)
    assert ended(replay, call(3, "save")) == Ended(needed=False)
    assert ended(replay, call(4)) == Ended(needed=True)
    assert ended(replay, call(5, adds=False)) == Ended(needed=False)
    assert numbers(replay) == [1, 2, 4]
    assert replay.bytes == 3 * (ENTRY_BYTES + 100)
    assert replay.states() == [2]


def test_a_gradient_that_failed_spoils_the_next_step_and_no_later_one() -> None:
    replay = ModelReplay()
    ended(replay, call(1), call(2, "optim_step"), call(3), call(4))
    assert ended(replay, call(5), failed=True) == Ended(needed=True, dropped=(3, 4))
    assert replay.spoiled
    # Nothing of this gradient is needed, whatever comes.
    assert ended(replay, call(6)) == Ended(needed=False)
    assert ended(replay, call(7), failed=True) == Ended(needed=False)
    assert numbers(replay) == [1, 2]
    assert ended(replay, call(8, "optim_step"), failed=True) == Ended(needed=False, dropped=(3, 8))
    ended(replay, call(9))
    assert numbers(replay) == [1, 2, 9]
    assert replay.spoiled is False


def test_a_failed_forward_pass_spoils_nothing() -> None:
    replay = ModelReplay()
    ended(replay, call(1, adds=False), failed=True)
    assert not replay.spoiled


def test_what_fails_again_and_again_keeps_no_bytes() -> None:
    replay = ModelReplay()
    for number in range(1, 100):
        ended(replay, call(number), failed=True)
    assert replay.bytes == 0


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
    assert ended(replay, call(3)) == Ended(needed=False), "the ledger may still have it"
    assert numbers(replay) == [5, 6]
    assert replay.bytes == 2 * (ENTRY_BYTES + 100)
