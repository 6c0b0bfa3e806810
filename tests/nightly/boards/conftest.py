"""Tests with a real Prometheus, which `make nightly-boards` unpacks: ECHO2D_PROMETHEUS names its folder."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def programs() -> Path:
    return Path(os.environ["ECHO2D_PROMETHEUS"])
