"""What tests of simulated broadcasts share."""

import pytest

from tests.support.scenarios import Play


@pytest.fixture
def play() -> Play:
    return Play()
