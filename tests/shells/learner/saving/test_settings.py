"""A learner that goes on with other settings says which."""

import dataclasses
import logging

import pytest

from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.settings import SETTINGS_FILE, tell_changes


def test_changed_settings_are_listed(
    config: LearnerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config.out_dir.mkdir()
    caplog.set_level(logging.INFO)
    tell_changes(config)
    tell_changes(config)
    assert not caplog.messages
    tell_changes(dataclasses.replace(config, lr=3e-5, objective="gspo"))
    assert caplog.messages == [
        "changed key=learner.objective before='grpo' now='gspo'",
        f"changed key=learner.lr before={config.lr!r} now=3e-05",
    ]
    (config.out_dir / SETTINGS_FILE).write_text("no json")
    tell_changes(config)
    assert len(caplog.messages) == 2
