"""Tests with a real Prometheus (`make boards-test` unpacks it). ECHO2D_PROMETHEUS names the folder of its programs."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.boards)


@pytest.fixture(scope="session")
def programs() -> Path:
    return Path(os.environ["ECHO2D_PROMETHEUS"])
