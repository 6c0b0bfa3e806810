"""Gradients and reports of policies whose ranks share rows, beside those of one rank.

    torchrun --nproc-per-node 4 --module tests.support.shared_rows DIRECTORY

DIRECTORY/configs.pickle holds a config for each name; rank 0 writes DIRECTORY/found.pickle.
"""

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.learner.batch.packing import PackedAnswer
from echo2d.learner.config import LearnerConfig, place
from echo2d.learner.metrics.report import StepReport
from echo2d.learner.model.begun_step import BegunStep, StepLeftError
from echo2d.learner.model.policy import PoisonedGroupsError, Policy
from echo2d.learner.ranks.ranks import Ranks, Rendezvous, whole
from tests.support.paths import REPO

STALENESS_MAX = 2
VOCABULARY = 17
GRADIENT_ERROR_MAX = 2e-6  # of its norm, in float32


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What the first rank knows of a policy."""

    gradient: Tensor  # of all optimizer steps, one after the other
    report: StepReport
    begun: BegunStep  # of a train step that is left after its first optimizer step
    poisoned: list[int]
    penalties: dict[tuple[int, int], float]
    # Over all micro-batches and ranks: tokens of the shortest row, slices without a token to score, and micro-batches
    # without answers.
    shortest: int
    unscored: int
    empty: int


def answers() -> list[list[PackedAnswer]]:
    """Three optimizer steps of ragged answers: shared prompts, branches, given and stale tokens. The last one has a
    single row of three tokens.
    """
    rng = np.random.default_rng(0)
    made = []
    for group, (prompt, lengths) in enumerate(
        [(7, (9, 4, 1, 30)), (1, (1, 2)), (24, (3, 2, 5)), (5, (17, 6)), (2, (12, 40)), (1, (2,))]
    ):
        tokens = rng.integers(0, VOCABULARY, prompt, dtype=np.int32)
        made.append([_answer(rng, group, at, tokens, each) for at, each in enumerate(lengths)])
    # The first two answers of the first group are the branches of an episode.
    both = sum(len(each.logprobs_n) for each in made[0][:2])
    made[0][:2] = [
        dataclasses.replace(each, episode_tokens=both, first=not at)
        for at, each in enumerate(made[0][:2])
    ]
    return [[*made[0], *made[1], *made[2]], [*made[3], *made[4]], made[5]]


def _answer(
    rng: np.random.Generator, group: int, sample: int, prompt: Any, length: int
) -> PackedAnswer:
    counts = np.ones(length, dtype=np.bool_)
    counts[length // 3 : length // 2] = False  # given tokens
    scored = int(counts.sum())
    return PackedAnswer(
        group,
        sample,
        np.concatenate([prompt, rng.integers(0, VOCABULARY, length, dtype=np.int32)]),
        np.concatenate([np.zeros(len(prompt), dtype=np.bool_), counts]),
        rng.uniform(-5.0, -1.0, scored).astype(np.float32),
        rng.integers(0, STALENESS_MAX + 1, scored),
        np.float32(rng.normal()),
        temperature=float(rng.uniform(0.7, 1.3)),
        prompt=len(prompt),
    )


def measured(config: LearnerConfig, ranks: Ranks) -> Found:
    policy = Policy(config, ranks)
    with torch.no_grad():
        # `made` makes weights so large that rounding in another order changes gradients by more than the limit.
        for weight in policy.model.parameters():
            weight.mul_(0.5)
    dealt = answers()
    parts = policy.lay_out(dealt)
    penalties = policy.penalties([*chain(*dealt)]) if config.penalizes else {}
    proximal = policy._proximal(parts, lambda _: False)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.01)
    slopes = []
    for part in parts:
        policy._gradient(part, STALENESS_MAX, proximal)
        grads = [each.grad for each in policy.model.parameters() if each.grad is not None]
        slopes += [whole(each).flatten() for each in grads]
        policy._optimizer.zero_grad()
    report = policy.train_step(1, parts, STALENESS_MAX)
    begun = None
    try:
        policy.train_step(2, parts, STALENESS_MAX, leaves=lambda *done: done[2] == 1)
    except StepLeftError as left:
        begun = left.begun
    assert begun is not None
    size, tokens, unscored, empty = config.context_parallel, [], 0, 0
    for micro in chain.from_iterable(part.micro for part in parts):
        tokens += [int(micro.lengths_b.sum())] * bool(micro.answers)
        empty += not micro.answers
        scored = np.flatnonzero(micro.answer_bt[0]) - 1
        own = policy._row_ranks.own(micro.tokens_bt.size)
        unscored += bool(micro.answers) and not ((own.start <= scored) & (scored < own.stop)).any()
    facts = ranks.gather((min(tokens, default=VOCABULARY), unscored, empty))
    return Found(
        torch.cat(slopes),
        report,
        begun,
        poisoned_of(policy),
        penalties,
        min((each[0] for each in facts), default=0),
        sum(each[1] for each in facts),
        sum(each[2] for each in facts) // size,
    )


def poisoned_of(policy: Policy) -> list[int]:
    """The groups that are found if one answer of group 2 has an advantage that is no number."""
    part, *_ = answers()
    bitten = [
        dataclasses.replace(each, advantage=np.float32("nan"))
        if (each.group_id, each.sample) == (2, 1)
        else each
        for each in part
    ]
    try:
        policy.train_step(3, policy.lay_out([bitten]), STALENESS_MAX)
    except PoisonedGroupsError as poison:
        return list(poison.groups)
    return []


def together(
    directory: Path, configs: Mapping[str, LearnerConfig], *, ranks: int
) -> dict[str, Found]:
    """Measure these configs on as many ranks."""
    (directory / "configs.pickle").write_bytes(pickle.dumps(configs))
    torchrun = ["-m", "echo2d.learner.torchrun", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--module", "tests.support.shared_rows", str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Found] = pickle.loads((directory / "found.pickle").read_bytes())
    return found


def alone(config: LearnerConfig) -> Found:
    """Measure what one rank finds with the same rows."""
    tokens = config.micro_batch_tokens * config.context_parallel
    return measured(
        dataclasses.replace(config, micro_batch_tokens=tokens, context_parallel=1), Ranks()
    )


def check_same(name: str, one: Found, many: Found, *, same_rows: bool = True) -> float:
    """Check that ranks which share rows found what one rank finds. Returns how far their gradient is from its gradient,
    over its norm.

    same_rows: False if there are several groups of such ranks. Then prompts are copied more often.
    """
    error = float((many.gradient - one.gradient).norm() / one.gradient.norm())
    print(f"{name}: the gradients differ by {error:.1e} of their norm")  # noqa: T201
    assert error <= GRADIENT_ERROR_MAX, name
    found, expected = figures(many), figures(one)
    assert {name: found[name] for name in expected} == pytest.approx(
        expected, rel=1e-4, abs=1e-5, nan_ok=True
    ), name
    assert len(found) == len(expected), name
    assert many.penalties == pytest.approx(one.penalties, rel=1e-4, abs=1e-6), name
    assert many.poisoned == one.poisoned == [2], name
    done = many.report.effort.operations / one.report.effort.operations
    assert 0.9 < done < (1.1 if same_rows else 1.5), name
    if same_rows and one.report.router is not None:
        assert many.report.router is not None
        router = dataclasses.astuple(many.report.router)
        assert router == pytest.approx(dataclasses.astuple(one.report.router), rel=1e-4), name
    return error


def figures(found: Found) -> dict[str, float]:
    """The reports of both train steps, without the figures that depend on the rows."""
    report, begun = found.report, found.begun
    return {
        "loss": report.loss,
        "norm": report.grad_norm,
        **{name: value or 0.0 for name, value in dataclasses.asdict(report.means).items()},
        **{f"sum {at}": each for at, each in enumerate(begun.tally.sums_s.flatten().tolist())},
        **{
            f"{kind} {each.group} {each.sample} {number}": value
            for kind, scores in (("whole", report.scores), ("begun", begun.scores))
            for each in scores
            for number, value in (("k", each.k), ("z", each.z), ("times", scores.count(each)))
        },
    }


def main(directory: Path) -> None:
    configs = pickle.loads((directory / "configs.pickle").read_bytes())
    rendezvous = Rendezvous(place())
    ranks = rendezvous.join(next(iter(configs.values())), lost=print)
    found = {name: measured(config, ranks) for name, config in configs.items()}
    if ranks.leads:
        (directory / "found.pickle").write_bytes(pickle.dumps(found))
    rendezvous.leave()


if __name__ == "__main__":
    # Pickled classes must carry the name of this module, and not __main__.
    from tests.support import shared_rows

    shared_rows.main(Path(sys.argv[1]))
