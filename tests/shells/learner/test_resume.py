"""Resuming: from whose checkpoints, with which remembered state, and with a config that has changed."""

import dataclasses
from pathlib import Path
from typing import cast

import pytest

from echo2d.client import Batch, Coordinator, NotResumable, OperatorFault, Session, Unanswered
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.train import Learner
from tests.support.learner import config_in, learn
from tests.support.scripted_coordinator import ScriptedCoordinator


@pytest.fixture
def config(tmp_path: Path, base: Path) -> LearnerConfig:
    """The config of a run of one step, which ends with a checkpoint."""
    return config_in(tmp_path, base, steps=1)


@pytest.fixture
def coordinator(tmp_path: Path) -> ScriptedCoordinator:
    return ScriptedCoordinator(tmp_path / "taken")


def test_another_runs_checkpoints_are_refused_before_that_run_is_touched(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """The other run's coordinator would accept the session, because it is beyond this step."""
    learn(config, coordinator)
    other = ScriptedCoordinator(tmp_path / "other")
    other.run_id = "other"
    with pytest.raises(
        OperatorFault, match=r"learner\.out_dir: .* has checkpoints of run run; this is run other"
    ):
        learn(config, other, resume=True)
    assert other.events == []


def test_a_late_learner_that_is_told_to_stop_saves_nothing(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """It has loaded the newer learner's checkpoint, and has no session yet."""
    learn(config, coordinator)
    late = Learner(config, cast("Coordinator", coordinator), BatchPrefetch(), resume=True)
    learn(dataclasses.replace(config, steps=2), coordinator, resume=True)
    before = sorted((config.out_dir / "checkpoints").iterdir())

    def open_session(resume_step: int, **_: object) -> Session:
        if resume_step < 2:
            raise NotResumable("batches up to step 2 are deleted")
        raise Unanswered("the coordinator did not answer")

    coordinator.open_session = open_session  # type: ignore[method-assign]
    late.run()
    assert sorted((config.out_dir / "checkpoints").iterdir()) == before


def test_groups_trained_before_the_checkpoint_are_not_trained_after_it(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    learn(config, coordinator)

    def with_a_trained_group(batch: Batch) -> Batch:
        again = dataclasses.replace(batch.groups[2], group_id=6)
        return dataclasses.replace(batch, groups=(*batch.groups[:2], again, batch.groups[3]))

    coordinator.spoil[2] = with_a_trained_group
    learn(dataclasses.replace(config, steps=2), coordinator, resume=True)
    assert coordinator.refused == {6: "it was trained in step 1"}
    assert coordinator.said("commit") == [1, 2]


def test_the_optimizers_settings_are_those_of_the_config(config: LearnerConfig) -> None:
    """Loading a checkpoint also loads the settings that it was saved with."""
    older, changed = Policy(config, Ranks()), {"betas": (0.8, 0.9), "weight_decay": 0.5}
    newer = Policy(dataclasses.replace(config, **changed), Ranks())  # type: ignore[arg-type]
    newer.restore(older.state(), {})
    (group,) = newer._optimizer.param_groups
    assert {name: group[name] for name in changed} == changed


def test_two_runs_may_have_one_snapshot_root(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """While one version is being taken, another run's learner writes one of the same number, and cleans up."""
    other = ScriptedCoordinator(tmp_path / "other")
    other.run_id, other._epoch = "other", 5
    taken = coordinator.publish

    def publish(version: int, directory: Path, manifest: bytes) -> object:
        if not other.events:
            learn(dataclasses.replace(config, out_dir=tmp_path / "out2"), other)
        return taken(version, directory)

    coordinator.publish = publish  # type: ignore[assignment, method-assign]
    learn(config, coordinator)
    assert coordinator.said("publish") == other.said("publish") == [0, 1]
    assert not list(config.snapshot_root.iterdir())


def test_a_reward_that_float32_cannot_square_is_refused(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """The advantages of its group would be NaN, in this step and each time that the group is trained again."""

    def enormous(batch: Batch) -> Batch:
        group = batch.groups[0]
        members = (dataclasses.replace(group.trajectories[0], reward=1e30), *group.trajectories[1:])
        return dataclasses.replace(
            batch, groups=(dataclasses.replace(group, trajectories=members), *batch.groups[1:])
        )

    coordinator.spoil[1] = enormous
    learn(config, coordinator)
    assert coordinator.refused == {4: "trajectory 0: its reward is 1e+30"}
    assert coordinator.said("commit") == [1]
