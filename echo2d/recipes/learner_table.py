"""The [learner] table, for programs that write or show whole configs. The learner defines and checks the table."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.tables import print_tables
from echo2d.learner.config import LearnerConfig


def check_learner_table(document: Mapping[str, Any], folder: Path) -> None:
    """OperatorFault: the learner would refuse the [learner] table of this parsed config."""
    LearnerConfig.of(document, folder)


def check_learner_of(config: CoordinatorConfig, path: Path, settings: Iterable[str]) -> None:
    """OperatorFault: the learner would refuse the [learner] table of a run's file. A file without one is valid."""
    if config.learner:
        LearnerConfig.load(path, settings)


def learner_keys() -> str:
    """All keys of the table, as commented TOML with their defaults."""
    return print_tables(LearnerConfig)
