"""The policy's report about a train step."""

from dataclasses import dataclass

from echo2d.client import StepFigures, TrajectoryScore
from echo2d.learner.metrics.staleness import Means


@dataclass(frozen=True, slots=True)
class Effort:
    """The cost of a step."""

    lr: float
    operations: float  # floating-point operations of all ranks
    peak: float | None  # operations per second that all devices together could do; None: not known
    # The peak since the start: of this rank's GPU, or of the process if it has none.
    memory_gib: float

    def mfu(self, t_train_s: float) -> float | None:
        """The share of the devices' peak that was used; None: the peak is not known."""
        return self.operations / t_train_s / self.peak if self.peak else None


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """How a mixture of experts spread the tokens of a step."""

    # Tokens of the busiest expert, divided by the mean of its layer, in the layer where this is largest.
    load_max: float
    unused: float  # the share of experts, over all layers, that got no token
    # Entropy of the routers' distributions, divided by that of a uniform one; mean over tokens and layers.
    entropy: float
    replayed: float  # the share of the tokens in the loss whose experts were those of the engine


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of a train step."""

    loss: float
    grad_norm: float  # the largest of the optimizer steps
    means: Means  # over all tokens
    staleness: dict[int, Means]
    # Of the trajectories of all ranks, on rank 0; empty on other ranks.
    scores: tuple[TrajectoryScore, ...]
    effort: Effort
    poisoned: int = 0  # groups because of which an optimizer step after the first was skipped
    router: RouterLoad | None = None  # None for a dense model

    def figures(self, t_train_s: float, truncated: float) -> StepFigures:
        """The figures for the coordinator; without trained tokens there is only `truncated`."""
        means = self.means
        if not means.tokens:
            return StepFigures(truncated=truncated)
        return StepFigures(
            means.entropy, means.kl, means.kl_base, self.grad_norm, truncated, self.loss,
            self.effort.mfu(t_train_s), means.kl_teacher,
        )  # fmt: skip
