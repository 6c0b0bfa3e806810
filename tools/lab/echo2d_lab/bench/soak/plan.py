"""The troubles of a run in `echo2d bench soak`, drawn from a seed: when they happen, and to which process.

    |-- troubles of all kinds --|count|-- troubles that leave the coordinator alive --|count|
    0                          T/3                                                    T

The coordinator is killed only before the first count, so that both counts are of one process. Troubles that
empty histories and queues come in the first half of a part (EARLY), so that these are equally full at both
counts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from echo2d.errors import OperatorFault

TroubleKind = Literal[
    "kill_worker",  # kill -9 of a real worker; it is started again
    "freeze_worker",  # SIGSTOP of a real worker, and SIGCONT
    "kill_learner",  # it ends in the middle of a step, and resumes at its checkpoint
    "kill_seed",
    "kill_tasks",  # kill -9 of the process that makes prompts and rewards
    "revoke",  # a token of two scripted workers
    "other_build",  # a worker with another protocol dials
    "bomb",  # a worker sends messages that are expensive to refuse
    "upgrade",  # half of the scripted workers come back with the next build, or again with this one
    "kill_coordinator",
]
EARLY: frozenset[TroubleKind] = frozenset({"upgrade", "kill_coordinator"})
# How often each kind comes, relative to the others.
WEIGHTS: dict[TroubleKind, float] = {
    "kill_worker": 3,
    "freeze_worker": 2,
    "kill_learner": 2,
    "kill_seed": 2,
    "kill_tasks": 2,
    "revoke": 2,
    "other_build": 2,
    "bomb": 1,
    "upgrade": 1,
    "kill_coordinator": 2,
}
GAP_S = (15.0, 45.0)  # smallest and largest time between the beginnings of two troubles
# A trouble and its alerts are over after this time, so no trouble begins within it before a count.
OVER_S = 100.0
FIRST_COUNT = 1 / 3
MINUTES_MIN = 12.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """at_s: since the load began, without the counts. draw: in [0, 1), decides which process it strikes."""

    at_s: float
    kind: TroubleKind
    draw: float


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The options of `echo2d bench soak`. rate: trajectories/s of all scripted workers together."""

    minutes: float = 60.0
    scripted: int = 300
    real: int = 4
    rate: float = 20.0
    rng_seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes < MINUTES_MIN:
            raise OperatorFault(
                f"--minutes: expected at least {MINUTES_MIN:g}, for troubles before each of two "
                f"counts; found {self.minutes:g}"
            )

    @property
    def ends_s(self) -> tuple[float, float]:
        """When each of the two counts begins."""
        return 60 * self.minutes * FIRST_COUNT, 60 * self.minutes

    def troubles(self, part: Literal[0, 1]) -> list[Trouble]:
        """The troubles before the first count, or between the two; one of each kind comes first."""
        return list(self._drawn(part))

    def _drawn(self, part: Literal[0, 1]) -> Iterator[Trouble]:
        rng = random.Random(f"{self.rng_seed} {part}")
        begin_s, end_s = (0.0, self.ends_s[0]) if part == 0 else self.ends_s
        kinds = [kind for kind in WEIGHTS if part == 0 or kind != "kill_coordinator"]
        early = [kind for kind in kinds if kind in EARLY]
        late = [kind for kind in kinds if kind not in EARLY]
        # pop() takes the last one.
        first = rng.sample(late, len(late)) + rng.sample(early, len(early))
        at_s = begin_s + rng.uniform(*GAP_S)
        while at_s < end_s - OVER_S:
            drawn = kinds if at_s < (begin_s + end_s) / 2 else late
            kind = first.pop() if first else rng.choices(drawn, [WEIGHTS[k] for k in drawn])[0]
            yield Trouble(at_s, kind, rng.random())
            at_s += rng.uniform(*GAP_S)
