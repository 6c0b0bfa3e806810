"""A hardly trained model, the config of a short run on it, and a scripted coordinator."""

import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import echo2d.learner.__main__ as program
from echo2d.learner.config import LearnerConfig
from tests.support.learner import config_in, make_base
from tests.support.poison import POISONED_LOSS
from tests.support.scripted_coordinator import ScriptedCoordinator


@pytest.fixture(autouse=True)
def modules_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner in this process looks for modules beside its config, and tests after it must not."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path, base: Path) -> LearnerConfig:
    (tmp_path / "snapshots").mkdir()
    return config_in(tmp_path, base, steps=4, checkpoint_every=3)


@pytest.fixture
def coordinator(tmp_path: Path) -> ScriptedCoordinator:
    return ScriptedCoordinator(tmp_path / "taken", lag=1)


@pytest.fixture
def served(
    coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> ScriptedCoordinator:
    """The coordinator that the learner's program connects to."""
    monkeypatch.setattr(
        program, "Coordinator", lambda *_, **__: contextlib.nullcontext(coordinator)
    )
    return coordinator


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """The learner's program sets them; the test runner gets its own back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """The learner's program sets it up for its own process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def sensitive(
    config: LearnerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LearnerConfig:
    """A learner whose gradient is no number where POISON is in the batch."""
    (tmp_path / "sensitive_loss.py").write_text(POISONED_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    return dataclasses.replace(config, loss="sensitive_loss:loss")
