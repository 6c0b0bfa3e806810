"""The relay that is measured: a process between two ends, with TLS and without."""

import pytest
import uvloop

from echo2d.bench.broadcast.tls_cost import measure

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_measured_relay_passes_all_frames(with_tls: bool) -> None:
    assert uvloop.run(measure(frames=40, with_tls=with_tls)) > 0
