"""Settings of the whole suite.

Hypothesis has no wall-clock deadlines, because machines are shared, and prints its seeds. `make test`
gives the same examples every time; `make soak` draws new ones (`--hypothesis-profile=search`).

Tests that take the fixture `fuzz` run twice: with 20,000 messages (all of them together), and under
`-m soak` with 1,000,000 from a fresh seed. `--messages N` and `--rng-seed S` change either. `chunk_fuzz` is
the same for the codecs, with 1,000 pairs of chunks in the short run.
"""

import os
import random
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

from tests.support.fuzz import Fuzz

settings.register_profile(
    "search", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("echo2d", parent=settings.get_profile("search"), derandomize=True)
settings.load_profile("echo2d")

# Processes of xdist say that their terminal has 80 columns; they have none.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")  # readline, which pytest imports, puts it where os.environ does not see it

TESTS = Path(__file__).parent
FUZZ_MESSAGES = 20_000
FUZZ_CHUNKS = 1000
SOAK_MESSAGES = 1_000_000
SOAK_TIMEOUT_S = 3600
FUZZ_SEED = 2602


def pytest_configure() -> None:
    """Refuse to test another checkout's learner, and let the programs that tests start be interrupted,
    also in `make test &`.

    A shell without job control starts a background job with SIGINT ignored, and a program inherits
    that from whoever starts it. A handler is not inherited: the programs get SIGINT's default,
    while this process goes on as before.
    """
    learner = find_spec("echo2d.learner")
    where = Path(*learner.submodule_search_locations or ()) if learner else None
    if where is None or where.resolve() != TESTS.resolve().parent / "learner":
        raise pytest.UsageError(
            f"echo2d.learner: expected the folder learner of this checkout; found {where}; run `make setup` here"
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--messages",
        type=int,
        help="hostile messages of all fuzz tests together, or pairs of chunks",
    )
    parser.addoption("--rng-seed", type=int, help="of the fuzz tests")
    parser.addoption(
        "--soak-from",
        type=int,
        default=1000,
        help="first rng_seed of schedules and kills of a soak",
    )


SOAK = pytest.param(
    SOAK_MESSAGES, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_TIMEOUT_S)]
)


def _fuzz(request: pytest.FixtureRequest) -> Fuzz:
    messages = request.config.getoption("--messages") or request.param
    seed = request.config.getoption("--rng-seed")
    if seed is None:
        soak = request.param == SOAK_MESSAGES
        seed = random.SystemRandom().getrandbits(32) if soak else FUZZ_SEED
    print(f"fuzz --messages {messages} --rng-seed {seed}")  # noqa: T201 - shown when it fails
    return Fuzz(messages, random.Random(seed))


@pytest.fixture(params=[pytest.param(FUZZ_MESSAGES, id="short"), SOAK])
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """How many hostile messages, and the chance they are made by."""
    return _fuzz(request)


@pytest.fixture(params=[pytest.param(FUZZ_CHUNKS, id="short"), SOAK])
def chunk_fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """How many pairs of chunks for the codecs, and the chance they are made by."""
    return _fuzz(request)


@pytest.fixture
def soak_from(request: pytest.FixtureRequest) -> int:
    """The first rng_seed."""
    first: int = request.config.getoption("--soak-from")
    return first


# No event loop of ours runs in these folders.
UNGUARDED = (
    "unit",
    "shells/sim",
    "e2e",
    "nightly/runs",
    "nightly/lab",
    "nightly/sglang",
    "nightly/trl",
    "nightly/tinker",
)


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """A blocking call of ours on the event loop fails the test (house rule 8)."""
    if any(
        request.path.is_relative_to(TESTS / each) for each in UNGUARDED
    ) or request.node.get_closest_marker("may_block"):
        yield
        return
    guard = BlockBuster(scanned_modules=["echo2d", "echo2d_lab"])
    for name, function in guard.functions.items():
        if name.startswith("sqlite3."):
            # The ledger of a simulated coordinator is in memory.
            function.can_block_in("faults/memory_ledger.py", {"__init__", "append", "recover"})
    guard.activate()
    yield
    guard.deactivate()
