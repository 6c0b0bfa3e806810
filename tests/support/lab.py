"""Laboratories for tests: network namespaces and emulated links, which need root and a C compiler.

`make_lab` is a fixture. A folder of tests that needs it imports it in its conftest.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from echo2d.plan.kernel.scenario import PeerSpec
from echo2d_lab.bench.lab.netlab import Lab, why_not

MakeLab = Callable[..., Lab]


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[MakeLab]:
    """Call make_lab(spec, spec, ..., queue_s=...) to set one up; it is taken down after the test.

    The test skips, and says why, on a machine that can have no laboratory.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as cleanup:

        def make(*specs: PeerSpec, queue_s: float = 0.05) -> Lab:
            return cleanup.enter_context(Lab(specs, tmp_path, queue_s=queue_s))

        yield make
