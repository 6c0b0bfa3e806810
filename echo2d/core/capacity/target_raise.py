"""Raises the throughput that is aimed at where the learner waits although mu_min is met.

mu_min is a prediction; where it is too low, only the bubble shows it. Once a publish period:

    the learner waited for rollouts for more than BUBBLE_MAX of it,
    RAISE_PATIENCE periods in a row, and mu_pool was what was wanted     raise: mu_pool was not enough
    it waited for less than CALM_BUBBLE, CALM_PERIODS in a row     lower by RAISE_STEP, down to mu_min; then `calm`:
                                                                   a worker may go that mu_min does not need

A period in which the workers made less than was wanted says nothing of the prediction, so that the raise
does not grow while there is nobody to activate. Not here: who is activated, and whether that is worth
its price (`activation`).
"""

from dataclasses import dataclass

# A share of the learner's time.
BUBBLE_MAX, CALM_BUBBLE = 0.01, 0.002
# Periods in a row.
RAISE_PATIENCE, CALM_PERIODS = 3, 8
# By how much of mu_min the raise falls after a calm time.
RAISE_STEP = 0.02
# A larger raise would pay for something that more workers do not mend.
RAISE_MAX = 2.0


@dataclass(slots=True)
class TargetRaise:
    """factor: what is wanted, over mu_min. bubble: the mean of the periods that last raised it. calm: whether a calm
    time has just ended without anything to lower.
    """

    factor: float = 1.0
    bubble: float = 0.0
    calm: bool = False
    _before: float = 1.0
    _bubbles: tuple[float, ...] = ()
    _calm: int = 0

    def look(self, bubble: float, has: float) -> bool:
        """A period is over; returns whether more is wanted now.

        bubble: the share of the period for which the learner waited for rollouts. has: mu_pool over
        mu_min.
        """
        waited = bubble > BUBBLE_MAX and has >= self.factor
        self._bubbles = (*self._bubbles, bubble) if waited else ()
        self._calm = self._calm + 1 if bubble <= CALM_BUBBLE else 0
        self.calm = self._calm == CALM_PERIODS and self.factor == 1.0
        if self._calm == CALM_PERIODS:
            self.factor, self._calm = max(1.0, self.factor - RAISE_STEP), 0
        if len(self._bubbles) < RAISE_PATIENCE:
            return False
        self.bubble, self._bubbles = sum(self._bubbles) / RAISE_PATIENCE, ()
        # A learner that waits for a tenth of its time needs a ninth more.
        raised = min(RAISE_MAX, has / (1.0 - min(0.5, self.bubble)))
        self._before, self.factor = self.factor, max(self.factor, raised)
        return self.factor > self._before

    def undo(self) -> None:
        """The raise was not worth it."""
        self.factor = self._before

    def check(self) -> None:
        assert 1.0 <= self.factor <= RAISE_MAX
        assert len(self._bubbles) < RAISE_PATIENCE
        assert self._calm < CALM_PERIODS
