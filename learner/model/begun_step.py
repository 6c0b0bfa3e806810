"""What a learner that left a train step has to keep of it: the optimizer steps that were applied.

A checkpoint holds it as plain values. The learner that resumes trains the other groups of the batch
only, and tells the coordinator and the metrics about all of them, but for the load of routers.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from echo2d.client import TrajectoryScore
from echo2d.learner.metrics.staleness import SUMS, Tally, empty_tally
from echo2d.learner.ranks.ranks import Ranks

# Called before each micro-batch, on all ranks: the micro-batches done, all of the step, and the
# optimizer steps that are applied. Whether the ranks leave the step.
Leaves = Callable[[int, int, int], bool]


@dataclass(frozen=True, slots=True)
class BegunStep:
    """The optimizer steps that are applied, over all ranks.

    parts: their number. groups: what they trained, or skipped as poison. norm: the largest gradient
    norm. operations: of forward and backward. scores: on rank 0 alone. seconds: spent on the step.
    """

    parts: int
    groups: frozenset[int]
    norm: float
    poisoned: int
    operations: float
    tally: Tally
    scores: tuple[TrajectoryScore, ...]
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As values and tensors that `torch.load(weights_only=True)` accepts."""
        tally = self.tally
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "groups": sorted(self.groups),
            "tally": [each.cpu() for each in (tally.sums_s, tally.ratio_max_s, tally.loss)],
            "scores": [asdict(each) for each in self.scores],
        }

    @staticmethod
    def of(plain: dict[str, Any]) -> "BegunStep":
        """From what `plain` returned."""
        changed: dict[str, Any] = {
            "groups": frozenset(plain["groups"]),
            "tally": Tally(*plain["tally"]),
            "scores": tuple(TrajectoryScore(**each) for each in plain["scores"]),
        }
        return BegunStep(**{**plain, **changed})

    def tally_of(self, staleness_max: int, ranks: Ranks) -> Tally:
        """What this rank adds to the tally of the parts that are trained now.

        The tally is that of all ranks, so the first rank adds it and the others add nothing. One of
        another staleness bound, or of a build with other sums, does not fit and is left out.
        """
        count, kept = staleness_max + 1, self.tally
        if not ranks.leads or kept.sums_s.shape != (len(SUMS), count):
            return empty_tally(count, ranks.device)
        parts = (each.to(ranks.device) for each in (kept.sums_s, kept.ratio_max_s, kept.loss))
        return Tally(*parts)


class StepLeftError(Exception):
    """The learner left the step between two micro-batches. begun: what is applied of it; None:
    nothing.
    """

    def __init__(self, begun: BegunStep | None) -> None:
        super().__init__("the step was left")
        self.begun = begun


def finishes(_done: int, _total: int, _applied: int) -> bool:
    """A `Leaves` for a learner that finishes every step."""
    return False
