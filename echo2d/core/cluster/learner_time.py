"""How the learner spends its time: training, waiting, and what it waits for.

    commit --waits--> batch asked for --starves--> batch ready --trains--> commit
                                         `-- during a part of this time only rewards are missing from the batch

Not here: what the run does about it (`capacity`).
"""

from collections import deque
from typing import NamedTuple

# Measurements that are kept of each kind: more steps than any p95 here needs.
RECENT_MAX = 256
# The pace of a run is the mean over this many steps.
PACE_STEPS = 16


class _Step(NamedTuple):
    """Seconds of one train step, of its waiting, and of two parts of that; see `LearnerTime`."""

    trained_s: float
    waited_s: float
    starved_s: float
    unscored_s: float


class LearnerTime:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        # Sums over all steps except the first of each session: no commit shows when that step began.
        self.trained_s = self.waited_s = 0.0
        # The time for which it waited for a batch, and the part of that in which only rewards were missing.
        self.starved_s = self.unscored_s = 0.0
        self._steps: deque[_Step] = deque(maxlen=RECENT_MAX)
        # starved_s and unscored_s at the last commit, and the time of that commit; None: this session has had none.
        self._at_commit = (0.0, 0.0)
        self._committed_at: float | None = None
        # Since when it waits; None: it does not.
        self._starves_since: float | None = None
        self._lacks_rewards = False

    def trained(self, t_train_s: float, *, now: float) -> None:
        """The learner commits a step that it trained for `t_train_s`."""
        if self._committed_at is not None:
            waited_s = max(0.0, now - self._committed_at - t_train_s)
            self.trained_s += t_train_s
            self.waited_s += waited_s
            self._steps.append(_Step(t_train_s, waited_s, *self._since_commit()))
        self._committed_at, self._at_commit = now, (self.starved_s, self.unscored_s)

    def session_opened(self) -> None:
        """A session has begun: the time before does not count as waiting."""
        self._committed_at = None

    def waits(self, *, waits: bool, lacks_rewards: bool = False, now: float) -> None:
        """From now on the learner waits for its next batch, or not. lacks_rewards: the batch lacks only rewards."""
        self._starve(now)
        self._starves_since, self._lacks_rewards = now if waits else None, lacks_rewards

    def waited_for_rollouts_s(self, *, now: float) -> float:
        """For how long it has waited for a batch that lacked more than rewards."""
        self._starve(now)
        return self.starved_s - self.unscored_s

    @property
    def bubble_ratio(self) -> float | None:
        """The share of its time without training; None before the second step."""
        trained_s, waited_s, _, _ = self._newest(RECENT_MAX)
        return waited_s / (trained_s + waited_s) if trained_s else None

    @property
    def step_s(self) -> float | None:
        """Seconds from one commit to the next, mean of the newest steps; None before the second."""
        newest = list(self._steps)[-PACE_STEPS:]
        seconds = sum(each.trained_s + each.waited_s for each in newest)
        return seconds / len(newest) if newest else None

    def bubble(self, steps: int, *, now: float) -> float | None:
        """The share of its time for which it waited, in the last steps and since; None before the second step."""
        trained_s, waited_s, starved_s, _ = self._newest(steps)
        if not trained_s or self._committed_at is None:
            return None
        self._starve(now)
        now_s, _ = self._since_commit()
        return (starved_s + now_s) / (trained_s + waited_s + now_s)

    def unscored_share(self, steps: int, *, now: float) -> float:
        """The share of the waiting time of `bubble` in which only rewards were missing."""
        self._starve(now)
        now_s, unscored_now_s = self._since_commit()
        _, _, starved_s, unscored_s = self._newest(steps)
        starved_s += now_s
        return (unscored_s + unscored_now_s) / starved_s if starved_s else 0.0

    # --- inside

    def _starve(self, now: float) -> None:
        """Count the waiting time up to now."""
        if self._starves_since is not None:
            seconds, self._starves_since = now - self._starves_since, now
            self.starved_s += seconds
            self.unscored_s += seconds * self._lacks_rewards

    def _since_commit(self) -> tuple[float, float]:
        return self.starved_s - self._at_commit[0], self.unscored_s - self._at_commit[1]

    def _newest(self, steps: int) -> _Step:
        newest = list(self._steps)[-steps:]
        return _Step(*(sum(each[place] for each in newest) for place in range(4)))
