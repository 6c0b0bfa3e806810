"""Notices that a task's rewards fail, so that boxes do not work in vain for long.

    fine --only failures for a while, not of one worker alone--> never succeeded yet: the run stops
      ^                              |                       +-> before: away
      |                              +--of one worker alone, and the expected answers are fine-->
      |                                                          that worker is set aside
      +----any reward succeeds---- away: no leases, the call is repeated with growing pauses
                                     +--AWAY_S_MAX--> the run stops: a judge may be away, but not without end

A worker may write answers that break a scorer. So failures count only if they concern several prompts, and also either
two workers or the expected answers of some prompts: no worker wrote these, and they are probed once. While a task is
away, samples whose reward fails are held instead of left out, and their rewards are asked for again.
Not here: what a failure does to a group (`judge`), the probe itself (`runtime/coordinator/task_calls`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.work.events import ProbeRewards, RewardsProbed

# A task's rewards count as failing if FAILURES_MAX fail without a success, or if none succeeds in the FAILING_S
# seconds after the first failure.
FAILURES_MAX, FAILING_S = 64, 45.0
# The failures must concern at least this many prompts (or all, if the task has fewer), and this many workers.
FAILED_PROMPTS_MIN = 8
FAILED_WORKERS_MIN = 2
# While a task is away: pauses between two calls, and the time after which the run stops.
PAUSE_S_MIN, PAUSE_S_MAX = 2.0, 60.0
AWAY_S_MAX = 1800.0
# After this many failures in a row of a task that has succeeded before, there is an alert.
ALERT_FAILURES = 8
# The last LATELY failures are remembered. There is an alert for LATELY_S seconds, although other rewards succeed, if at
# least LATELY_MIN are remembered and they are at least LATELY_SHARE of the answers between the first and the last of
# them.
LATELY, LATELY_MIN, LATELY_SHARE, LATELY_S = 64, 16, 0.01, 300.0

Sample = tuple[GroupId, int]
WatchVerdict = Literal["stop", "away", "set aside"]


@dataclass(slots=True)
class _OfTask:
    """The rewards of one task since the last success."""

    ever: bool  # whether a reward was ever computed
    failures: int = 0
    cursors: set[int] = field(default_factory=set)  # of prompts whose rewards failed
    workers: set[PeerId] = field(default_factory=set)  # whose answers' rewards failed
    since: float = 0.0  # the time of the first failure
    reason: str = ""  # of the last failure
    probed: Literal["no", "asked", "fine", "failed"] = "no"  # what the expected answers showed
    prompts: int = FAILED_PROMPTS_MIN  # how many were probed
    away_since: float | None = None
    first_away: float | None = None
    pause_s: float = PAUSE_S_MIN
    next_at: float = 0.0
    timed: bool = False  # whether FAILING_S have passed
    over: bool = False  # whether the run stops
    held: dict[Sample, None] = field(default_factory=dict)  # samples that wait for a reward


@dataclass(frozen=True, slots=True)
class FailingRewards:
    """The status of a task whose rewards fail."""

    failures: int  # since the last success
    ever: bool  # whether a reward was ever computed
    reason: str
    stops_in_s: float | None  # seconds until the run stops; None: it continues
    retry_s: float | None  # seconds until the next try; None: the task is not away
    # Of the answers between the last failures, the share whose reward failed.
    share: float = 1.0


class RewardWatch:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, tasks: Iterable[str], *, succeeded: bool) -> None:
        self._of = {task: _OfTask(succeeded) for task in tasks}
        # Whether `succeeded` must be called: some task has failed, or has not succeeded yet.
        self.alert = not succeeded
        # The tasks that get no leases. This and `alert` are read at every reward and lease.
        self.away: set[str] = set()
        self.set_aside: dict[PeerId, str] = {}  # the workers that were set aside, and why
        # The last failures of each task (time and group), and the reason of the last one.
        self._lately = {task: deque[tuple[float, GroupId]](maxlen=LATELY) for task in self._of}
        self._reason: dict[str, str] = {}

    # --- rewards

    def succeeded(self, task: str) -> list[Sample]:
        """A reward was computed. Returns the held samples, whose rewards must be asked for again."""
        held = list(self._of[task].held)
        if self._of[task].away_since is not None:
            self._lately[task].clear()
        self._of[task] = _OfTask(ever=True)
        self.away.discard(task)
        self.alert = any(each.failures or not each.ever for each in self._of.values())
        return held

    def failed(
        self, task: str, sample: Sample, cursor: int, worker: PeerId, reason: str, *, now: float
    ) -> bool:
        """The task's code failed on an answer of this worker. Returns whether the sample is held."""
        of_task, self.alert = self._of[task], True
        if not of_task.failures:
            of_task.since = now
        of_task.failures += 1
        of_task.reason = self._reason[task] = reason
        self._lately[task].append((now, sample[0]))
        if len(of_task.cursors) < FAILED_PROMPTS_MIN:
            of_task.cursors.add(cursor)
        if len(of_task.workers) < FAILED_WORKERS_MIN:
            of_task.workers.add(worker)
        if of_task.away_since is not None:
            of_task.held[sample] = None
        return of_task.away_since is not None

    def probes(self) -> list[ProbeRewards]:
        """Ask for the probes of expected answers that are due now."""
        asked = []
        for task, of_task in self._of.items():
            if of_task.failures and of_task.probed == "no":
                of_task.probed = "asked"
                asked.append(ProbeRewards(task, FAILED_PROMPTS_MIN))
        return asked

    def probe_ended(self, event: RewardsProbed) -> None:
        """Take in the result of a probe."""
        of_task = self._of[event.task]
        if not of_task.failures:
            return
        of_task.probed = "fine" if event.succeeded or not event.failed else "failed"
        of_task.prompts = min(FAILED_PROMPTS_MIN, event.failed + event.succeeded) or 1
        if of_task.probed == "failed":
            # It does not matter whether these are the prompts of the failed answers or other prompts.
            of_task.cursors.update(range(-event.failed, 0))
            of_task.reason = event.reason or of_task.reason

    # --- verdicts

    def verdicts(self, *, now: float) -> Iterator[tuple[str, WatchVerdict, str]]:
        """Yield tasks, what must be done about each, and why (for people)."""
        for task, of_task in self._of.items():
            if of_task.over:
                continue
            since = of_task.away_since
            if since is not None:
                of_task.over = now >= (of_task.first_away or since) + AWAY_S_MAX
                if of_task.over:
                    minutes = f"{AWAY_S_MAX / 60:.0f} minutes"
                    yield task, "stop", f"they have failed for {minutes}: {of_task.reason}"
                continue
            if not of_task.failures:
                continue
            # This comes first, because `wake_at` must not return a time that has passed.
            of_task.timed = now >= of_task.since + FAILING_S
            several = len(of_task.workers) >= FAILED_WORKERS_MIN
            if of_task.probed == "asked" and not several:
                continue
            if of_task.failures < FAILURES_MAX and not of_task.timed:
                continue
            if len(of_task.cursors) < of_task.prompts:
                continue
            if of_task.probed == "failed" or several:
                of_task.over = not of_task.ever
                yield task, "stop" if of_task.over else "away", of_task.reason
            else:
                yield task, "set aside", of_task.reason

    def go_away(self, task: str, *, now: float) -> None:
        """Give the task no leases from now on."""
        of_task = self._of[task]
        of_task.away_since, of_task.next_at = now, now + of_task.pause_s
        of_task.first_away = of_task.first_away or now
        self.away.add(task)

    def put_aside(self, task: str) -> PeerId:
        """Set aside the only worker whose answers fail, and return it."""
        (worker,) = self._of[task].workers
        self.set_aside[worker] = self._of[task].reason
        self._of[task] = _OfTask(self._of[task].ever)
        self._lately[task].clear()
        return worker

    def retries(self, *, now: float) -> list[Sample]:
        """The held samples whose rewards must be asked for now. A task that holds none gets leases again."""
        due = []
        for task in sorted(self.away):
            of_task = self._of[task]
            if now < of_task.next_at:
                continue
            of_task.pause_s = min(PAUSE_S_MAX, 2 * of_task.pause_s)
            of_task.next_at = now + of_task.pause_s
            if of_task.held:
                # Each try asks for the rewards of the two oldest held samples, which then go to the end: a
                # single answer must not decide.
                chosen = list(of_task.held)[:2]
                for sample in chosen:
                    of_task.held.pop(sample)
                    of_task.held[sample] = None
                due += chosen
            else:
                # The groups of its held samples are gone: new groups show whether its rewards succeed again.
                self.away.discard(task)
                self._of[task] = _OfTask(of_task.ever, first_away=of_task.first_away)
        return due

    def forget(self, task: str, sample: Sample) -> None:
        """Forget a held sample, because its group is gone."""
        self._of[task].held.pop(sample, None)

    def wake_at(self) -> float | None:
        """When `verdicts` or `retries` have something to do."""
        if not self.alert:
            return None
        times = []
        for of_task in self._of.values():
            if of_task.over:
                continue
            if of_task.away_since is not None:
                times.append(min(of_task.next_at, of_task.away_since + AWAY_S_MAX))
            elif of_task.failures and not of_task.timed:
                times.append(of_task.since + FAILING_S)
        return min(times, default=None)

    def status(self, task: str, *, group_size: int, now: float) -> FailingRewards | None:
        """The status of this task; None: its rewards do not fail."""
        of_task, away = self._of[task], self._of[task].away_since
        if away is None and of_task.failures < (ALERT_FAILURES if of_task.ever else 1):
            return self._now_and_then(task, group_size, now)
        ends_at = of_task.since + FAILING_S
        if away is not None:
            ends_at = (of_task.first_away or away) + AWAY_S_MAX
        return FailingRewards(
            of_task.failures,
            of_task.ever,
            of_task.reason,
            max(0.0, ends_at - now),
            None if away is None else max(0.0, of_task.next_at - now),
        )

    def _now_and_then(self, task: str, group_size: int, now: float) -> FailingRewards | None:
        """Report failures between successes, which would otherwise leave answers out unnoticed."""
        lately = self._lately[task]
        if len(lately) < LATELY_MIN or now > lately[-1][0] + LATELY_S:
            return None
        groups = [group for _, group in lately]
        share = len(lately) / ((max(groups) - min(groups) + 1) * group_size)
        if share < LATELY_SHARE:
            return None
        return FailingRewards(len(lately), True, self._reason[task], None, None, min(1.0, share))
