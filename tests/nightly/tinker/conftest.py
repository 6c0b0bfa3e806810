"""Tests with the official client of the Tinker API, in an environment of its own (`make nightly-tinker` installs it).

They never skip: without that environment they fail and say how to install it.
"""

from pathlib import Path

import pytest

from tests.support.paths import TINKER_ENVIRONMENT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True, scope="session")
def environment() -> None:
    assert (TINKER_ENVIRONMENT / "ready").exists(), (
        "no client here: `make nightly-tinker` installs it"
    )
