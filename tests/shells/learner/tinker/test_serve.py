"""The loop and the program of `echo2d learn --serve`."""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import echo2d.learner.__main__ as program
from echo2d.client import Fenced, OperationFailed, TinkerOperation, Unanswered, Unreachable
from echo2d.learner.__main__ import main
from echo2d.learner.config import LearnerConfig
from echo2d.learner.tinker.serve import serve
from echo2d.learner.tinker.slots import Slot
from echo2d.learner.tinker.trainer import Trainer
from tests.support.learner import write_config
from tests.support.tinker_calls import ADAM, CREATE, MODEL, ScriptedOperations, call

STEP = call("optim_step", number=2, **ADAM)


@pytest.fixture
def trainer(config: LearnerConfig) -> Trainer:
    return Trainer(config)


def served(trainer: Trainer, *calls: TinkerOperation | None) -> ScriptedOperations:
    coordinator = ScriptedOperations([*calls])
    serve(trainer, coordinator, stopped=lambda: coordinator.over, identity="me", take_over=True)
    return coordinator


def test_calls_are_run_one_after_the_other(trainer: Trainer) -> None:
    coordinator = served(trainer, None, call("create", **CREATE), None, STEP)
    assert coordinator.sessions == [(0, "me", True)]
    made, stepped = coordinator.results
    assert made == {}
    assert isinstance(stepped, dict)
    assert (stepped["metrics"], stepped["tokens"]) == ({"grad_norm": 0.0}, 0)


def test_a_call_that_comes_again_is_answered_and_not_run_again(trainer: Trainer) -> None:
    coordinator = served(trainer, call("create", **CREATE), STEP, STEP)
    assert coordinator.results[1] == coordinator.results[2]
    assert trainer._slots[MODEL].steps == 1
    served(trainer, dataclasses.replace(STEP, number=3))
    assert trainer._slots[MODEL].steps == 2


def test_calls_that_come_again_after_their_model_was_made_again_are_run(trainer: Trainer) -> None:
    """So does a coordinator that has begun again, whichever call was the last one."""
    create, save = call("create", number=0, **CREATE), call("save", folder="0a", optimizer=True)
    served(trainer, create, STEP, create, STEP)
    assert trainer._slots[MODEL].steps == 1
    load = call("load", number=0, folder="0a", optimizer=True)
    served(trainer, save, STEP, load, STEP, load, STEP)
    assert trainer._slots[MODEL].steps == 2


def test_a_call_with_other_arguments_is_another_call(trainer: Trainer) -> None:
    served(
        trainer,
        call("create", **CREATE),
        call("save", folder="0a", optimizer=True),
        STEP,
        call("save", folder="0b", optimizer=True),
        call("load", folder="0a", optimizer=True),
        call("load", folder="0b", optimizer=True),
    )
    assert trainer._slots[MODEL].steps == 1


def saving(number: int) -> TinkerOperation:
    return call("optim_step", number=number, folder=f"{number:02x}", **ADAM)


def test_the_coordinator_is_told_which_steps_are_on_disk(
    trainer: Trainer, config: LearnerConfig
) -> None:
    coordinator = served(trainer, call("create", **CREATE), saving(1), saving(2), saving(3))
    # A stop waits for what is being written.
    assert {path.name for path in (config.out_dir / "tinker").iterdir()} == {"01", "02", "03"}
    coordinator.saved += served(trainer, None, None).saved
    assert coordinator.saved == sorted(set(coordinator.saved)), "each is reported once"
    assert coordinator.saved[-1] == (MODEL, 3)


class Lost(ScriptedOperations):
    """A coordinator that cannot be reached."""

    def take_operation(self, saved: Sequence[tuple[str, int]] = ()) -> TinkerOperation | None:
        super().take_operation(saved)
        raise Unreachable("no answer")


def test_steps_are_reported_again_if_the_coordinator_did_not_answer(trainer: Trainer) -> None:
    served(trainer, call("create", **CREATE), saving(1))
    for _ in range(2):
        lost = Lost([None])
        with pytest.raises(Unreachable):
            serve(trainer, lost, stopped=lambda: False)
        assert lost.saved == [(MODEL, 1)]
    assert served(trainer, None, None).saved == [(MODEL, 1)]


def test_the_loop_goes_on_after_a_failure(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> float:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(Slot, "step", full)
    with caplog.at_level(logging.INFO):
        coordinator = served(
            trainer,
            call("create", number=0, **{**CREATE, "rank": -1}),
            call("create", **CREATE),
            STEP,
            call("keep", "", models=[], folders=[]),
        )
    assert coordinator.results == [
        OperationFailed("rank: expected 1 to 512; found -1"),
        {},
        OperationFailed("RuntimeError: out of memory", "server"),
        {},
    ]
    assert f"refused kind=create model={MODEL}: rank: expected" in caplog.text
    assert f"failed kind=optim_step model={MODEL}" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("fault", [Unanswered, Fenced])
def test_the_loop_ends_in_order_when_it_is_told_to_stop_and_not_when_it_is_fenced(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise fault("over")

    monkeypatch.setattr(ScriptedOperations, "take_operation", refuse)
    expected = pytest.raises(Fenced) if fault is Fenced else contextlib.nullcontext()
    with expected:
        served(trainer, None)


class Stopping(ScriptedOperations):
    """After its last call the program gets SIGTERM, as by a service manager."""

    def take_operation(self, saved: Sequence[tuple[str, int]] = ()) -> TinkerOperation | None:
        if not self.calls:
            signal.raise_signal(signal.SIGTERM)
            return None
        return super().take_operation(saved)

    def hurry(self) -> None:
        """Nothing waits."""


def test_the_program_serves_until_a_signal_without_learner_steps(
    config: LearnerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_config(tmp_path / "run.toml", config)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if "steps" not in line))
    coordinator = Stopping([call("create", **CREATE), call("save", folder="0a", optimizer=True)])
    monkeypatch.setattr(
        program, "Coordinator", lambda *_, **__: contextlib.nullcontext(coordinator)
    )
    assert main(["--config", str(path), "--serve"]) == 0
    ((_, identity, _),) = coordinator.sessions
    assert (config.out_dir / "learner.id").read_text().strip() == identity
    assert len(coordinator.results) == 2
    assert (config.out_dir / "tinker" / "run" / "0a" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("other", ["--sft", "--plan", "--resume", "--export=1"])
def test_serving_is_a_task_of_its_own(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["out"] if other.startswith("--export") else []
    arguments = ["--config=run.toml", "--serve", *other.split("="), *more]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    name = other.partition("=")[0]
    assert f"--serve does not go with {name}" in capsys.readouterr().err
