"""How much of what each worker makes is worth training on.

A worker's *yield* is trained / judged, counted over the trajectories that were accepted from it and
then judged: trained on, or thrown away because all rewards of their group are the same (or because
the learner refused it). A trajectory that became too old, or shared a group with a failure, is not
counted. So a worker that sends short garbage has a high mu_i and a low yield, and their product is
what it adds to the run.

A worker's record begins with PRIOR judged trajectories at the pool's share. Old records fade. Not
here: which workers are activated by their yield (`demand`).
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.estimators import Share

# After this many judged trajectories a worker's own record counts as much as the pool's share.
PRIOR = 50.0
YIELD_MEMORY = 512.0  # judged trajectories after which an old record keeps 1/e of its weight
YIELD_WORKERS_MAX = 2048  # workers whose record is kept: the limit of peers


@dataclass(slots=True)
class _Record:
    """The trajectories of one worker; older ones fade.

    The pool's share changes while the model learns, and a worker that stands by makes nothing that
    could correct an old record; so only the quotient of the two numbers counts.
    """

    # How many were trained on.
    trained: float = 0.0
    # How many would have been trained on at the pool's share of that time.
    expected: float = 0.0


@dataclass(slots=True)
class Yields:
    """See the module docstring."""

    pool: Share = field(default_factory=Share)  # of all workers' trajectories: thrown away
    _used: float = 0.99  # share of all workers' trajectories: trained on
    _records: dict[PeerId, _Record] = field(default_factory=dict)

    def judged(self, workers: Iterable[PeerId], *, trained: bool) -> None:
        """Trajectories were trained on, or thrown away. workers: the worker of each."""
        for worker, count in Counter(workers).items():
            record = self._records.pop(worker, None) or _Record()
            keep = math.exp(-count / YIELD_MEMORY)
            record.trained = record.trained * keep + count * trained
            record.expected = record.expected * keep + count * self._used
            self._records[worker] = record
            self.pool.add(count * trained, count * (not trained))
        self._used = 1.0 - self.pool.estimate.value
        keep_newest(self._records, YIELD_WORKERS_MAX)

    def of(self, worker: PeerId) -> float:
        """The worker's yield, in (0, 1]."""
        record = self._records.get(worker)
        if record is None:
            return self._used
        prior = PRIOR * self._used
        return min(1.0, self._used * (record.trained + prior) / (record.expected + prior))

    def check(self) -> None:
        assert len(self._records) <= YIELD_WORKERS_MAX
        assert all(each.trained >= 0 <= each.expected for each in self._records.values())
