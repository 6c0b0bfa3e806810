"""Fixtures of tests of simulated broadcasts."""

import pytest

from tests.support.scenarios import Play


@pytest.fixture
def play() -> Play:
    return Play()
