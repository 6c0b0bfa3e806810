"""The snapshots that a learner publishes, and those of earlier learners that it removes."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from echo2d.demo.tiny_model import accuracies, held_out_prompts
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from tests.support.learner import learn
from tests.support.scripted_coordinator import ScriptedCoordinator


def test_published_files_are_those_of_the_base_in_bfloat16(
    config: LearnerConfig, coordinator: ScriptedCoordinator, base: Path
) -> None:
    learn(config, coordinator)
    first, last = coordinator.published(0), coordinator.published(config.steps)
    assert {path.name for path in last.iterdir()} == {path.name for path in base.iterdir()}
    assert (first / "config.json").read_bytes() == (base / "config.json").read_bytes()
    old, new = load_file(base / "model.safetensors"), load_file(last / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in new.items()} == {
        name: (t.shape, t.dtype) for name, t in old.items()
    }
    assert all(
        torch.equal(tensor, old[name])
        for name, tensor in load_file(first / "model.safetensors").items()
    )
    (_, before), (_, after) = (
        accuracies(load_model(model), held_out_prompts()) for model in (base, last)
    )
    assert after > before


def test_snapshots_that_a_fenced_learner_left_are_removed(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    for name in (
        "run-epoch-1-version-7",
        ".tmp-run-epoch-1-version-8",
        "mine",
        "other-epoch-0-version-7",
    ):
        (config.snapshot_root / name).mkdir()
    coordinator._epoch = 1
    learn(config, coordinator)
    assert {path.name for path in config.snapshot_root.iterdir()} == {
        "mine",
        "other-epoch-0-version-7",
    }


def test_leftover_snapshots_are_removed_before_room_is_checked(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """A disk full of them would otherwise stop every restart. The directory of the epoch before may still be in use."""
    for epoch in (0, 1):
        (config.snapshot_root / f"run-epoch-{epoch}-version-7").mkdir()
    coordinator._epoch = 1
    found: list[set[str]] = []
    taken = coordinator.publish

    def publish(version: int, directory: Path, manifest: bytes) -> object:
        found.append({path.name for path in config.snapshot_root.iterdir()} - {directory.name})
        return taken(version, directory)

    coordinator.publish = publish  # type: ignore[assignment, method-assign]
    learn(config, coordinator)
    assert (found[0], found[-1]) == ({"run-epoch-1-version-7"}, set())
