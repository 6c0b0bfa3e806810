"""What needs Hugging Face TRL, which lives in an environment of its own (`make trl-example`)."""

from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).parents[2] / ".cache" / "trl"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.trl)
            item.add_marker(pytest.mark.timeout(1800))
            if not (ENVIRONMENT / "ready").exists():
                item.add_marker(pytest.mark.skip(reason="no TRL here: `make trl-example` installs it"))
