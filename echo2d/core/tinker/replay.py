"""What one model went through since its last saved step, to compute it again when the learner has lost its memory.

    made, or the state after a saved step --> [gradients --> optimizer step] --> [gradients --> step] --> gradients

What stands in brackets is over: the step at its end applied its gradients. When a part of a gradient has failed, the
whole gradient is needed no longer, because the step after it drops it. After a step has come to the learner's disk,
nothing before it is needed any more.
Not here: the order of operations (`operations`), bodies (the ledger).
"""

from dataclasses import dataclass

from echo2d.core.tinker.futures import ENTRY_BYTES
from echo2d.core.tinker.operations import Operation


@dataclass(frozen=True, slots=True)
class Ended:
    """What follows from the end of an operation."""

    # Whether it is needed: to compute it again, or because it spoils the next optimizer step.
    needed: bool
    # The first and the last number of those that are needed no longer; None: there are none.
    dropped: tuple[int, int] | None = None


class ModelReplay:
    """See the module docstring."""

    def __init__(self, saved: int | None = None) -> None:
        # The number of the optimizer step whose state is on the learner's disk; None: none is.
        self.saved = saved
        # Whether the learner has the model in its memory, as all that has ended left it.
        self.in_memory = False
        # The gradients, and the steps that applied some, since that state.
        self._ended: list[Operation] = []
        # Whether a part of the present gradient has failed.
        self.spoiled = False
        self.bytes = 0

    def ended(self, operation: Operation, *, failed: bool) -> Ended:
        """An operation has ended."""
        number = operation.number
        if self.saved is not None and number <= self.saved:
            return Ended(needed=False)
        if operation.adds and failed:
            first, self.spoiled = not self.spoiled, True
            left = self._drop_gradient()
            return Ended(first, (left[0], left[-1]) if left else None)
        if operation.kind == "optim_step" and failed:
            self.spoiled = False
            self._drop_gradient()
            return Ended(False, (self._newest_step() + 1, number))
        if operation.kind == "optim_step" or (operation.adds and not self.spoiled):
            self._ended.append(operation)
            self.bytes += ENTRY_BYTES + operation.body_bytes
            return Ended(needed=True)
        return Ended(needed=False)

    def step_saved(self, number: int) -> bool:
        """The state after this step is on the learner's disk. Returns whether that is new."""
        if number not in self._steps():
            return False
        self.saved = number
        self._keep([each for each in self._ended if each.number > number])
        return True

    def states(self) -> list[int]:
        """The steps whose state is on the learner's disk, or comes to it."""
        return ([] if self.saved is None else [self.saved]) + self._steps()

    def again(self) -> list[Operation]:
        """What to compute after the saved state, in this order."""
        return list(self._ended)

    def _steps(self) -> list[int]:
        return [each.number for each in self._ended if each.kind == "optim_step"]

    def _newest_step(self) -> int:
        saved = -1 if self.saved is None else self.saved
        return max(self._steps(), default=saved)

    def _drop_gradient(self) -> list[int]:
        """Forget the present gradient; returns the numbers of its parts."""
        over = self._newest_step()
        left = [each.number for each in self._ended if each.number > over]
        self._keep([each for each in self._ended if each.number <= over])
        return left

    def _keep(self, operations: list[Operation]) -> None:
        self._ended = operations
        self.bytes = sum(ENTRY_BYTES + each.body_bytes for each in operations)

    def check(self) -> None:
        numbers = [each.number for each in self._ended]
        assert numbers == sorted(set(numbers))
        assert all(number > (-1 if self.saved is None else self.saved) for number in numbers)
