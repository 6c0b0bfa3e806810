"""The learner of `echo2d learn --sft`: instead of publishing a version, it measures the version's held-out loss.

The loop, checkpoints and ranks are those of `train`; the batches are those of `sft`.
"""

import logging
import time
from itertools import chain
from typing import cast

from echo2d.learner.batch.packing import PackedAnswer, answers_of
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.begun_step import StepLeftError
from echo2d.learner.sft import SftSource
from echo2d.learner.train import Learner

log = logging.getLogger("echo2d.learner")


class SftLearner(Learner):
    """See the module docstring."""

    # All that is about sessions, rewards, and the policy that wrote the answers.
    left_out = frozenset({
        "epoch", "batch", "digest", "reward", "reward_mean", "cut_off", "tasks", "staleness", "by_staleness", "bubble",
        "published", "ratio_mean", "ratio_max", "clip_share", "corrected_share", "kl", "kl_base", "kl_rollout_nats",
    })  # fmt: skip
    result = "with more sft.epochs or sft.steps, --resume goes on"

    _held_out: list[PackedAnswer] | None = None
    _step_began_at = 0.0

    @property
    def _source(self) -> SftSource:
        """Only rank 0 has it."""
        return cast("SftSource", self._coordinator)

    @property
    def _tracked_as(self) -> str:
        """The rows decide the run's name, and not the learning rate or the model."""
        return f"{self._run_id}-{self._identity.rpartition('-')[2]}"

    def _fitted(self, config: LearnerConfig) -> LearnerConfig:
        return self._source.fitting(super()._fitted(config))

    def _publish(self, version: int) -> None:
        """Measure the held-out loss, on all ranks. If one is told to stop, all leave the measurement: the checkpoint
        comes after it, and a learner that resumes measures again.
        """
        began_at, self._published = time.monotonic(), version
        if self._held_out is None:
            batch = self._ranks.share(lambda: self._source.held_out)
            groups = [] if batch is None else answers_of(batch, self._rules, self._advantages)
            self._held_out = [*chain.from_iterable(groups)]
        if not self._held_out or self._stop.told:
            return
        try:
            loss = self._policy.mean_loss(self._held_out, self._stop.ask)
        except StepLeftError:
            return
        self._known = {"heldout_loss_nats": f"{loss:.4f}"}
        self._ranks.share(lambda: self._tracking.record({"step": version, "heldout_loss": loss}))
        if self._ranks.leads:
            log.info("evaluated step=%d heldout_loss_nats=%.4f", version, loss)
        # The measurement does not count as training time.
        self._step_began_at += time.monotonic() - began_at
