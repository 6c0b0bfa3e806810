"""New weights of a client of the Tinker API on emulated links: when every worker draws from them."""

import json
import subprocess
import sys

import pytest

from echo2d_lab.bench.lab.netlab import why_not

pytestmark = [pytest.mark.timeout(900)]
DRAWN_S_MAX = 3.5


def test_every_worker_soon_draws_from_new_weights() -> None:
    """An adapter of 20 MB, and four workers of 100 Mbit/s, as the learner has. The wire takes 1.6 s."""
    if why_not() is not None:
        pytest.skip(str(why_not()))
    words = ["-m", "echo2d_lab.research.tinker_snapshot", "--rounds=3", "--json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drawn_s"] <= DRAWN_S_MAX, done.stderr
    assert 15e6 < found["wire_bytes"] < 21e6
    # The workers pass on what they have received.
    assert found["sent_bytes"] < 2 * found["wire_bytes"]
