"""Settings of the whole suite: hypothesis without wall-clock deadlines (machines are shared); where soaks begin."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("echo2d", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echo2d")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-from", type=int, default=1000, help="first rng_seed of a soak: go on where one ended")


@pytest.fixture
def soak_from(request: pytest.FixtureRequest) -> int:
    """The first rng_seed."""
    first: int = request.config.getoption("--soak-from")
    return first
