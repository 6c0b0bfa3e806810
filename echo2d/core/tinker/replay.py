"""What one model went through since its last saved step, to compute it again when the learner has lost its memory.

    made, or the state after a saved step --> [gradients --> optimizer step] --> [gradients --> step] --> gradients

What stands in brackets is over: its gradients either were applied by the step at its end, or were dropped by it. A
gradient that has failed spoils the step after it. After a step has come to the learner's disk, nothing before it is
needed any more.
Not here: the order of operations (`operations`), bodies (the ledger).
"""

from collections.abc import Iterator

from echo2d.core.tinker.operations import Operation


class ModelReplay:
    """See the module docstring."""

    def __init__(self, saved: int | None = None) -> None:
        # The number of the optimizer step whose state is on the learner's disk; None: none is.
        self.saved = saved
        # Whether the learner has the model in its memory, as all that has ended left it.
        self.in_memory = False
        # The gradients, and the steps that applied some, since that state.
        self._ended: list[Operation] = []
        # The numbers of failed gradients since the last step.
        self._spoils: set[int] = set()

    @property
    def spoiled(self) -> bool:
        """Whether a part of the present gradient has failed."""
        return bool(self._spoils)

    @property
    def bytes(self) -> int:
        """Of the bodies that are needed."""
        return sum(each.body_bytes for each in self._ended)

    def ended(self, operation: Operation, *, failed: bool) -> range:
        """An operation has ended. Returns the numbers of those that are needed no longer; the smallest may be older."""
        number = operation.number
        if self.saved is not None and number <= self.saved:
            return range(0)
        if operation.adds:
            self._ended.append(operation)
            if failed:
                self._spoils.add(number)
            return range(0)
        if operation.kind != "optim_step":
            return range(0)
        self._spoils.clear()
        if not failed:
            self._ended.append(operation)
            return range(0)
        while self._ended and self._ended[-1].kind != "optim_step":
            self._ended.pop()
        return range(self._ended[-1].number + 1 if self._ended else 0, number + 1)

    def needs(self, operation: Operation, *, failed: bool) -> bool:
        """Whether an operation that ends so matters to what is computed again."""
        return operation.adds or (operation.kind == "optim_step" and not failed)

    def step_saved(self, number: int) -> bool:
        """The state after this step is on the learner's disk. Returns whether that is new."""
        if number not in (each.number for each in self._steps()):
            return False
        self.saved = number
        self._ended = [each for each in self._ended if each.number > number]
        return True

    def states(self) -> list[int]:
        """The steps whose state is on the learner's disk, or comes to it."""
        saved = [] if self.saved is None else [self.saved]
        return saved + [each.number for each in self._steps()]

    def again(self) -> list[Operation]:
        """What to compute after the saved state, in this order."""
        over = max((each.number for each in self._steps()), default=-1)
        return [each for each in self._ended if not self._spoils or each.number <= over]

    def _steps(self) -> Iterator[Operation]:
        return (each for each in self._ended if each.kind == "optim_step")

    def check(self) -> None:
        numbers = [each.number for each in self._ended]
        assert numbers == sorted(set(numbers))
        assert all(number > (-1 if self.saved is None else self.saved) for number in numbers)
