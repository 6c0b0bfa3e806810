"""Collects what a demo run measured, and judges whether the run kept its promises."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echo2d.core.capacity.estimators import quantile

_GAIN_MIN = 0.15  # held-out greedy accuracy of the last version minus that of version 0
STALE_SHARE_MIN = 0.10  # share of trained trajectories with staleness >= 1: they prove the overlap
GAIN_MIN_CHAOS = 0.10  # takes the place of _GAIN_MIN in runs in which processes were killed
SEED_COPIES_MAX = 1.5  # in a chain the seed sends each byte about once


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of durations in seconds."""

    p50: float | None
    p95: float | None
    p99: float | None

    @staticmethod
    def of(values: Sequence[float]) -> "Quantiles":
        return Quantiles(*(quantile(values, share) for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The final state of one worker. digest_ok: whether the weights in its engine's memory are those of its version."""

    id: str
    version: int | None
    digest_ok: bool


@dataclass(frozen=True, slots=True)
class Trajectories:
    trained: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Kill:
    """One `kill -9`. at_s: since the demo began. recovery_s: until the process had recovered; None:
    it never did.
    """

    kind: str
    name: str
    step: int
    at_s: float
    recovery_s: float | None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The object that `echo2d demo --json` prints at the end. Seconds, bytes, shares in 0..1.

    accuracy: greedy accuracy of version 0 and of the last version on 200 fixed held-out prompts. reward: mean of the
    first and of the last tenth of the steps. bubble_ratio: share of the time for which the learner waited for data,
    without the first step (start-up). seed_copies: bytes that the seed sent per byte of a version, mean over versions.
    steps_again: steps that were trained more than once because the learner was killed. batches_changed: how many of
    these steps were not trained on the same batch.
    """

    steps: int
    accuracy_first: float
    accuracy_last: float
    reward_first: float
    reward_last: float
    max_staleness: int
    staleness_bound: int
    staleness_histogram: dict[int, int]
    bubble_ratio: float
    t_train_s: float
    t_bcast_s: Quantiles
    refit_pause_s: Quantiles
    tokens_per_s: float
    seed_copies: float
    wire_bytes: int
    full_bytes: int
    trajectories: Trajectories
    versions_published: int
    wall_s: float
    workers: tuple[WorkerEnd, ...]
    steps_again: int = 0
    batches_changed: int = 0
    kills: tuple[Kill, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def broken_promises(self, *, judge_accuracy: bool) -> list[str]:
        """The broken promises in words. judge_accuracy: the run has its full length, so it must reach the gain."""
        gain = self.accuracy_last - self.accuracy_first
        stale = sum(
            count for staleness, count in self.staleness_histogram.items() if staleness >= 1
        )
        gain_min = GAIN_MIN_CHAOS if self.kills else _GAIN_MIN
        stuck = [kill.name for kill in self.kills if kill.recovery_s is None]
        late = [
            worker.id
            for worker in self.workers
            if worker.version != self.steps or not worker.digest_ok
        ]
        broken = {
            f"held-out accuracy rose by {gain:.3f}, not {gain_min}": judge_accuracy
            and gain < gain_min,
            f"a trajectory of staleness {self.max_staleness} was trained on, S = {self.staleness_bound}": (
                self.max_staleness > self.staleness_bound
            ),
            f"only {stale} of {self.trajectories.trained} trajectories overlapped training": (
                judge_accuracy
                and self.staleness_bound > 0
                and stale < STALE_SHARE_MIN * self.trajectories.trained
            ),
            f"the seed sent {self.seed_copies:.2f} copies, not {SEED_COPIES_MAX}": self.seed_copies
            > SEED_COPIES_MAX,
            f"not on version {self.steps} with the right weights: {', '.join(late)}": bool(late)
            or not self.workers,
            f"{self.batches_changed} steps were trained again on another batch": self.batches_changed
            > 0,
            f"never came back: {', '.join(stuck)}": bool(stuck),
        }
        return [promise for promise, is_broken in broken.items() if is_broken]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the learner's rows in the order written; a half-written row is skipped."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the learner's rows by step; the last row of a step counts."""
    rows = {row["step"]: row for row in read_rows(path)}
    return [rows[step] for step in sorted(rows)]


def trained_again(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Count the steps that were trained more than once, and how many of these got another batch."""
    batches: dict[int, list[str]] = {}
    for row in rows:
        batches.setdefault(row["step"], []).append(row["batch"])
    return sum(len(each) > 1 for each in batches.values()), sum(
        len(set(each)) > 1 for each in batches.values()
    )


def add_up(lives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the last statuses of all coordinator processes into one status of the run. Each process counts from 0."""
    total = dict(lives[-1])
    for name in ("versions_published", "wire_bytes", "full_bytes"):
        total[name] = sum(life[name] for life in lives)
    for name in ("t_bcast_s", "refit_pause_s"):
        total[name] = [value for life in lives for value in life[name]]
    total["trajectories"] = {
        name: sum(life["trajectories"][name] for life in lives) for name in total["trajectories"]
    }
    total["seed_copies"] = {
        version: copies for life in lives for version, copies in life["seed_copies"].items()
    }
    return total


def staleness_histogram(rows: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Trained trajectories by staleness, over all steps."""
    total: Counter[int] = Counter()
    for row in rows:
        total.update({int(staleness): count for staleness, count in row["staleness"].items()})
    return dict(sorted(total.items()))


def bubble_ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of the time for which the learner waited for data. The first step is left out, because the workers were
    still starting.
    """
    waited = sum(float(row["wait_s"]) for row in rows[1:])
    trained = sum(float(row["t_train_s"]) for row in rows[1:])
    return waited / (waited + trained) if waited + trained else 0.0


def tenth(rows: Sequence[Mapping[str, Any]], *, last: bool) -> float:
    """Mean reward of the first or last tenth of the steps (at least one step)."""
    count = max(1, len(rows) // 10)
    part = rows[-count:] if last else rows[:count]
    return sum(float(row["reward_mean"]) for row in part) / len(part)
