"""Draws a fault schedule from one rng_seed: the rules of a run, its workers, and its faults.

Until `heal_s` any fault may happen. Then every process runs again and no more faults come. Only bad
workers stay bad for ever: they must not hold up the others (I6).
"""

import random
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from echo2d.core.audit.events import LimitsLearnt
from echo2d.core.base.ids import RunId
from echo2d.core.broadcast.publishing import ENCODE_FAILURES_MAX
from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import EpisodeRules, EvalRules, RowFilter, TaskRules
from echo2d.registry import SHAPES
from echo2d_lab.faults.engine import STOP, VOCAB

FaultKind = Literal[
    "kill_coordinator",  # kill -9, together with the seed; both restart
    # A kill within a turn: before its transaction, after it, or among its other actions.
    "kill_in_commit",
    "pause_coordinator",
    "jump_coordinator",
    "kill_seed",
    "encode_fails",
    "kill_worker",
    "vanish_worker",  # its machine is lost, and the coordinator gets no message
    "stop_worker",  # the worker ends in order
    "pause_worker",
    "jump_worker",
    "cut",  # its control link is reset
    "block",  # a partition: it reaches neither coordinator nor peers
    "cut_links",  # its links to peers are reset
    "hang",  # its engine makes no tokens
    "revoke",  # its credential is revoked for ever
    "kill_learner",
    "second_learner",
    "lose_call",  # an answer to the learner gets lost
    "rewards_fail",
    "kill_auditor",
]
# hoards: it offers many slots, but its engine makes no more tokens with them. fades: later its rate falls by FADE.
Badness = Literal["", "lies", "hangs", "dead", "slow", "hoards", "fades"]
FADE = 100.0
HOARDED = 512  # slots

# With this audit.newcomer a worker stays a newcomer for ever: no answer may be trained on before its verdict.
NEVER_CLEAR = 1000

