"""Decide whether a learner that was told to stop finishes its train step or leaves it.

    told to stop ----> the step and its checkpoint end within learner.stop_within_s: finish the step
                 \\---> they do not: leave the step between two micro-batches

The estimate uses the pace of micro-batches and the time that the last checkpoint took. While one of
them is not known, the step is left: leaving a step costs less than a checkpoint that comes too late.
Ranks decide together, so that all of them leave before the same micro-batch.
"""

import math
import time
from collections.abc import Callable

from echo2d.learner.ranks.ranks import Ranks

# The findings of a rank. The highest finding of all ranks decides.
GOES_ON, FINISHES, LEAVES = range(3)


class StopClock:
    """Measures how long steps take, and asks all ranks before each micro-batch.

    stopped_at: when this rank was told to stop, in monotonic seconds; None: it was not.
    """

    def __init__(
        self, ranks: Ranks, within_s: float, stopped_at: Callable[[], float | None]
    ) -> None:
        self._ranks, self._within_s, self._stopped_at = ranks, within_s, stopped_at
        self._began_at = 0.0
        self._micro = 0
        self._each_s: float | None = None  # of a micro-batch of the last step
        # Whether any rank was told to stop, as of the last call of `leaves`, `ask` or `end_step`.
        self.told = False

    def begin_step(self) -> None:
        """Call this before the first micro-batch of a step."""
        self._began_at, self._micro = time.monotonic(), 0

    def end_step(self) -> None:
        """Call this on every rank once a step is trained. Sets `told`."""
        if self._micro:
            self._each_s = (time.monotonic() - self._began_at) / self._micro
        self.ask()

    def ask(self, *_: int) -> bool:
        """Whether any rank was told to stop. Every rank must make the same calls. Sets `told`."""
        self.told = bool(self._ranks.highest(int(self._stopped_at() is not None)))
        return self.told

    def leaves(
        self, done: int, total: int, *, save_s: float | None, busy_s: float, may: bool = True
    ) -> bool:
        """Whether all ranks leave the present step now. Every rank must make the same calls.

        done, total: micro-batches of the step. save_s: seconds that a checkpoint takes, None if not
        known. busy_s: seconds until the checkpoint that is being saved is complete. may: False if the
        step must be finished.
        """
        self._micro = total
        found = self._ranks.highest(self._finding(done, total, save_s, busy_s))
        self.told = found != GOES_ON
        return may and found == LEAVES

    def _finding(self, done: int, total: int, save_s: float | None, busy_s: float) -> int:
        stopped_at = self._stopped_at()
        if stopped_at is None:
            return GOES_ON
        now = time.monotonic()
        paces = [(now - self._began_at) / done] if done else []
        paces += [] if self._each_s is None else [self._each_s]
        step_s = max(paces) * (total - done) if paces else math.inf
        ends_at = now + max(step_s, busy_s) + (math.inf if save_s is None else save_s)
        return FINISHES if ends_at <= stopped_at + self._within_s else LEAVES
