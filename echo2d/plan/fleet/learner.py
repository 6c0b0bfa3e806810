"""The learner of a simulated fleet: it waits for a batch, trains, commits, and may lose its host.

    waits --batch n is full--> trains --committed--> waits
      +------------ host taken ---+--> away for restart_s, then trains the lost steps again --> waits

Batches and commits are real (`core/work/training/staleness`). A lost step is trained again on the same batch, which
needs no worker, and its version stays valid. Not here: what is published (`versions`).
"""

import random
from collections.abc import Callable

from echo2d.core.cluster.statistics import Statistics
from echo2d.core.work.training.staleness import Staleness
from echo2d.plan.fleet.spec import LearnerTable
from echo2d.plan.fleet.spot_learner import is_warned
from echo2d.plan.kernel.virtual_clock import Clock


class FleetLearner:
    """Times are seconds of the clock.

    waited_s: how long the learner has waited for batches. away_s: how long it had no host; this time costs nothing.
    losses: how often its host was taken. committed: is called with every committed step.
    """

    def __init__(
        self,
        table: LearnerTable,
        train_sigma: float,
        chance: random.Random,
        clock: Clock,
        *,
        staleness: Staleness,
        statistics: Statistics,
        committed: Callable[[int], None],
    ) -> None:
        self._table, self._sigma, self._chance, self._clock = table, train_sigma, chance, clock
        self._staleness, self._statistics, self._committed = staleness, statistics, committed
        self._waits_since: float | None = 0.0
        self._waited_s = self.away_s = 0.0
        self.losses = 0
        # _checkpoint: the step of the newest checkpoint. _begun: rises when a step begins and when the host is lost, so
        # a step that was in progress at a loss is recognised and never ends.
        self._checkpoint = self._begun = 0
        self._schedule_loss()

    @property
    def waited_s(self) -> float:
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else self._clock.now - since)

    def train(self) -> None:
        """Take the next batch if it is full and no step runs."""
        step = self._staleness.committed + 1
        if self._waits_since is None or self._staleness.batch(step) is None:
            return
        self._set_waiting(now=False)
        drawn = self._chance.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
        t_train_s = self._table.t_train_s * drawn + self._checkpoint_s(step)
        self._begun += 1
        self._clock.after(t_train_s, self._finish_step, step, t_train_s, self._begun)

    # --- inside

    def _set_waiting(self, *, now: bool) -> None:
        self._waited_s, self._waits_since = self.waited_s, self._clock.now if now else None
        self._statistics.now = self._clock.now
        self._statistics.learner.waits(waits=now, now=self._statistics.now)

    def _checkpoint_s(self, step: int) -> float:
        return 0.0 if step % self._table.checkpoint_every else self._table.checkpoint_s

    def _finish_step(self, step: int, t_train_s: float, begun: int) -> None:
        if begun != self._begun:
            return
        batch = self._staleness.batch(step)
        assert batch is not None
        self._statistics.now = self._clock.now
        self._staleness.commit(step)
        self._set_waiting(now=True)
        self._statistics.trained(step, batch.groups, t_train_s)
        self._staleness.keep_checkpoint(step)
        if step % self._table.checkpoint_every == 0:
            self._checkpoint = step
        self._committed(step)

    def _schedule_loss(self) -> None:
        if self._table.stay_h:
            stay_s = self._chance.expovariate(1.0 / (3600.0 * self._table.stay_h))
            self._clock.after(stay_s, self._lose_host)

    def _lose_host(self) -> None:
        self._begun += 1
        self._set_waiting(now=False)
        self.losses += 1
        if is_warned(self._table):
            self._checkpoint = self._staleness.committed
        self.away_s += self._table.restart_s
        self._clock.after(self._table.restart_s, self._restart)

    def _restart(self) -> None:
        """Train the lost steps again on the new host. This host may also be taken."""
        self._schedule_loss()
        lost = self._staleness.committed - self._checkpoint
        self._clock.after(lost * self._table.t_train_s, self._continue, self._begun)

    def _continue(self, begun: int) -> None:
        if begun == self._begun:
            self._statistics.session_opened()
            self._set_waiting(now=True)
            self.train()
