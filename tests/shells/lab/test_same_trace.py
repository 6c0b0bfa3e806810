"""A simulated run depends on its seed alone."""

import os
import subprocess
import sys

from tests.support.paths import REPO

PRINT_TRACES = """
from echo2d_lab.faults.fault_schedule import Schedule
from echo2d_lab.faults.world import SimulatedRun
for rng_seed in (3, 20, 44):
    print(SimulatedRun(Schedule.draw(rng_seed)).run().trace)
"""


def test_the_same_seed_leaves_the_same_trace_in_every_process() -> None:
    """Or a failing seed would not come back: no decision may hang on the order of a set."""
    traces = []
    for hash_seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": f"{REPO}:{REPO / 'tools' / 'lab'}",
        }
        done = subprocess.run(
            [sys.executable, "-c", PRINT_TRACES], env=environment, capture_output=True, check=True
        )
        traces.append(done.stdout)
    assert traces[0] == traces[1]
    assert len(set(traces[0].split())) == 3
