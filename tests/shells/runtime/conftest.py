"""The stand-in for a coordinator that seeds and workers under test join."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fake_coordinator import CoordinatorDouble


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[CoordinatorDouble]:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        yield double
