"""Unit tests need no torch, no socket and no process: a test that does fails, and belongs in tests/shells."""

import sys
from collections.abc import Iterator

import pytest

FORBIDDEN = ("socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "os.posix_spawn")
_running: list[str] = []  # the unit test that runs now


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if _running and (event in FORBIDDEN or (event == "import" and arguments[0] == "torch")):
        raise AssertionError(f"a unit test may not do this: {event}; move it to tests/shells")


sys.addaudithook(_look)


@pytest.fixture(autouse=True)
def nothing_outside_this_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """An event that is forbidden fails the test that caused it."""
    _running.append(request.node.nodeid)
    yield
    _running.pop()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `make unit` alone, no test file has imported torch."""
    here = session.config.rootpath / "tests" / "unit"
    alone = session.items and all(item.path.is_relative_to(here) for item in session.items)
    if alone and "torch" in sys.modules:
        raise pytest.UsageError("a test file of tests/unit imports torch; move it to tests/shells")
