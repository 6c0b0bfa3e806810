"""A learner that is stopped, killed or out of disk space, and the state from which the next one continues."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from echo2d.client import Coordinator, NotResumable, OperatorFault, StoreFault
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.learner.__main__ import stop_on_signals
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.saving.checkpoint import Checkpoints
from echo2d.learner.train import Learner
from tests.support.full_disk import files_up_to
from tests.support.learner import learn, throwing_dice
from tests.support.polling import poll
from tests.support.scripted_coordinator import ScriptedCoordinator

NARROW = TinyRecipe(accuracy_stop=0.0, batch=8, layers=1, hidden_size=64)


def test_a_stopped_learner_resumes_to_the_same_weights(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    learn(config, coordinator)
    straight = load_file(coordinator.published(config.steps) / "model.safetensors")

    config = dataclasses.replace(config, out_dir=tmp_path / "other")
    again = ScriptedCoordinator(tmp_path / "taken2", lag=1)
    prefetch = BatchPrefetch()
    again.on_commit = lambda step: prefetch.stop() if step == 2 else None
    learn(config, again, prefetch=prefetch)
    assert again.events[-1] == (
        "checkpoint",
        0,
    )  # if this one were damaged, the base model would be the one before
    rows = learn(config, again, resume=True)
    assert again.events[again.events.index(("session", 2)) + 1] == ("publish", 2)
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    resumed = load_file(again.published(config.steps) / "model.safetensors")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


def test_a_stopped_learner_does_not_wait_for_a_batch(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    prefetch = BatchPrefetch()
    prefetch.stop()
    Learner(config, cast("Coordinator", coordinator), prefetch, resume=False).run()
    assert coordinator.events == [("session", 0), ("publish", 0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_end_and_saves_it(
    config: LearnerConfig, coordinator: ScriptedCoordinator, number: signal.Signals
) -> None:
    prefetch = BatchPrefetch()
    stop_on_signals(lambda _: prefetch.stop())
    coordinator.on_commit = lambda step: signal.raise_signal(number) if step == 2 else None
    learn(config, coordinator, prefetch=prefetch)
    assert coordinator.said("commit") == [1, 2]
    assert [path.name for path in (config.out_dir / "checkpoints").iterdir()] == [
        "step-00000002-epoch-1"
    ]
    assert signal.getsignal(number) == signal.SIG_IGN, "for a second"


def test_checkpoints_are_not_overwritten_by_accident(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    learn(config, coordinator)
    assert sorted(path.name for path in (config.out_dir / "checkpoints").iterdir()) == [
        "step-00000003-epoch-1",
        "step-00000004-epoch-1",
    ]
    with pytest.raises(OperatorFault, match="use --resume"):
        learn(config, coordinator)
    learn(config, coordinator, resume=True)
    assert coordinator.events[-2:] == [("session", config.steps), ("publish", config.steps)]


def test_after_a_damaged_checkpoint_the_one_before_is_used(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """Its batches still exist, because the damaged checkpoint was never reported as durable."""
    learn(config, coordinator)
    os.truncate(config.out_dir / "checkpoints" / "step-00000004-epoch-1" / "__0_0.distcp", 1000)
    rows = learn(config, coordinator, resume=True)
    assert coordinator.said("session") == [0, 3]
    assert max(coordinator.said("checkpoint")) == 3
    assert rows[4]["loss"] == rows[3]["loss"]
    learn(config, coordinator, resume=True)
    assert coordinator.said("session") == [0, 3, 4]


class KilledError(BaseException):
    """Ends the learner in a way that it cannot react to."""


@pytest.mark.parametrize("killed_at", [3, 5, 6])
def test_a_killed_and_resumed_run_trains_the_same_as_an_uninterrupted_one(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path, killed_at: int
) -> None:
    """The same losses, weights and optimizer, bit for bit, with a model that uses dropout."""
    model = throwing_dice(config.model, tmp_path / "dice")
    config = dataclasses.replace(config, model=model, steps=6, checkpoint_every=2)
    straight = learn(config, coordinator)

    last = (killed_at - 1) // 2 * 2

    def kill(step: int) -> None:
        if step == killed_at:
            poll(
                lambda: (
                    not last
                    or (other.out_dir / "checkpoints" / f"step-{last:08d}-epoch-1").exists()
                )
            )
            raise KilledError

    other = dataclasses.replace(config, out_dir=tmp_path / "other")
    again = ScriptedCoordinator(tmp_path / "taken2", lag=1)
    again.on_commit = kill
    with pytest.raises(KilledError):
        learn(other, again)
    again.on_commit = lambda step: None
    torch.rand(3)  # the process that goes on is another one
    rows = {row["step"]: row for row in learn(other, again, resume=True)}
    assert again.said("session") == [0, last]
    told = ("loss", "grad_norm", "ratio_mean", "reward_mean", "tokens")
    assert [[rows[row["step"]][name] for name in told] for row in straight] == [
        [row[name] for name in told] for row in straight
    ]
    for name in ("model.safetensors", "config.json"):
        assert (again.published(6) / name).read_bytes() == (
            coordinator.published(6) / name
        ).read_bytes()
    assert _same(*(checkpointed(each) for each in (config, other)))


def checkpointed(config: LearnerConfig) -> dict[str, Any]:
    """All the state from which a learner would resume."""
    state = Policy(config, Ranks()).state()
    progress = Checkpoints(config.out_dir / "checkpoints", 2).load_newest(state)
    return {**state, **progress}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("size", "line"),
    [(100, "cannot write .*(snapshot|metrics)"), (1 << 20, "cannot write the checkpoint")],
)
def test_a_full_disk_ends_the_learner_in_one_line_and_a_later_start_goes_on(
    config: LearnerConfig, coordinator: ScriptedCoordinator, size: int, line: str
) -> None:
    config = dataclasses.replace(config, checkpoint_every=1)
    prefetch = BatchPrefetch()
    coordinator.on_commit = lambda step: prefetch.stop() if step == 2 else None
    learn(config, coordinator, prefetch=prefetch)
    coordinator.on_commit = lambda step: None
    with files_up_to(size), pytest.raises(StoreFault, match=line):
        learn(config, coordinator, resume=True)
    assert not list((config.out_dir / "checkpoints").glob(".tmp*"))
    assert not list(config.snapshot_root.iterdir()) or size > 100
    learn(config, coordinator, resume=True)
    assert coordinator.said("session") == [0, 2, 2]


def test_a_checkpoint_of_another_model_is_refused_with_its_name(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    learn(config, coordinator)
    model = make_tiny_model(tmp_path / "models", NARROW)
    with pytest.raises(OperatorFault, match="does not fit"):
        learn(dataclasses.replace(config, model=model), coordinator, resume=True)


def test_a_learner_that_starts_late_uses_the_newest_checkpoint(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """The older learner trained until this one had its session."""
    config = dataclasses.replace(config, checkpoint_every=1)
    prefetch = BatchPrefetch()
    coordinator.on_commit = lambda step: prefetch.stop() if step == 1 else None
    learn(config, coordinator, prefetch=prefetch)
    coordinator.on_commit = lambda step: None
    late = Learner(config, cast("Coordinator", coordinator), BatchPrefetch(), resume=True)
    learn(config, coordinator, resume=True)
    coordinator.lowest = config.steps - 1
    late.run()
    assert coordinator.said("session") == [0, 1, config.steps]
    shutil.rmtree(config.out_dir)
    with pytest.raises(NotResumable, match="cannot resume"):
        learn(config, coordinator)
