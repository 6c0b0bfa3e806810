"""The states of slots after their optimizer steps: written beside training, and continued from."""

import logging
import shutil
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo2d.client import OperationFailed
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving import files
from echo2d.learner.tinker import states
from echo2d.learner.tinker import trainer as trainers
from echo2d.learner.tinker.serve import result_of
from echo2d.learner.tinker.slots import Slots, write_slot
from echo2d.learner.tinker.states import STATES_WAITING_MAX
from echo2d.learner.tinker.trainer import Trainer
from tests.support.tinker_calls import ADAM, CREATE, MODEL, call, forward_backward

ROWS = [
    ([3, 1, 4, 1, 5], {"target_tokens": torch.tensor([1, 4, 1, 5, 9]).numpy(), "weights": torch.ones(5).numpy()}),
    ([2, 7, 1], {"target_tokens": torch.tensor([7, 1, 8]).numpy(), "weights": torch.ones(3).numpy()}),
]  # fmt: skip


@pytest.fixture
def trainer(config: LearnerConfig) -> Trainer:
    made = Trainer(config)
    made.run(call("create", **CREATE))
    return made


@pytest.fixture
def root(config: LearnerConfig) -> Path:
    return config.out_dir / "tinker"


def step(trainer: Trainer, number: int, model: str = MODEL, folder: str | None = None) -> None:
    """A gradient and a step, whose state has the folder `number`."""
    assert isinstance(trainer.run(forward_backward(ROWS, model=model)), bytes)
    named = f"{number:02x}" if folder is None else folder
    result = trainer.run(call("optim_step", model, number=number, folder=named, **ADAM))
    assert isinstance(result, dict)


def whole(trainer: Trainer, model: str = MODEL) -> dict[str, Tensor]:
    slot = trainer._slots[model]
    return {
        **{name: tensor.detach().clone() for name, tensor in {**slot.weights, **slot.moments}.items()},
        "steps": torch.tensor(slot.steps),
    }  # fmt: skip


def test_a_loaded_state_continues_as_if_nothing_had_happened(
    trainer: Trainer, config: LearnerConfig
) -> None:
    step(trainer, 1)
    step(trainer, 2)
    trainer.states.settle()
    again = Trainer(config)
    assert again.run(call("load", number=0, folder="01", optimizer=True)) == {"rank": 4}
    step(again, 2)
    mine, right = whole(again), whole(trainer)
    assert mine.keys() == right.keys()
    assert all(torch.equal(mine[name], right[name]) for name in right)
    again.states.settle()
    assert again.states.written() == ((MODEL, 2),), "it is there from before, and counts"


def test_the_state_is_that_after_the_step_although_training_goes_on(
    trainer: Trainer, config: LearnerConfig, writes: "Writes"
) -> None:
    step(trainer, 1)
    after = whole(trainer)
    step(trainer, 2, folder="")
    trainer.states.settle()
    assert writes.events == ["serialise 01", "write 01"]
    again = Trainer(config)
    again.run(call("load", folder="01", optimizer=True))
    assert all(torch.equal(each, after[name]) for name, each in whole(again).items())


