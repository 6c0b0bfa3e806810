"""Fault schedules: the rules of a run, its workers, and what goes wrong when. All of it drawn from one rng_seed.

Until `heal_s` anything may happen; then everything that is to go on is running again and nothing more goes wrong, but
for the workers that are bad for ever: one of them must not hold up the others (I6).
"""

import random
from dataclasses import dataclass
from typing import Literal

from echo2d.core.base.ids import RunId
from echo2d.core.cluster.rules import RunRules
from echo2d.registry import SHAPES
from echo2d.sim.run.engine import STOP, VOCAB

FaultKind = Literal[
    "kill_coordinator",  # kill -9, and the seed with it; it comes back
    "kill_in_commit",  # the same in the middle of a turn: before its transaction, after it, or between its actions
    "pause_coordinator",
    "jump_coordinator",
    "kill_seed",
    "encode_fails",
    "kill_worker",
    "vanish_worker",  # its machine is gone, nobody is told
    "stop_worker",  # in order
    "pause_worker",
    "jump_worker",
    "cut",  # its control link is reset
    "block",  # a partition: neither coordinator nor peers
    "cut_links",  # to its peers
    "hang",  # its engine makes no token
    "revoke",  # its credential is void, for good
    "kill_learner",
    "second_learner",
    "lose_call",  # an answer to the learner gets lost
    "rewards_fail",
]
Badness = Literal["", "lies", "hangs", "dead", "slow"]

KINDS: tuple[tuple[FaultKind, int], ...] = (
    ("kill_coordinator", 2), ("kill_in_commit", 4), ("pause_coordinator", 1), ("jump_coordinator", 1),
    ("kill_seed", 1), ("encode_fails", 1), ("kill_worker", 3), ("vanish_worker", 1), ("stop_worker", 1),
    ("pause_worker", 2), ("jump_worker", 1), ("cut", 4), ("block", 3), ("cut_links", 2), ("hang", 1), ("revoke", 1),
    ("kill_learner", 4), ("second_learner", 1), ("lose_call", 2), ("rewards_fail", 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """slots 0: a relay peer. lies: share of its results; faulty: of its refits and applies. bad: so for ever."""

    slots: int
    latency_s: float
    token_s: float
    lies: float
    faulty: float
    joins_at_s: float
    bad: Badness


@dataclass(frozen=True, slots=True)
class RunFault:
    """worker: the number of the one that is struck, where the kind strikes one."""

    at_s: float
    kind: FaultKind
    worker: int
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """train_s: of one step. refusals: share of batches in which the learner refuses a group."""

    rng_seed: int
    rules: RunRules
    workers: tuple[WorkerSpec, ...]
    faults: tuple[RunFault, ...]
    heal_s: float
    train_s: float
    checkpoint_every: int
    refusals: float

    @staticmethod
    def draw(rng_seed: int) -> "Schedule":
        rng = random.Random(rng_seed)
        workers = _workers(rng)
        heal_s = rng.uniform(15.0, 60.0)
        return Schedule(
            rng_seed=rng_seed,
            rules=_rules(rng, random.Random(rng_seed ^ 0x1E46).choice([8, 8, 24])),
            workers=workers,
            faults=_faults(rng, len(workers), heal_s),
            heal_s=heal_s,
            train_s=rng.choice([0.3, 1.0, 3.0]),
            checkpoint_every=rng.randint(1, 4),
            refusals=rng.choice([0.0, 0.0, 0.2]),
        )


def _rules(rng: random.Random, max_new_tokens: int) -> RunRules:
    staleness_max = rng.randint(0, 3)
    trajectories, group_size = rng.choice([(4, 2), (2, 2), (6, 3), (3, 1), (8, 4)])
    return RunRules(
        run_id=RunId("run-1"),
        staleness_max=staleness_max,
        publish_every=rng.choice([None, rng.randint(1, staleness_max + 1)]),
        trajectories_per_step=trajectories,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        stop_token_ids=(STOP,),
        vocab_size=VOCAB,
        over_stale=rng.choice(["drop", "drop", "mask"]),
        filter_zero_variance=rng.random() < 0.7,
        shape=rng.choice(list(SHAPES)),
        chains=rng.randint(1, 2),
    )


def _workers(rng: random.Random) -> tuple[WorkerSpec, ...]:
    """The first is a good one with slots and is there from the start."""
    first = WorkerSpec(
        rng.randint(2, 6), rng.uniform(0.001, 0.05), rng.uniform(0.02, 0.3), 0.0, 0.05, 0.0, ""
    )
    return (first, *(_worker(rng) for _ in range(rng.randint(0, 3))))


def _worker(rng: random.Random) -> WorkerSpec:
    bad: Badness = rng.choice(["", "", "", "", "lies", "hangs", "dead", "slow"])
    return WorkerSpec(
        slots=rng.choice([0, 1, 2, 4, 6]),
        latency_s=rng.uniform(0.001, 0.2),
        token_s=3.0 if bad == "slow" else rng.uniform(0.02, 0.5),
        lies=rng.uniform(0.3, 1.0) if bad == "lies" or rng.random() < 0.2 else 0.0,
        faulty=rng.choice([0.0, 0.05, 0.3]),
        joins_at_s=rng.choice([0.0, 0.0, rng.uniform(0.0, 30.0)]),
        bad=bad,
    )


def _faults(rng: random.Random, workers: int, heal_s: float) -> tuple[RunFault, ...]:
    names, weights = zip(*KINDS, strict=True)
    drawn = [
        RunFault(
            at_s=rng.uniform(0.5, heal_s),
            kind=rng.choices(names, weights)[0],
            worker=1 + rng.randrange(workers),
            lasts_s=rng.choice([rng.uniform(0.2, 5.0), rng.uniform(5.0, 25.0)]),
        )
        for _ in range(rng.randint(2, 12))
    ]
    return tuple(sorted(drawn, key=lambda fault: fault.at_s))
