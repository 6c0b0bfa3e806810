"""A long run with some poisonous groups trains the same as a run without them."""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from echo2d.client import Batch, StepFigures, TrajectoryScore
from echo2d.learner.config import LearnerConfig
from tests.support.learner import learn
from tests.support.poison import with_poison
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS, ScriptedCoordinator

STEPS, SPOILED_STEPS, KAPPA = 50, 6, 3
NEW_NAME = 10_000  # is added to the id of a group when another takes its place

# For each step: the indices of the poisonous groups, each time that its batch comes; later none is poisonous.
Poison = Mapping[int, Sequence[Sequence[int]]]


class ReplacingCoordinator(ScriptedCoordinator):
    """A refused group gets a good or another poisonous one in its place, and the batch a new digest."""

    def __init__(self, root: Path, poison: Poison) -> None:
        super().__init__(root, publish_every=KAPPA, lag=KAPPA - 1)
        self._poison = poison
        self._replaced: dict[int, list[int]] = {}  # by step: places, each time that it was refused
        self._refusals: dict[int, int] = {}
        self.refused_groups: list[int] = []
        self.committed: list[tuple[int, str]] = []

    def take_batch(self, step: int) -> Batch:
        batch = super().take_batch(step)
        replaced, times = self._replaced.get(step, []), self._refusals.get(step, 0)
        groups = tuple(
            dataclasses.replace(group, group_id=group.group_id + NEW_NAME * replaced.count(place))
            for place, group in enumerate(batch.groups)
        )
        rounds = self._poison.get(step, ())
        places = rounds[times] if times < len(rounds) else ()
        named = dataclasses.replace(batch, groups=groups, digest=f"batch-{step}-{times}")
        return with_poison(named, *(groups[place].group_id for place in places))

    def refuse(self, batch: Batch, reasons: dict[int, str]) -> None:
        places = [place for place, group in enumerate(batch.groups) if group.group_id in reasons]
        self._replaced.setdefault(batch.step, []).extend(places)
        self._refusals[batch.step] = self._refusals.get(batch.step, 0) + 1
        self.refused_groups += reasons

    def commit(
        self,
        batch: Batch,
        *,
        t_train_s: float,
        scores: Sequence[TrajectoryScore] = (),
        figures: StepFigures | None = None,
    ) -> int:
        self.committed.append((batch.step, batch.digest))
        return super().commit(batch, t_train_s=t_train_s, scores=scores, figures=figures)


def drawn_poison(rng: random.Random) -> Poison:
    """One or two groups in some of the steps; the first of these steps gets poison again in place of poison."""
    steps = rng.sample(range(1, STEPS + 1), SPOILED_STEPS)
    poison = {step: [rng.sample(range(GROUPS), rng.randint(1, 2))] for step in steps}
    poison[steps[0]].append(poison[steps[0]][0][:1])
    return poison


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_poisonous_groups_are_counted_and_change_no_weight(
    sensitive: LearnerConfig, tmp_path: Path
) -> None:
    rng_seed = random.randrange(1 << 32)
    print(f"rng_seed={rng_seed}")  # noqa: T201 - shown when it fails
    poison = drawn_poison(random.Random(rng_seed))
    config = dataclasses.replace(sensitive, steps=STEPS, checkpoint_every=20)
    clean = ReplacingCoordinator(tmp_path / "clean", {})
    expected = learn(dataclasses.replace(config, out_dir=tmp_path / "clean-out"), clean)
    coordinator = ReplacingCoordinator(tmp_path / "poisoned", poison)
    rows = learn(config, coordinator)

    injected = {step: sum(map(len, rounds)) for step, rounds in poison.items()}
    assert {row["step"]: row["poisoned"] for row in rows if row["poisoned"]} == injected
    assert len(coordinator.refused_groups) == len(set(coordinator.refused_groups))
    assert len(coordinator.refused_groups) == sum(injected.values())
    assert coordinator.committed == [
        (step, f"batch-{step}-{len(poison.get(step, ()))}") for step in range(1, STEPS + 1)
    ]
    trained = {score.group for scores in coordinator.scores.values() for score in scores}
    assert len(trained) == STEPS * GROUPS
    assert trained.isdisjoint(coordinator.refused_groups)
    assert all(len(scores) == GROUPS * GROUP_SIZE for scores in coordinator.scores.values())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row["grad_norm"]) for row in rows)
    # A replacement has the data of the group that it replaces, so every step is that of the clean run.
    for found, wanted in zip(rows, expected, strict=True):
        assert (found["loss"], found["grad_norm"]) == (wanted["loss"], wanted["grad_norm"])
