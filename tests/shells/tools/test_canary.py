"""The canary knows which release each part of the night runs, and what to run with a newer one."""

import re

import pytest

from tests.support.paths import REPO
from tools.canary import PARTS, run_by_the_tests


@pytest.mark.parametrize("kind", PARTS)
def test_each_part_names_its_release_and_its_test(kind: str) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", run_by_the_tests(kind))
    assert (REPO / PARTS[kind].folder / "setup.sh").exists()
    assert (REPO / PARTS[kind].test).exists()
