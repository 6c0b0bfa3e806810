"""What each worker's answers are worth: reward, length, and reward compared with others on the same prompts.

The trajectories of whole, scored groups count, whatever happens to the group later. Older ones fade.
The learner adds how far its own forward pass is from what the worker reported, for the trajectories
that it trained on. A person can see here which worker differs from the others; nothing is decided by
these figures.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.trajectory import TrajectoryRecord, TrajectoryScore

QUALITY_MEMORY = 512  # trajectories after which an old one keeps 1/e of its weight
QUALITY_WORKERS_MAX = 2048
# In the mean of z, one trajectory counts as no further off than this: where the model is nearly
# certain of every token, the rounding of an honest engine can make z arbitrarily large.
LEARNER_Z_MAX = 10.0


@dataclass(slots=True)
class WorkerQuality:
    """Numbers of a worker's trajectories, and means over them."""

    scored: int = 0
    # Means over the `scored` trajectories.
    reward: float = 0.0
    tokens: float = 0.0
    compared: int = 0
    # Mean over the `compared` ones: the reward minus the mean reward of other workers' samples of the
    # same prompt; None: the worker never shared a prompt.
    above: float | None = None
    learned: int = 0
    # Means over the `learned` ones, which the learner scored (`TrajectoryScore`); None: it scored none.
    learner_k: float | None = None
    learner_z: float | None = None
    # How many trajectories were trained on.
    trained: int = 0


class WorkerQualities:
    """See the module docstring."""

    def __init__(self) -> None:
        self._of: dict[PeerId, WorkerQuality] = {}

    def of(self, worker: PeerId) -> WorkerQuality | None:
        return self._of.get(worker)

    def trained(self, workers: Iterable[PeerId]) -> None:
        """A batch is committed. workers: the worker of each of its trajectories."""
        for worker, count in Counter(workers).items():
            found = self._of.get(worker)
            if found is not None:
                found.trained += count

    def scored(self, trajectories: Iterable[TrajectoryRecord]) -> None:
        """A group is whole and scored."""
        whole = [
            (each.spans[-1].author, each.reward, len(each.tokens) // 4) for each in trajectories
        ]
        total, of = 0.0, dict[PeerId, list[float]]()
        for worker, reward, _ in whole:
            total += reward
            of.setdefault(worker, []).append(reward)
        for worker, reward, tokens in whole:
            found = self._of.get(worker) or self._of.setdefault(worker, WorkerQuality())
            found.scored += 1
            share = 1 / min(found.scored, QUALITY_MEMORY)
            found.reward += share * (reward - found.reward)
            found.tokens += share * (tokens - found.tokens)
            others = len(whole) - len(of[worker])
            if others:
                above = reward - (total - sum(of[worker])) / others
                found.compared += 1
                before = found.above or 0.0
                found.above = before + (above - before) / min(found.compared, QUALITY_MEMORY)
        keep_newest(self._of, QUALITY_WORKERS_MAX)

    def scored_by_learner(self, scored: Iterable[tuple[TrajectoryRecord, TrajectoryScore]]) -> None:
        """The learner trained on these for the first time, and scored them.

        A trajectory that several workers wrote says nothing about one of them.
        """
        for trajectory, score in scored:
            worker = trajectory.worker
            if any(span.author != worker for span in trajectory.spans):
                continue
            found = self._of.get(worker) or self._of.setdefault(worker, WorkerQuality())
            found.learned += 1
            share = 1 / min(found.learned, QUALITY_MEMORY)
            z = min(LEARNER_Z_MAX, max(-LEARNER_Z_MAX, score.z))
            k_before, z_before = found.learner_k or 0.0, found.learner_z or 0.0
            found.learner_k = k_before + share * (score.k - k_before)
            found.learner_z = z_before + share * (z - z_before)
        keep_newest(self._of, QUALITY_WORKERS_MAX)
