"""Tests with a real Prometheus (`make nightly-boards` unpacks it); ECHO2D_PROMETHEUS names the folder with its programs."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def programs() -> Path:
    return Path(os.environ["ECHO2D_PROMETHEUS"])
