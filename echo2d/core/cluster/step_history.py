"""One record for each train step; the curves of the dashboard are made from these records.

The newest RECENT_STEPS_MAX are kept. The process around the core writes them to a log, because they are
not durable here.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from echo2d.core.protocol.trajectory import GroupRecord, StepFigures

# A few steps may be committed before the process has asked for their summaries.
RECENT_STEPS_MAX = 256
# Lines of a curve that a reader can tell apart: parts of the reward, and tags, in the order of their names.
CURVE_LINES_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary(StepFigures):
    """One train step. Durations are in seconds; None: not known."""

    step: int
    # Means over its trajectories.
    reward: float | None
    staleness: float | None
    trajectories: int
    # Tokens that were trained on.
    tokens: int
    t_train_s: float
    # The next four are about the time since the previous commit. How long the learner did not train.
    wait_s: float | None
    # Tokens of accepted answers.
    tokens_per_s: float | None
    # Trajectories that were thrown away.
    dropped: int
    # T_bcast of the newest broadcast that has ended.
    t_bcast_s: float | None
    # Means of the reward's parts, named "task/part" in a step of several tasks. Like `reward_by_tag`, it has the first
    # CURVE_LINES_MAX names.
    parts: Mapping[str, float] = field(default_factory=dict)
    # Mean rewards of the prompts with a tag, such as "level=3".
    reward_by_tag: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Counters of the run at one moment."""

    at: float
    tokens_accepted: int
    dropped: int
    broadcasts: int  # that have ended


class StepHistory:
    """See the module docstring."""

    def __init__(self) -> None:
        self._steps: deque[StepSummary] = deque(maxlen=RECENT_STEPS_MAX)
        self._before: RunTotals | None = None

    def session_opened(self) -> None:
        """A session has begun: the time since the last commit says nothing about the next step."""
        self._before = None

    def trained(
        self,
        step: int,
        groups: Sequence[GroupRecord],
        t_train_s: float,
        totals: RunTotals,
        t_bcast_s: float | None,
        figures: StepFigures | None = None,
    ) -> None:
        """Batch `step` is committed. t_bcast_s: T_bcast of the newest broadcast, however long ago it ended."""
        before, self._before = self._before, totals
        period_s = None if before is None else totals.at - before.at
        accepted = None if before is None else totals.tokens_accepted - before.tokens_accepted
        spread = before is not None and totals.broadcasts > before.broadcasts
        trajectories = [each for group in groups for each in group.trajectories]
        several = len({each.source.task for each in trajectories}) > 1
        reward = staleness = 0.0
        tokens, count = 0, len(trajectories)
        for each in trajectories:
            reward += each.reward
            staleness += step - 1 - each.version_min
            tokens += each.written
        self._steps.append(
            StepSummary(
                step=step,
                reward=reward / count if count else None,
                staleness=staleness / count if count else None,
                trajectories=count,
                tokens=tokens,
                t_train_s=t_train_s,
                wait_s=None if period_s is None else max(0.0, period_s - t_train_s),
                tokens_per_s=accepted / period_s if accepted is not None and period_s else None,
                dropped=0 if before is None else totals.dropped - before.dropped,
                t_bcast_s=t_bcast_s if spread else None,
                parts=_means(
                    (f"{each.source.task}/{part.name}" if several else part.name, part.value)
                    for each in trajectories
                    for part in each.reward_parts
                ),
                reward_by_tag=_means(
                    (f"{tag.name}={tag.value}", each.reward)
                    for group in groups
                    for tag in group.tags
                    for each in group.trajectories
                ),
                **asdict(figures or StepFigures()),
            )
        )

    def of(self, step: int) -> StepSummary | None:
        """The summary of a step; the newer one, if the step was trained twice."""
        return next((each for each in reversed(self._steps) if each.step == step), None)

    def check(self) -> None:
        assert len(self._steps) <= RECENT_STEPS_MAX


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of each name's values, of the first CURVE_LINES_MAX names."""
    found: dict[str, list[float]] = {}
    for name, value in values:
        found.setdefault(name, []).append(value)
    return {name: sum(found[name]) / len(found[name]) for name in sorted(found)[:CURVE_LINES_MAX]}