class Writes:
    """Records the order of events. A write ends only after a thread waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._waited = threading.Event()
        serialise = Slots.files_of

        def write_late(directory: Path, files: Mapping[str, bytes]) -> int:
            assert self._waited.wait(60.0)
            written = write_slot(directory, files)
            self.events.append(f"write {directory.name}")
            return written

        def serialised(slots: Slots, slot: Any, **how: Any) -> dict[str, bytes]:
            self.events.append(f"serialise {slot.steps:02x}")
            return serialise(slots, slot, **how)

        def waited(writing: Collection[Future[Any]], **how: Any) -> object:
            self._waited.set()
            return wait(writing, **how)

        monkeypatch.setattr(trainers, "write_slot", write_late)
        monkeypatch.setattr(Slots, "files_of", serialised)
        monkeypatch.setattr(states, "wait", waited)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


def test_a_model_is_at_most_one_state_behind(trainer: Trainer, writes: Writes) -> None:
    step(trainer, 1)
    step(trainer, 2)
    trainer.states.settle()
    assert writes.events == ["serialise 01", "write 01", "serialise 02", "write 02"]
    assert trainer.states.written() == ((MODEL, 2),)


def test_a_step_waits_when_many_models_have_states_in_memory(
    trainer: Trainer, writes: Writes
) -> None:
    models = [f"s:train:{number}" for number in range(STATES_WAITING_MAX + 1)]
    for number, model in enumerate(models):
        assert "write 00" not in writes.events
        trainer.run(call("create", model, **CREATE))
        step(trainer, number, model)
    first = ["serialise 01"] * STATES_WAITING_MAX
    assert writes.events[: STATES_WAITING_MAX + 1] == [*first, "write 00"]
    trainer.states.settle()
    assert trainer.states.written() == tuple((model, n) for n, model in enumerate(models))


def test_a_step_is_reported_until_it_is_forgotten(trainer: Trainer) -> None:
    step(trainer, 1)
    trainer.states.settle()
    reported = trainer.states.written()
    assert reported == trainer.states.written() == ((MODEL, 1),)
    step(trainer, 2)
    trainer.states.settle()
    trainer.states.forget(reported)
    assert trainer.states.written() == ((MODEL, 2),)
    trainer.states.forget(((MODEL, 2), ("s:train:9", 1)))
    assert trainer.states.written() == ()


def test_a_state_that_cannot_be_written_is_not_reported_and_training_goes_on(
    trainer: Trainer, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(root)
    root.touch()
    step(trainer, 1)
    trainer.states.settle()
    assert trainer.states.written() == ()
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert line.startswith(f"the state of {MODEL} after operation 1 is not saved: cannot write")
    root.unlink()
    step(trainer, 2)
    trainer.states.settle()
    assert trainer.states.written() == ((MODEL, 2),)
    assert trainer._slots[MODEL].steps == 2


def test_a_state_for_which_memory_is_short_does_not_fail_the_step(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(*_: object, **__: object) -> dict[str, bytes]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "files_of", short)
        step(trainer, 1)
    assert f"the state of {MODEL} after operation 1 is not saved: MemoryError" in caplog.text
    step(trainer, 2)
    trainer.states.settle()
    assert trainer.states.written() == ((MODEL, 2),)


@pytest.mark.parametrize("folder", ["01", "../x"])
def test_a_step_that_fails_writes_nothing(trainer: Trainer, root: Path, folder: str) -> None:
    trainer.run(forward_backward(ROWS))
    before = whole(trainer)
    if folder == "01":
        weight = next(iter(trainer._slots[MODEL].weights.values()))
        assert weight.grad is not None
        weight.grad.fill_(torch.nan)
    result = result_of(trainer, call("optim_step", folder=folder, **ADAM))
    assert isinstance(result, OperationFailed)
    trainer.states.settle()
    assert list(root.iterdir()) == []
    assert trainer.states.written() == ()
    assert all(torch.equal(each, before[name]) for name, each in whole(trainer).items())
    assert all(weight.grad is None for weight in trainer._slots[MODEL].weights.values())


def test_a_state_that_is_being_written_stays_and_a_deleted_one_is_not_reported(
    trainer: Trainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, sync = "s:train:1", files.sync
    begun, go_on = threading.Event(), threading.Event()

    def held(path: Path) -> None:
        begun.set()
        assert go_on.wait(60.0)
        sync(path)

    trainer.run(call("create", other, **CREATE))
    step(trainer, 1, other)
    trainer.states.settle()
    monkeypatch.setattr(files, "sync", held)
    step(trainer, 2)
    assert begun.wait(60.0)
    assert trainer.run(call("keep", "", models=[MODEL, other], folders=["02"])) == {}
    assert [path.name[:8] for path in root.iterdir()] == [".tmp-02-"]
    assert trainer.states.written() == ()
    go_on.set()
    trainer.states.settle()
    assert [path.name for path in root.iterdir()] == ["02"]
    assert trainer.states.written() == ((MODEL, 2),)


def test_the_last_state_of_a_model_goes_with_it(
    trainer: Trainer, root: Path, writes: Writes
) -> None:
    step(trainer, 1)
    assert trainer.run(call("keep", "", models=[], folders=[])) == {}
    assert writes.events[-1] == "write 01"
    assert list(root.iterdir()) == []
    assert trainer.states.written() == ()
