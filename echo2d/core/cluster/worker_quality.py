"""What each worker's answers are worth: reward, length, and reward against others on the same prompts.

Counted are the trajectories of whole, scored groups, whatever becomes of the group. Older ones fade.
For people who look for a worker that is not like the others; nothing is decided by it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.trajectory import TrajectoryRecord

MEMORY = 512  # trajectories after which an old one has lost all but 1/e
WORKERS_MAX = 1024


@dataclass(slots=True)
class WorkerQuality:
    """Means over a worker's trajectories. above: its reward minus the mean reward of other workers'
    samples of the same prompt; None: it never shared a prompt.
    """

    scored: int = 0
    reward: float = 0.0
    tokens: float = 0.0
    compared: int = 0
    above: float | None = None


class WorkerQualities:
    """See the module docstring."""

    def __init__(self) -> None:
        self._of: dict[PeerId, WorkerQuality] = {}

    def of(self, worker: PeerId) -> WorkerQuality | None:
        return self._of.get(worker)

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
            share = 1 / min(found.scored, MEMORY)
            found.reward += share * (reward - found.reward)
            found.tokens += share * (tokens - found.tokens)
            others = len(whole) - len(of[worker])
            if others:
                above = reward - (total - sum(of[worker])) / others
                found.compared += 1
                before = found.above or 0.0
                found.above = before + (above - before) / min(found.compared, MEMORY)
        keep_newest(self._of, WORKERS_MAX)
