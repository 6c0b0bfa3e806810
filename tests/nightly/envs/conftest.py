"""Tests with agents' own frameworks, each in an environment of its own (`make nightly-envs` installs them)."""

from pathlib import Path

import pytest

from tests.support.programs import site

__all__ = ["site"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(900))
