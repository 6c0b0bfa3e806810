"""A learner on a spot machine: how much longer its steps take because the machine is sometimes taken away.

    trains --machine taken--> away for restart_s --> trains again, from its newest checkpoint

After a notice the learner writes a checkpoint at once, so only the step in progress is lost: half a step on average.
Without a notice, or if it is too short, the steps since the newest checkpoint are also lost. A lost step is trained
again on the same batch. While the learner has no machine, it costs nothing; workers cost money all the time.
"""

from dataclasses import dataclass

from echo2d.plan.fleet.spec import LearnerTable


@dataclass(frozen=True, slots=True)
class SpotLearner:
    """Averages over a long run."""

    t_train_s: float  # seconds of a step with its part of a checkpoint
    longer: float  # mean time of a step, over its time on a host that is never taken away
    paid: float  # the share of the whole time for which the host is paid

    @staticmethod
    def of(learner: LearnerTable) -> "SpotLearner":
        t_train_s = learner.t_train_s + learner.checkpoint_s / learner.checkpoint_every
        if not learner.stay_h:
            return SpotLearner(t_train_s, 1.0, 1.0)
        stay_s = 3600.0 * learner.stay_h
        lost_s = t_train_s * (
            0.5 + (0.0 if is_warned(learner) else (learner.checkpoint_every - 1) / 2)
        )
        if lost_s >= stay_s:
            return SpotLearner(t_train_s, float("inf"), 1.0)
        whole_s = stay_s + learner.restart_s
        return SpotLearner(t_train_s, whole_s / (stay_s - lost_s), stay_s / whole_s)


def is_warned(learner: LearnerTable) -> bool:
    """Whether a notice comes, and is long enough for a checkpoint."""
    return learner.notice_s > 0 and learner.notice_s >= learner.checkpoint_s
