"""Tests that need Hugging Face TRL, which has an environment of its own (`make nightly-trl` installs it).

They never skip: without that environment they fail and say how to install it.
"""

from pathlib import Path

import pytest

from tests.support.paths import TRL_ENVIRONMENT
from tests.support.programs import site

__all__ = ["site"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(autouse=True)
def environment() -> None:
    assert (TRL_ENVIRONMENT / "ready").exists(), "no TRL here: `make nightly-trl` installs it"
