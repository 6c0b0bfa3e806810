"""The relays whose cost is measured: each is a process between two ends."""

import pytest
import uvloop

from echo2d_lab.bench.broadcast import relay_cost
from echo2d_lab.bench.broadcast.relay_cost import measure, measure_threads

pytestmark = [pytest.mark.timeout(900)]

FRAME_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def _few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_cost, "TOTAL_BYTES", 40 * FRAME_BYTES)


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_relay_of_echo2d_passes_all_frames(with_tls: bool) -> None:
    assert uvloop.run(measure(frame_bytes=FRAME_BYTES, with_tls=with_tls)) > 0


def test_the_blocking_relay_passes_all_bytes() -> None:
    assert measure_threads(frame_bytes=FRAME_BYTES) > 0
