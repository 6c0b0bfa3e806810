"""Fixtures of tests of whole runs."""

from pathlib import Path

import pytest

from tests.support.learner import make_base
from tests.support.programs import site

__all__ = ["site"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models"), layers=2)
