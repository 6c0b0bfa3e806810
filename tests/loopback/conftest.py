"""Real sockets and files: a blocking call of ours on the event loop fails the test (house rule 8)."""

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    guard = BlockBuster(scanned_modules=["echo2d"])
    guard.activate()
    yield
    guard.deactivate()
