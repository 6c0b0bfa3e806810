"""Measure where a learner's time goes: seconds by activity, for the last train step and the whole
session.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

WAIT, TRAIN = "wait", "train"  # waiting for batches; forward, backward and optimizer


class Stopwatch:
    """Use it as `with watch("publish"): ...`. Blocks must not nest, or time counts twice."""

    def __init__(self) -> None:
        self._step: defaultdict[str, float] = defaultdict(float)
        self._whole: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._step[doing] += time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap, by activity, and start a new lap."""
        lap, self._step = dict(self._step), defaultdict(float)
        for doing, seconds in lap.items():
            self._whole[doing] += seconds
        return lap

    def shares(self) -> dict[str, float]:
        """Shares of T_train, which is the time of all laps except waiting; largest first. All
        except "train" is overhead.
        """
        worked = {doing: seconds for doing, seconds in self._whole.items() if doing != WAIT}
        total = sum(worked.values())
        return {
            doing: worked[doing] / total
            for doing in sorted(worked, key=worked.__getitem__, reverse=True)
        }

    def __str__(self) -> str:
        shares = self.shares()
        parts = " ".join(f"{doing}={share:.2%}" for doing, share in shares.items())
        return f"overhead={1 - shares.get(TRAIN, 0.0):.2%} of T_train: {parts}"
