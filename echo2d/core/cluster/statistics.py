"""What the coordinator has counted and measured since it started; of it, only `earned` is durable.

`status` and the dashboard show it. Nothing is decided here.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.cluster.earned import Earned
from echo2d.core.cluster.events import Note
from echo2d.core.cluster.step_history import RunTotals, StepHistory
from echo2d.core.cluster.worker_quality import WorkerQualities
from echo2d.core.protocol.trajectory import StepFigures, StoredGroup, TrajectoryRecord

# Measurements kept of each kind: more steps than any p95 here needs.
RECENT_MAX = 256
# The newest different faults; older ones are in the log.
FAULTS_SHOWN_MAX = 32
# Versions whose bytes and seed_copies are kept.
VERSIONS_MEASURED_MAX = 64
# The pace of a run is that of so many steps.
PACE_STEPS = 16
# One line for a person.
FAULT_CHARS_MAX = 300


def printable(text: str, chars_max: int) -> str:
    """A peer's text, made safe for a terminal and for one line of a log."""
    return "".join(char if char.isprintable() else " " for char in text[:chars_max])


@dataclass(slots=True)
class FaultSeen:
    """One fault, and how often it was seen. at: the last time, in monotonic seconds."""

    at: float
    times: int


class _Step(NamedTuple):
    """Seconds of one train step; see `Statistics`."""

    trained_s: float
    waited_s: float
    starved_s: float
    unscored_s: float


def _is_flat(group: StoredGroup) -> bool:
    return len({each.reward for each in group.record.trajectories}) <= 1


