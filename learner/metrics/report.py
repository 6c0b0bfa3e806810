"""What the policy says about a train step."""

from dataclasses import dataclass

from echo2d.client import StepFigures, TrajectoryScore
from echo2d.learner.metrics.staleness import Means


@dataclass(frozen=True, slots=True)
class Effort:
    """What a step took. operations: floating-point operations of all ranks. peak: of these, how many per second all
    devices could do, if it is known. memory_gib: the peak of this rank's device since the start, without a GPU
    of the process.
    """

    lr: float
    operations: float
    peak: float | None
    memory_gib: float


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """How a mixture of experts spread the tokens of a step. load_max: the tokens of the busiest expert over the mean
    of its layer, in the layer where that is largest. unused: the share of experts, over all layers, that got no token.
    entropy: of the routers' distributions, over that of a uniform one; the mean over tokens and layers.
    """

    load_max: float
    unused: float
    entropy: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """Loss, largest gradient norm of the optimizer steps, and means over all tokens and by
    staleness.

    scores: of the trajectories of all ranks, on rank 0; nothing elsewhere. poisoned: groups for which an
    optimizer step beyond the first was skipped. router: None for a dense model.
    """

    loss: float
    grad_norm: float
    means: Means
    staleness: dict[int, Means]
    scores: tuple[TrajectoryScore, ...]
    effort: Effort
    poisoned: int = 0
    router: RouterLoad | None = None

    @property
    def figures(self) -> StepFigures:
        """What the coordinator is told for its curves. A step without trained tokens measured nothing."""
        means = self.means
        if not means.tokens:
            return StepFigures()
        return StepFigures(means.entropy, means.kl, means.kl_base, self.grad_norm)
