"""How many groups of each task a step has.

    weights 0.5 / 0.3 / 0.2, 4 groups:  step 1: 2 1 1,  step 2: 2 1 1,  step 3: 2 2 0,  ...

Each step has floor(groups x share) of every task. The groups that are left go to the tasks that
have had the least of their share so far. So every step is within one group of the exact share, and
the sum over steps never drifts away from it.
"""

from collections.abc import Sequence
from fractions import Fraction


class Quotas:
    """weights: of the tasks, each above 0. groups: of one step, all tasks together."""

    def __init__(self, weights: Sequence[Fraction], groups: int) -> None:
        total = sum(weights)
        self._exact = [weight * groups / total for weight in weights]
        self._groups = groups
        self._steps: list[tuple[int, ...]] = []
        # What each task should have had more by the end of the last step of `_steps`.
        self._owed = [Fraction(0)] * len(weights)

    def of(self, step: int) -> tuple[int, ...]:
        """The groups of each task in this step, which is at least 1."""
        while len(self._steps) < step:
            if self._steps and not any(self._owed):
                # Nothing is owed, as before the first step: all begins anew.
                return self._steps[(step - 1) % len(self._steps)]
            self._steps.append(self._next())
        return self._steps[step - 1]

    def _next(self) -> tuple[int, ...]:
        quotas = [int(exact) for exact in self._exact]
        owed = [
            before + exact - quota
            for before, exact, quota in zip(self._owed, self._exact, quotas, strict=True)
        ]
        most_owed = sorted(range(len(owed)), key=lambda task: (-owed[task], task))
        for task in most_owed[: self._groups - sum(quotas)]:
            quotas[task] += 1
            owed[task] -= 1
        self._owed = owed
        return tuple(quotas)