class Statistics:
    """Counters and the newest measurements, in seconds and bytes.

    now: the time of the event that is being handled. measurements: what decisions are made from.
    faults: by kind and text, the newest last. staleness: trained trajectories by their staleness.
    learner_train_s, learner_wait_s: sums over all steps but the first of each session, which began
    at no commit. starved_s: the time for which the learner waited for a batch. unscored_s: the part
    of it in which only rewards were missing. version_bytes: by version, on the wire and in full.
    tool_s: by task, how long its environment took for a step.
    dropped_answers, dropped_tokens: by the reason why they, or their groups, were dropped.
    flat_groups: of each step in `batch_rewards`, the share of groups whose rewards were all the same.
    trained, dropped: trajectories of the run before this start. earned: of the run, by worker.
    """

    def __init__(
        self,
        now: float = 0.0,
        measurements: Measurements | None = None,
        *,
        trained: int = 0,
        dropped: int = 0,
        earned: Earned | None = None,
    ) -> None:
        self.now = now
        self._trained_before, self._dropped_before = trained, dropped
        self.measurements = measurements or Measurements(1)
        self.earned = earned or Earned()
        self.learner_train_s = self.learner_wait_s = 0.0
        self.starved_s = self.unscored_s = 0.0
        self._steps: deque[_Step] = deque(maxlen=RECENT_MAX)
        self._at_commit = (0.0, 0.0)  # starved_s, unscored_s
        self._starves_since: float | None = None
        self._lacks_rewards = False
        self._committed_at: float | None = None
        self.t_train_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.t_verify_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.t_bcast_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.refit_pause_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.recompute_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.still_s: deque[float] = deque(maxlen=RECENT_MAX)
        self.tool_s: dict[str, deque[float]] = {}
        self.qualities = WorkerQualities()
        self.batch_rewards: deque[tuple[int, float]] = deque(maxlen=RECENT_MAX)
        self.flat_groups: deque[float] = deque(maxlen=RECENT_MAX)
        self.faults: dict[tuple[str, str], FaultSeen] = {}
        self.fault_counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.dropped_groups: Counter[str] = Counter()
        self.dropped_answers: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.refused_results: Counter[str] = Counter()
        self.seed_copies: dict[int, float] = {}
        self.seed_sent_bytes = 0
        self.trajectories_trained = 0
        self.trajectories_dropped = 0
        self.tokens_trained = 0
        self.tokens_accepted = 0
        self.partials_handed_over = 0
        self.tokens_handed_over = 0
        self.tokens_recomputed = 0
        self.versions_published = 0
        self.broadcasts = 0
        self.step_history = StepHistory()
        self.wire_bytes = 0
        self.full_bytes = 0
        self.version_bytes: dict[int, tuple[int, int]] = {}

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
        """Trajectories that were given up since the run began, by the last commit before a restart."""
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
            self._stepped(t_train_s)
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
        """Whole groups were trained on, or thrown away because they were not worth it."""
        workers = [each.spans[-1].author for each in trajectories]
        self.measurements.yields.judged(workers, trained=trained)
        if trained:
            self.qualities.trained(workers)
            self.earned.trained(workers)

    def _stepped(self, t_train_s: float) -> None:
        self.measurements.t_train.add(t_train_s)
        if self._committed_at is not None:
            wait_s = max(0.0, self.now - self._committed_at - t_train_s)
            self.learner_train_s += t_train_s
            self.learner_wait_s += wait_s
            self._steps.append(_Step(t_train_s, wait_s, *self._since_commit()))
        self._committed_at, self._at_commit = self.now, (self.starved_s, self.unscored_s)

    def session_opened(self) -> None:
        """A session has begun: the time before does not count as waiting."""
        self._committed_at = None
        self.step_history.session_opened()

    def learner_waits(self, *, waits: bool, lacks_rewards: bool = False) -> None:
        """From now on the learner waits for its next batch, or not.

        lacks_rewards: the batch lacks nothing else.
        """
        self._starve()
        self._starves_since, self._lacks_rewards = self.now if waits else None, lacks_rewards

    @property
    def waited_for_rollouts_s(self) -> float:
        """For how long the learner has waited for a batch that lacked more than rewards."""
        self._starve()
        return self.starved_s - self.unscored_s

    def _starve(self) -> None:
        """Count the waiting time up to now."""
        if self._starves_since is not None:
            seconds, self._starves_since = self.now - self._starves_since, self.now
            self.starved_s += seconds
            self.unscored_s += seconds * self._lacks_rewards

    def _since_commit(self) -> tuple[float, float]:
        return self.starved_s - self._at_commit[0], self.unscored_s - self._at_commit[1]

    @property
    def bubble_ratio(self) -> float | None:
        """The share of the learner's time without training; None before the second step."""
        trained_s, waited_s, _, _ = self._newest(RECENT_MAX)
        return waited_s / (trained_s + waited_s) if trained_s else None

    @property
    def step_s(self) -> float | None:
        """Seconds from one commit to the next, mean of the newest steps; None before the second."""
        newest = list(self._steps)[-PACE_STEPS:]
        seconds = sum(each.trained_s + each.waited_s for each in newest)
        return seconds / len(newest) if newest else None

    def bubble(self, steps: int) -> float | None:
        """The share of the learner's time that it waited for data, in the last steps and since.

        None before the second step.
        """
        trained_s, waited_s, starved_s, _ = self._newest(steps)
        if not trained_s or self._committed_at is None:
            return None
        self._starve()
        now_s, _ = self._since_commit()
        return (starved_s + now_s) / (trained_s + waited_s + now_s)

    def unscored_share(self, steps: int) -> float:
        """The share of the waiting time of `bubble` in which only rewards were missing."""
        self._starve()
        now_s, unscored_now_s = self._since_commit()
        _, _, starved_s, unscored_s = self._newest(steps)
        starved_s += now_s
        return (unscored_s + unscored_now_s) / starved_s if starved_s else 0.0

    def _newest(self, steps: int) -> _Step:
        newest = list(self._steps)[-steps:]
        return _Step(*(sum(each[place] for each in newest) for place in range(4)))

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

        cold: it is their first one. most_s: when most of them served it. expected_s: when they were
        to hold it, by its plan.
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
        """A refit paused generation for so long."""
        self.refit_pause_s.append(seconds)
        self.measurements.pause.add(seconds)

    def recomputed(self, tokens: int, seconds: float | None) -> None:
        """After a refit, KV caches of so many tokens are computed again; None: in unknown time."""
        self.tokens_recomputed += tokens
        if seconds is not None:
            self.recompute_s.append(seconds)
            self.measurements.recompute.add(seconds)

    def environment_took(self, task: str, seconds: float) -> None:
        """The environment of this task has answered a turn after so long."""
        self.tool_s.setdefault(task, deque(maxlen=RECENT_MAX)).append(seconds)

    def handed_over(self, tokens: int) -> None:
        """A lease continues from this many tokens; 0: it starts anew."""
        self.partials_handed_over += tokens > 0
        self.tokens_handed_over += tokens

    def dropped(self, reason: str, trajectories: int, lengths: Sequence[int]) -> None:
        """A group was dropped. lengths: in tokens, of its answers, finished or not."""
        self.dropped_groups[reason] += 1
        self.wasted(reason, trajectories, lengths)

    def wasted(self, reason: str, trajectories: int, lengths: Sequence[int]) -> None:
        """Answers, whole groups or not, will not be trained on. lengths: as in `dropped`."""
        self.trajectories_dropped += trajectories
        self.measurements.discards.add(0, trajectories)
        self.dropped_answers[reason] += len(lengths)
        self.dropped_tokens[reason] += sum(lengths)

    @property
    def lengths(self) -> dict[str, float]:
        """Mean tokens of an answer that was "trained", or dropped, by reason."""
        counts = {"trained": self.trajectories_trained, **self.dropped_answers}
        tokens = {"trained": self.tokens_trained, **self.dropped_tokens}
        return {kind: tokens[kind] / count for kind, count in counts.items() if count}

    def seed_sent_more(self, sent_bytes: int) -> None:
        """The seed has sent so many more bytes, of any form."""
        self.seed_sent_bytes += sent_bytes

    def seed_sent(self, version: int, copies: float) -> None:
        """The seed has sent this many copies of the version's wire bytes."""
        self.seed_copies.pop(version, None)
        self.seed_copies[version] = copies
        keep_newest(self.seed_copies, VERSIONS_MEASURED_MAX)

    def encoded(self, version: int, wire_bytes: int, full_bytes: int) -> None:
        """The spreading form of a version is whole at the seed."""
        self.measurements.wire_bytes.add(float(wire_bytes))
        self.wire_bytes += wire_bytes
        self.full_bytes += full_bytes
        self.version_bytes.pop(version, None)
        self.version_bytes[version] = wire_bytes, full_bytes
        keep_newest(self.version_bytes, VERSIONS_MEASURED_MAX)

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
        assert max(len(self.seed_copies), len(self.version_bytes)) <= VERSIONS_MEASURED_MAX
        assert len(self.faults) <= FAULTS_SHOWN_MAX
        assert sum(self.staleness.values()) == self.trajectories_trained
