"""What a learner keeps of a train step that it left: the optimizer steps that were applied.

A checkpoint holds it as plain values. A learner that resumes trains only the groups that those steps did
not cover. Its report to the coordinator and its metrics cover all groups; only the routers' load covers
just the groups that it trained itself.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from echo2d.client import TrajectoryScore
from echo2d.learner.metrics.staleness import SUMS, Tally, empty_tally
from echo2d.learner.ranks.ranks import Ranks

# Called on all ranks before each micro-batch, with three numbers: micro-batches done, micro-batches in the
# step, and optimizer steps applied. Returns whether the ranks leave the step.
Leaves = Callable[[int, int, int], bool]


@dataclass(frozen=True, slots=True)
class BegunStep:
    """The optimizer steps that are applied, over all ranks."""

    parts: int  # number of these optimizer steps
    groups: frozenset[int]  # the groups that they trained, or skipped as poison
    norm: float  # the largest gradient norm
    poisoned: int
    operations: float  # of forward and backward
    tally: Tally
    scores: tuple[TrajectoryScore, ...]  # on rank 0 only
    seconds: float = 0.0  # spent on the step

    def plain(self) -> dict[str, Any]:
        """The fields as values and tensors that `torch.load(weights_only=True)` accepts."""
        tally = self.tally
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "groups": sorted(self.groups),
            "tally": [each.cpu() for each in (tally.sums_s, tally.ratio_max_s, tally.loss)],
            "scores": [asdict(each) for each in self.scores],
        }

    @staticmethod
    def of(plain: dict[str, Any]) -> "BegunStep":
        """Make it from what `plain` returned."""
        changed: dict[str, Any] = {
            "groups": frozenset(plain["groups"]),
            "tally": Tally(*plain["tally"]),
            "scores": tuple(TrajectoryScore(**each) for each in plain["scores"]),
        }
        return BegunStep(**{**plain, **changed})

    def tally_of(self, staleness_max: int, ranks: Ranks) -> Tally:
        """What this rank adds to the tally of the parts that are trained now.

        The kept tally already covers all ranks, so only the first rank adds it. A tally of another
        staleness bound, or of a build with other sums, does not fit and is left out.
        """
        count, kept = staleness_max + 1, self.tally
        if not ranks.leads or kept.sums_s.shape != (len(SUMS), count):
            return empty_tally(count, ranks.device)
        parts = (each.to(ranks.device) for each in (kept.sums_s, kept.ratio_max_s, kept.loss))
        return Tally(*parts)


class StepLeftError(Exception):
    """The learner left the step between two micro-batches. begun: the optimizer steps that are
    applied; None: none.
    """

    def __init__(self, begun: BegunStep | None) -> None:
        super().__init__("the step was left")
        self.begun = begun


def finishes(_done: int, _total: int, _applied: int) -> bool:
    """A `Leaves` for a learner that finishes every step."""
    return False
