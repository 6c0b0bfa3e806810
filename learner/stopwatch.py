"""Where a learner's time goes: seconds by what it was doing, of the last train step and of the whole session."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

WAIT, TRAIN = "wait", "train"  # for batches; forward, backward and optimizer


class Stopwatch:
    """`with watch("publish"): ...`; blocks do not nest."""

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
        """Seconds since the last lap, by what was done."""
        lap, self._step = dict(self._step), defaultdict(float)
        for doing, seconds in lap.items():
            self._whole[doing] += seconds
        return lap

    def shares(self) -> dict[str, float]:
        """Of the time of all laps but waiting: T_train. What is not "train" is overhead. The largest first."""
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