# Limits that an earlier process has learnt from honest engines.
LEARNT = LimitsLearnt("torch", 0.1, 0.002, 0, 0.05)
EVALUATED = 0.4
ENVIRONMENTS = 0.33  # share of runs in which tasks may be environments
EPISODES = (
    EpisodeRules(
        turns_max=16,
        tokens_max=8192,
    ),
    EpisodeRules(
        turns_max=2,
        tokens_max=8192,
    ),
    EpisodeRules(
        tokens_max=24,
        turns_max=16,
    ),
)
OUTSIDE = 0.5  # share of environments that outside agents play
AUDITED = 0.25  # share of runs that have an audit
# How often each kind of fault is drawn, relative to the others.
KINDS: tuple[tuple[FaultKind, int], ...] = (
    ("kill_coordinator", 2), ("kill_in_commit", 4), ("pause_coordinator", 1),
    ("jump_coordinator", 1), ("kill_seed", 1), ("encode_fails", 1), ("kill_worker", 3),
    ("vanish_worker", 1), ("stop_worker", 1), ("pause_worker", 2), ("jump_worker", 1), ("cut", 4),
    ("block", 3), ("cut_links", 2), ("hang", 1), ("revoke", 1), ("kill_learner", 4),
    ("second_learner", 1), ("lose_call", 2), ("rewards_fail", 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. slots: 0: it is a relay peer. lies: share of its results that are lies.

    faulty: share of its refits and applies that fail. bad: a fault that never heals.
    """

    slots: int
    latency_s: float
    token_s: float
    lies: float
    faulty: float
    joins_at_s: float
    bad: Badness


@dataclass(frozen=True, slots=True)
class RunFault:
    """One fault. worker: the number of the worker that it strikes, if the kind strikes a worker."""

    at_s: float
    kind: FaultKind
    worker: int
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """learnt: limits that the audit has at the start. train_s: seconds per train step. refusals: share
    of batches in which the learner refuses a group.
    """

    rng_seed: int
    rules: RunRules
    workers: tuple[WorkerSpec, ...]
    faults: tuple[RunFault, ...]
    heal_s: float
    train_s: float
    checkpoint_every: int
    refusals: float
    learnt: LimitsLearnt | None = None

    @staticmethod
    def draw(rng_seed: int) -> "Schedule":
        rng = random.Random(rng_seed)
        workers = _workers(rng)
        heal_s = rng.uniform(15.0, 60.0)
        rules = _rules(rng, random.Random(rng_seed ^ 0x1E46).choice([8, 8, 24]))
        faults = _faults(rng, len(workers), heal_s)
        chance = random.Random(rng_seed ^ 0xA0D17)
        learnt = None
        if chance.random() < AUDITED:
            rules = replace(rules, audit=_audit(chance))
            learnt = LEARNT if chance.random() < 0.8 else None
            kills = [chance.uniform(0.5, heal_s) for _ in range(chance.randint(0, 3))]
            died = [RunFault(at, "kill_auditor", 1, chance.uniform(0.2, 20.0)) for at in kills]
            faults = tuple(sorted([*faults, *died], key=lambda fault: fault.at_s))
        rules = replace(rules, evals=_evals(random.Random(rng_seed ^ 0xE7A1), rules))
        rules = replace(rules, tasks=_environments(random.Random(rng_seed ^ 0xE9150), rules))
        rules = replace(rules, evals=_played(random.Random(rng_seed ^ 0xE7A9150), rules))
        patience = random.Random(rng_seed ^ 0xBA7E).choice([0.0, 1.5, 3.0])
        rules = replace(rules, group_patience=patience)
        return Schedule(
            rng_seed=rng_seed,
            rules=rules,
            workers=workers,
            faults=faults,
            heal_s=heal_s,
            train_s=rng.choice([0.3, 1.0, 3.0]),
            checkpoint_every=rng.randint(1, 4),
            refusals=rng.choice([0.0, 0.0, 0.2]),
            learnt=learnt,
        )


def with_hoarders(schedule: Schedule) -> Schedule:
    """The schedule with one to three more workers that offer many slots, and deliver little, late or nothing."""
    chance = random.Random(schedule.rng_seed ^ 0x0A2D)
    kinds: list[Badness] = ["hoards", "hangs", "fades", "slow"]
    more = tuple(
        WorkerSpec(
            HOARDED,
            chance.uniform(0.001, 0.05),
            schedule.workers[0].token_s * chance.choice([0.5, 1.0, 2.0]),
            lies=0.0,
            faulty=0.0,
            joins_at_s=chance.choice([0.0, chance.uniform(0.0, 30.0)]),
            bad=chance.choice(kinds),
        )
        for _ in range(chance.randint(1, 3))
    )
    return replace(schedule, workers=(*schedule.workers, *more))


def _rules(rng: random.Random, max_new_tokens: int) -> RunRules:
    staleness_max = rng.randint(0, 3)
    trajectories, group_size = rng.choice([(4, 2), (2, 2), (6, 3), (3, 1), (8, 4)])
    return RunRules(
        run_id=RunId("run-1"),
        staleness_max=staleness_max,
        publish_every=rng.choice(["auto", rng.randint(1, staleness_max + 1)]),
        trajectories_per_step=trajectories,
        group_size=group_size,
        group_patience=0.0,
        tasks=_tasks(rng, max_new_tokens),
        context_max=1 << 16,
        vocab_size=VOCAB,
        over_stale=rng.choice(["drop", "drop", "mask"]),
        filter_zero_variance=rng.random() < 0.7,
        dissemination=DisseminationTable(shape=rng.choice(list(SHAPES)), chains=rng.randint(1, 2)),
    )


def _tasks(rng: random.Random, max_new_tokens: int) -> tuple[TaskRules, ...]:
    """One to three tasks. The last of several filters its rows, and has shorter answers."""
    weights = rng.choice([(1,), (1,), (1, 1), (5, 3, 2)])
    tasks = [
        TaskRules(
            name=f"task {number}",
            weight=Fraction(weight),
            max_new_tokens=max_new_tokens,
            stop_token_ids=(STOP,),
        )
        for number, weight in enumerate(weights)
    ]
    if len(tasks) > 1:
        tasks[-1] = replace(
            tasks[-1], max_new_tokens=max(1, max_new_tokens // 2), row_filter=RowFilter(1, 2)
        )
    return tuple(tasks)


def _environments(chance: random.Random, rules: RunRules) -> tuple[TaskRules, ...]:
    """The tasks; in one schedule of three, each may be an environment."""
    if chance.random() > ENVIRONMENTS:
        return rules.tasks
    tasks = [replace(task, episode=chance.choice([None, *EPISODES])) for task in rules.tasks]
    # Outside agents are drawn last, so that older schedules keep their environments.
    for number, task in enumerate(tasks):
        if task.episode is not None and chance.random() < OUTSIDE:
            tasks[number] = replace(task, episode=replace(task.episode, outside=True))
    return tuple(tasks)


def _evals(chance: random.Random, rules: RunRules) -> tuple[EvalRules, ...]:
    """Evaluations; most runs have none. Their questions are rows that the tasks have, too."""
    if chance.random() > EVALUATED:
        return ()
    task = replace(rules.tasks[0], name="held", row_filter=None)
    return (
        EvalRules(
            task,
            every=chance.randint(1, 3),
            samples=chance.randint(1, 2),
            rows=chance.randint(1, 4),
            hold_s=chance.choice([0.5, 5.0, 30.0]),
            solved_at=1.0,
        ),
    )


def _played(chance: random.Random, rules: RunRules) -> tuple[EvalRules, ...]:
    """The evaluations; half of them are of environments."""
    if chance.random() < 0.5:
        return rules.evals
    return tuple(
        replace(each, task=replace(each.task, episode=chance.choice(EPISODES)))
        for each in rules.evals
    )


def _audit(chance: random.Random) -> AuditRules:
    return AuditRules(
        newcomer=chance.choice([0, 3, NEVER_CLEAR]),
        share=chance.choice([0.0, 0.1, 1.0]),
        wait_s=chance.choice([2.0, 20.0, 60.0]),
        trusted=("t",) if chance.random() < 0.9 else (),
    )


def _workers(rng: random.Random) -> tuple[WorkerSpec, ...]:
    """Draw the workers. The first is good, has slots and joins at once, so the run can finish."""
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
    drawn.sort(key=lambda fault: fault.at_s)
    # ENCODE_FAILURES_MAX failures rightly stop a run that has only one version, so a schedule has fewer.
    too_many = [fault for fault in drawn if fault.kind == "encode_fails"][ENCODE_FAILURES_MAX - 1 :]
    return tuple(fault for fault in drawn if fault not in too_many)
