"""Notices that a task's rewards fail, before boxes have worked for nothing for long.

    fine --only failures for a while, not of one worker alone--> never succeeded yet: the run stops
      ^                              |                       +-> before: away
      |                              +--of one worker alone, and the expected answers are fine-->
      |                                                          that worker is set aside
      +----any reward succeeds---- away: no leases, the call is repeated with growing pauses
                                     +--AWAY_S_MAX--> the run stops: a judge may be away, but not for ever

Whose fault it is: a worker may write what breaks a scorer. So failures count only if they are of
several prompts, and of two workers, or of answers that no worker wrote: the expected answers of some
prompts, which are probed once. While a task is away, samples whose reward fails are held, and not
left out: their rewards are asked for again.
Not here: what a failure does to a group (`judge`), the probe itself (`runtime/coordinator/task_calls`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.work.events import ProbeRewards, RewardsProbed

# A task's rewards do not come if FAILURES_MAX fail without a success, or if none comes in the FAILING_S
# seconds after the first failure.
FAILURES_MAX, FAILING_S = 64, 45.0
# Of this many prompts, if the task has as many.
FAILED_PROMPTS_MIN = 8
FAILED_WORKERS_MIN = 2
# While a task is away: pauses between two calls, and the time after which the run stops.
PAUSE_S_MIN, PAUSE_S_MAX = 2.0, 60.0
AWAY_S_MAX = 1800.0
# Failures in a row of a task that has succeeded before, from which on an alert says so.
ALERT_FAILURES = 8
# Of the last LATELY failures: at so many, and such a share of the answers between them, an alert says so for
# LATELY_S, though rewards come, too.
LATELY, LATELY_MIN, LATELY_SHARE, LATELY_S = 64, 16, 0.01, 300.0

Sample = tuple[GroupId, int]
WatchVerdict = Literal["stop", "away", "set aside"]


@dataclass(slots=True)
class _OfTask:
    """failures, cursors, workers, since, reason: of those since the last success. probed: what the
    expected answers showed. prompts: how many were probed. timed: FAILING_S have passed. over: the
    run stops. held: samples that wait for a reward.
    """

    ever: bool
    failures: int = 0
    cursors: set[int] = field(default_factory=set)
    workers: set[PeerId] = field(default_factory=set)
    since: float = 0.0
    reason: str = ""
    probed: Literal["no", "asked", "fine", "failed"] = "no"
    prompts: int = FAILED_PROMPTS_MIN
    away_since: float | None = None
    first_away: float | None = None
    pause_s: float = PAUSE_S_MIN
    next_at: float = 0.0
    timed: bool = False
    over: bool = False
    held: dict[Sample, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailingRewards:
    """What the watch says of a task. failures: since the last success. ever: whether a reward has come
    before. stops_in_s: until the run stops; None: it goes on. retry_s: until the next try; None: the task is
    not away. share: of the answers between the last failures, those that failed.
    """

    failures: int
    ever: bool
    reason: str
    stops_in_s: float | None
    retry_s: float | None
    share: float = 1.0


class RewardWatch:
    """See the module docstring. `now` is monotonic seconds.

    alert: whether a success must be told: some task has failed, or has not succeeded yet. away: the
    tasks that get no leases. Both are read at every reward and lease.
    """

    def __init__(self, tasks: Iterable[str], *, succeeded: bool) -> None:
        self._of = {task: _OfTask(succeeded) for task in tasks}
        self.alert = not succeeded
        self.away: set[str] = set()
        self.set_aside: dict[PeerId, str] = {}
        # Of each task, its last failures: when, and of which group; and the reason of the last one.
        self._lately = {task: deque[tuple[float, GroupId]](maxlen=LATELY) for task in self._of}
        self._reason: dict[str, str] = {}

    # --- rewards

    def succeeded(self, task: str) -> list[Sample]:
        """A reward has come. Returns the held samples, whose rewards are to be asked for again."""
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
        """The task's code failed at an answer of this worker. Returns whether the sample is held."""
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
        """The tasks whose expected answers are to be probed now."""
        asked = []
        for task, of_task in self._of.items():
            if of_task.failures and of_task.probed == "no":
                of_task.probed = "asked"
                asked.append(ProbeRewards(task, FAILED_PROMPTS_MIN))
        return asked

    def probe_ended(self, event: RewardsProbed) -> None:
        """What became of the probe."""
        of_task = self._of[event.task]
        if not of_task.failures:
            return
        of_task.probed = "fine" if event.succeeded or not event.failed else "failed"
        of_task.prompts = min(FAILED_PROMPTS_MIN, event.failed + event.succeeded) or 1
        if of_task.probed == "failed":
            # They are other prompts than those of the answers, or the same: it does not matter which.
            of_task.cursors.update(range(-event.failed, 0))
            of_task.reason = event.reason or of_task.reason

    # --- verdicts

    def verdicts(self, *, now: float) -> Iterator[tuple[str, WatchVerdict, str]]:
        """Tasks, what is to be done about them, and why, for people."""
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
            # Before anything else: `wake_at` must not name a time that has passed.
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
        """No leases from now on."""
        of_task = self._of[task]
        of_task.away_since, of_task.next_at = now, now + of_task.pause_s
        of_task.first_away = of_task.first_away or now
        self.away.add(task)

    def put_aside(self, task: str) -> PeerId:
        """The only worker whose answers fail is set aside; returns it."""
        (worker,) = self._of[task].workers
        self.set_aside[worker] = self._of[task].reason
        self._of[task] = _OfTask(self._of[task].ever)
        self._lately[task].clear()
        return worker

    def retries(self, *, now: float) -> list[Sample]:
        """The held samples whose rewards are asked for now. A task that holds none gets leases again."""
        due = []
        for task in sorted(self.away):
            of_task = self._of[task]
            if now < of_task.next_at:
                continue
            of_task.pause_s = min(PAUSE_S_MAX, 2 * of_task.pause_s)
            of_task.next_at = now + of_task.pause_s
            if of_task.held:
                # Two held samples are asked about at each try. The oldest goes to the end: a single
                # answer must not decide.
                chosen = list(of_task.held)[:2]
                for sample in chosen:
                    of_task.held.pop(sample)
                    of_task.held[sample] = None
                due += chosen
            else:
                # Its groups are gone: new ones show whether it is back.
                self.away.discard(task)
                self._of[task] = _OfTask(of_task.ever, first_away=of_task.first_away)
        return due

    def forget(self, task: str, sample: Sample) -> None:
        """Its group is gone."""
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
        """None: the rewards of this task come."""
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
        """Failures between successes, which leave answers out that nobody looks at."""
        lately = self._lately[task]
        if len(lately) < LATELY_MIN or now > lately[-1][0] + LATELY_S:
            return None
        groups = [group for _, group in lately]
        share = len(lately) / ((max(groups) - min(groups) + 1) * group_size)
        if share < LATELY_SHARE:
            return None
        return FailingRewards(len(lately), True, self._reason[task], None, None, min(1.0, share))
