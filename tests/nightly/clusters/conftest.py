"""Tests with the tools of clusters, which `make nightly-clusters` installs: ECHO2D_CLUSTERS names their folder."""

import os
from pathlib import Path

import pytest

from tests.support.programs import site as site


@pytest.fixture(scope="session")
def programs() -> Path:
    found = os.environ.get("ECHO2D_CLUSTERS")
    if found is None:
        pytest.skip("ECHO2D_CLUSTERS names no folder: tools/clusters/setup.sh makes it")
    return Path(found)
