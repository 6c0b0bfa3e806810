"""What the coordinator has counted and measured since it started; only `earned` is durable.

`status` and the dashboard show these figures. Nothing is decided here.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.cluster.earned import Earned
from echo2d.core.cluster.events import Note
from echo2d.core.cluster.learner_time import RECENT_MAX, LearnerTime
from echo2d.core.cluster.step_history import RunTotals, StepHistory
from echo2d.core.cluster.worker_quality import WorkerQualities
from echo2d.core.protocol.trajectory import StepFigures, StoredGroup, TrajectoryRecord

# The newest different faults that are kept; older ones are in the log.
FAULTS_SHOWN_MAX = 32
# A fault is one line for a person.
FAULT_CHARS_MAX = 300


def printable(text: str, chars_max: int) -> str:
    """A peer's text, made safe for a terminal and for one line of a log."""
    return "".join(char if char.isprintable() else " " for char in text[:chars_max])


# --- the sizes of versions, and what the seed has sent of them

# Versions whose bytes and seed_copies are kept.
VERSIONS_MEASURED_MAX = 64


class SentVersions:
    """Bytes of versions since the coordinator started; only for the newest ones there are figures by version."""

    def __init__(self) -> None:
        # Sums over all versions: bytes as encoded, and bytes of the snapshots.
        self.wire_bytes = self.full_bytes = 0
        # By version: bytes as encoded, and bytes of the snapshot.
        self.by_version: dict[int, tuple[int, int]] = {}
        # By version: bytes that the seed sent per byte of the version. The version measured last comes last.
        self.seed_copies: dict[int, float] = {}
        # Bytes that the seed sent, of any form.
        self.seed_bytes = 0

    def encoded(self, version: int, wire_bytes: int, full_bytes: int) -> None:
        """The form of a version that spreads is whole at the seed."""
        self.wire_bytes += wire_bytes
        self.full_bytes += full_bytes
        self.by_version.pop(version, None)
        self.by_version[version] = wire_bytes, full_bytes
        keep_newest(self.by_version, VERSIONS_MEASURED_MAX)

    def seed_sent(self, version: int, copies: float) -> None:
        """The seed has sent this many copies of the version's wire bytes."""
        self.seed_copies.pop(version, None)
        self.seed_copies[version] = copies
        keep_newest(self.seed_copies, VERSIONS_MEASURED_MAX)

    def check(self) -> None:
        assert max(len(self.seed_copies), len(self.by_version)) <= VERSIONS_MEASURED_MAX


# --- everything that is counted


@dataclass(slots=True)
class FaultSeen:
    """When and how often one fault was seen."""

    at: float  # the last time, in monotonic seconds
    times: int


def _is_flat(group: StoredGroup) -> bool:
    return len({each.reward for each in group.record.trajectories}) <= 1


