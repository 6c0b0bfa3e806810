"""Corrects the prices of pools when the learner waits longer than predicted.

    the mean bubble of the last RAISE_PERIODS publish periods exceeds the predicted one by EXCESS_MAX
        --> workers count for less: `factor` grows as if the missing share of time were missing throughput
    with the larger pool the bubble is not smaller
        --> the factor becomes what it was before, and is not raised again for VAIN_PERIODS
    the bubble is below the predicted one, or below CALM_BUBBLE, for CALM_PERIODS in a row
        --> the factor falls by RAISE_STEP, down to 1

The mean also shows a bubble that comes in bursts. Not here: whether more workers are worth their price (`pools`).
"""

from collections import deque
from dataclasses import dataclass, field

# Shares of the learner's time.
EXCESS_MAX, CALM_BUBBLE = 0.02, 0.002
# Publish periods.
RAISE_PERIODS, CALM_PERIODS, VAIN_PERIODS = 6, 8, 48
RAISE_STEP, RAISE_MAX = 0.02, 2.0
# A raise was in vain if the bubble fell by less than this share of the excess that it was to end.
FELL_MIN = 0.3


@dataclass(slots=True)
class TargetRaise:
    """See the module docstring."""

    # The estimated throughput of a pool, divided by the throughput that prices are computed with.
    factor: float = 1.0
    # The factor before the last raise.
    _before: float = 1.0
    # The mean bubble before the last raise, and the excess that the raise was to end; None: it has been judged.
    _tried: tuple[float, float] | None = None
    _newest: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RAISE_PERIODS))
    _calm: int = 0
    _pause: int = 0

    def look(self, bubble: float, predicted: float) -> bool:
        """A publish period is over. Returns whether the factor has changed. bubble, predicted: shares of the period."""
        factor = self.factor
        self._pause = max(0, self._pause - 1)
        self._calm = self._calm + 1 if bubble <= max(predicted, CALM_BUBBLE) else 0
        if self._calm == CALM_PERIODS:
            self.factor, self._calm = max(1.0, self.factor - RAISE_STEP), 0
        self._newest.append((bubble, predicted))
        if len(self._newest) == RAISE_PERIODS:
            self._judge()
        return self.factor != factor

    def changed(self) -> None:
        """Other workers are active now: forget the bubbles of the former ones."""
        self._newest.clear()

    # --- inside

    def _judge(self) -> None:
        waited = sum([each[0] for each in self._newest]) / RAISE_PERIODS
        predicted = sum([each[1] for each in self._newest]) / RAISE_PERIODS
        if self._tried is not None:
            before, to_end = self._tried
            self._tried = None
            if before - waited < FELL_MIN * to_end:
                self.factor, self._pause = self._before, VAIN_PERIODS
                self._newest.clear()
                return
        excess = waited - predicted
        if excess > EXCESS_MAX and not self._pause:
            # A learner that waits for a tenth of its time needs a ninth more.
            raised = min(RAISE_MAX, self.factor / (1.0 - min(0.5, excess)))
            self._before, self.factor, self._tried = self.factor, raised, (waited, excess)
            self._newest.clear()

    def check(self) -> None:
        assert 1.0 <= self.factor <= RAISE_MAX
        assert self._calm < CALM_PERIODS
