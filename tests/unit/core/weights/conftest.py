"""Tests of the delta codec run once with each codec that is available here."""

from collections.abc import Iterator

import pytest

from echo2d import native


@pytest.fixture(params=native.available())
def codec(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.using(request.param):
        yield request.param
