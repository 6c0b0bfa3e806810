"""Laboratories for tests; where there can be none, the reason is shown."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from echo2d.bench.lab.netlab import Lab, why_not
from echo2d.sim.kernel.scenario import PeerSpec

MakeLab = Callable[..., Lab]


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[MakeLab]:
    """make_lab(spec, spec, ..., queue_s=...): taken down after the test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as cleanup:

        def make(*specs: PeerSpec, queue_s: float = 0.05) -> Lab:
            return cleanup.enter_context(Lab(specs, tmp_path, queue_s=queue_s))

        yield make
