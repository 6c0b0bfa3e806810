"""What needs Hugging Face TRL, which lives in an environment of its own (`make trl-example`).

Nothing skips here: who asks for these tests without that environment is told, and fails.
"""

from pathlib import Path

import pytest

from tests.support.paths import REPO

ENVIRONMENT = REPO / ".cache" / "trl"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.trl)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(autouse=True)
def environment() -> None:
    assert (ENVIRONMENT / "ready").exists(), "no TRL here: `make trl-example` installs it"