class Statistics:
    """Counters and the newest measurements, in seconds and bytes, since the coordinator started."""

    def __init__(
        self,
        now: float = 0.0,
        measurements: Measurements | None = None,
        *,
        trained: int = 0,
        dropped: int = 0,
        earned: Earned | None = None,
    ) -> None:
        """trained, dropped: trajectories of the run before this start. earned: that of the run's workers."""
        # The time of the event that is being handled.
        self.now = now
        self._trained_before, self._dropped_before = trained, dropped
        # The measurements from which decisions are made.
        self.measurements = measurements or Measurements(1)
        self.earned = earned or Earned()
        # How the learner spends its time, and the sizes of versions.
        self.learner, self.sent = LearnerTime(), SentVersions()
        # What workers' answers were worth, by worker.
        self.qualities = WorkerQualities()
        # A summary of each step, for the curves of the run.
        self.step_history = StepHistory()
        # The newest durations of train steps.
        self.t_train_s: deque[float] = deque(maxlen=RECENT_MAX)
        # The newest T_verify and T_bcast: seconds until the last worker had verified a version, and served it.
        self.t_verify_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.t_bcast_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.refit_pause_s: deque[float] = deque(maxlen=RECENT_MAX)
        # The newest times in which KV caches were computed again.
        self.recompute_s: deque[float] = deque(maxlen=RECENT_MAX)
        # The newest times for which workers stood still for a version.
        self.still_s: deque[float] = deque(maxlen=RECENT_MAX)
        # By task, how long its environment took for a step.
        self.tool_s: dict[str, deque[float]] = {}
        # Pairs of step and mean reward.
        self.batch_rewards: deque[tuple[int, float]] = deque(maxlen=RECENT_MAX)
        # For the same steps, the share of groups whose rewards were all the same.
        self.flat_groups: deque[float] = deque(maxlen=RECENT_MAX)
        # The newest faults, by kind and text; the newest comes last.
        self.faults: dict[tuple[str, str], FaultSeen] = {}
        # How many faults there were, by kind.
        self.fault_counts: Counter[str] = Counter()
        # Trained trajectories by their staleness.
        self.staleness: Counter[int] = Counter()
        # Groups, answers and tokens, by the reason why they, or their groups, were dropped.
        self.dropped_groups: Counter[str] = Counter()
        self.dropped_answers: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        # Results, by the reason why they were refused.
        self.refused_results: Counter[str] = Counter()
        self.trajectories_trained = self.trajectories_dropped = 0
        self.tokens_trained = self.tokens_accepted = 0
        # Unfinished samples that another worker continued, and their tokens.
        self.partials_handed_over = self.tokens_handed_over = 0
        # Tokens whose KV caches refits dropped.
        self.tokens_recomputed = 0
        self.versions_published = self.broadcasts = 0

    def fault(self, kind: str, text: str, group: GroupId | None = None) -> Note:
        """Count a fault and keep it among the newest ones. group: the group that it harms."""
        line = printable(text, FAULT_CHARS_MAX)
        before = self.faults.pop((kind, line), None)
        self.faults[kind, line] = FaultSeen(self.now, 1 if before is None else before.times + 1)
        keep_newest(self.faults, FAULTS_SHOWN_MAX)
        self.fault_counts[kind] += 1
        return Note(kind, line, group)

    @property
    def run_trained(self) -> int:
        """Trajectories that were trained on since the run began."""
        return self._trained_before + self.trajectories_trained

    @property
    def run_dropped(self) -> int:
        """Trajectories that were given up since the run began; a restart forgets those after the last commit."""
        return self._dropped_before + self.trajectories_dropped

    def trained(
        self,
        step: int,
        groups: Collection[StoredGroup],
        t_train_s: float,
        figures: StepFigures | None = None,
    ) -> None:
        """Batch `step` was committed for the first time."""
        records = [group.record for group in groups]
        trajectories = [trajectory for record in records for trajectory in record.trajectories]
        self.judged(trajectories, trained=True)
        self.t_train_s.append(t_train_s)
        self.measurements.discards.add(len(trajectories), 0)
        if t_train_s > 0:
            self.measurements.t_train.add(t_train_s)
            self.learner.trained(t_train_s, now=self.now)
        self.trajectories_trained += len(trajectories)
        self.tokens_trained += sum(trajectory.written for trajectory in trajectories)
        self.staleness.update(step - 1 - trajectory.version_min for trajectory in trajectories)
        if trajectories:
            self.batch_rewards.append(
                (step, sum(each.reward for each in trajectories) / len(trajectories))
            )
            self.flat_groups.append(sum(map(_is_flat, groups)) / len(groups))
        totals = RunTotals(
            self.now, self.tokens_accepted, self.trajectories_dropped, self.broadcasts
        )
        t_bcast_s = self.t_bcast_s[-1] if self.t_bcast_s else None
        self.step_history.trained(step, records, t_train_s, totals, t_bcast_s, figures)

    def judged(self, trajectories: Iterable[TrajectoryRecord], *, trained: bool) -> None:
        """Whole groups were trained on, or thrown away because they were not worth training on."""
        workers = [each.spans[-1].author for each in trajectories]
        self.measurements.yields.judged(workers, trained=trained)
        if trained:
            self.qualities.trained(workers)
            self.earned.trained(workers)

    def session_opened(self) -> None:
        """A session has begun: the time before does not count as waiting."""
        self.learner.session_opened()
        self.step_history.session_opened()

    def broadcast(
        self,
        t_bcast_s: float,
        workers: Iterable[PeerId],
        *,
        cold: bool,
        most_s: float | None = None,
        expected_s: float | None = None,
    ) -> None:
        """These workers serve a version, `t_bcast_s` after its publish.

        cold: it is their first one. most_s: seconds until most of them served it. expected_s: seconds
        until they should hold it, by its plan.
        """
        self.t_bcast_s.append(t_bcast_s)
        self.broadcasts += 1
        took_s = t_bcast_s if most_s is None else most_s
        if not cold:
            self.measurements.t_bcast.add(took_s)
            if expected_s is not None:
                self.measurements.late_s.append(max(0.0, took_s - expected_s))
        if (still_s := self.measurements.version_served(workers)) is not None:
            self.still_s.append(still_s)

    def paused(self, seconds: float) -> None:
        """A refit paused generation for this many seconds."""
        self.refit_pause_s.append(seconds)
        self.measurements.pause.add(seconds)

    def recomputed(self, tokens: int, seconds: float | None) -> None:
        """After a refit, KV caches of this many tokens are computed again. seconds: None if not known."""
        self.tokens_recomputed += tokens
        if seconds is not None:
            self.recompute_s.append(seconds)
            self.measurements.recompute.add(seconds)

    def environment_took(self, task: str, seconds: float) -> None:
        """The environment of this task has answered a turn after this many seconds."""
        self.tool_s.setdefault(task, deque(maxlen=RECENT_MAX)).append(seconds)

    def handed_over(self, tokens: int) -> None:
        """A lease continues from this many tokens; 0: it starts again."""
        self.partials_handed_over += tokens > 0
        self.tokens_handed_over += tokens

    def dropped(self, reason: str, trajectories: int, lengths: Sequence[int]) -> None:
        """A group was dropped. lengths: the tokens of each of its answers, finished or not."""
        self.dropped_groups[reason] += 1
        self.wasted(reason, trajectories, lengths)

    def wasted(self, reason: str, trajectories: int, lengths: Sequence[int]) -> None:
        """Answers, in whole groups or not, will not be trained on. lengths: as in `dropped`."""
        self.trajectories_dropped += trajectories
        self.measurements.discards.add(0, trajectories)
        self.dropped_answers[reason] += len(lengths)
        self.dropped_tokens[reason] += sum(lengths)

    @property
    def lengths(self) -> dict[str, float]:
        """Mean tokens of an answer, by "trained" or by the reason why it was dropped."""
        counts = {"trained": self.trajectories_trained, **self.dropped_answers}
        tokens = {"trained": self.tokens_trained, **self.dropped_tokens}
        return {kind: tokens[kind] / count for kind, count in counts.items() if count}

    def encoded(self, version: int, wire_bytes: int, full_bytes: int) -> None:
        """The spreading form of a version is whole at the seed."""
        self.measurements.wire_bytes.add(float(wire_bytes))
        self.sent.encoded(version, wire_bytes, full_bytes)

    def dissemination_bound(self, staleness_max: int) -> bool:
        """Whether even kappa = S + 1 train steps are shorter than a broadcast."""
        measured = self._measured()
        return measured is not None and (staleness_max + 1) * measured[0] <= measured[1]

    def _measured(self) -> tuple[float, float] | None:
        """The estimates of T_train and T_bcast; None until both are known."""
        t_train, t_bcast = self.measurements.t_train.estimate, self.measurements.t_bcast.estimate
        return None if t_train is None or t_bcast is None else (t_train.value, t_bcast.value)

    def check(self) -> None:
        self.step_history.check()
        self.sent.check()
        assert len(self.faults) <= FAULTS_SHOWN_MAX
        assert sum(self.staleness.values()) == self.trajectories_trained
