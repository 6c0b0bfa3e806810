"""The status of this build and of the last release: each reads what the other writes."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from echo2d.core.status.json_form import read_status, status_json
from echo2d.core.status.schema import (
    Alert,
    BoxStatus,
    LearnerStatus,
    ProcessStatus,
    RentingStatus,
    TotalsStatus,
)
from tests.support.builds import released
from tests.support.status import RICH

BOX = BoxStatus(
    label="x-1", provider="x", offer="y", ids=("i-1",), state="seen", why="", usd_per_h=0.5, age_s=1.0,
    life_left_s=9.0, cost_usd=0.1,
)  # fmt: skip
RENTING = RentingStatus(
    usd_per_h=0.5, usd_per_h_max=4.0, spent_usd=1.0, set_aside_usd=2.0, committed_usd=3.0, left_usd=7.0,
    usd_total_max=10.0, why="", blind=("x",), states={"seen": 1}, boxes=(BOX,),
    alerts=(Alert("renting_short", "renting: x"),),
)  # fmt: skip
PROCESS = ProcessStatus(run_id="run-1", peer_faults=1, learner_silent_s=None, renting=RENTING)

# Reads a status, and writes what this build knows of it.
ROUND_TRIP = """
import json, sys
from echo2d.core.status.json_form import read_status, status_json
for line in sys.stdin:
    print(json.dumps(status_json(read_status(json.loads(line)))))
"""


def test_each_reads_the_status_of_the_other(tmp_path: Path) -> None:
    ours = []
    for make in RICH:
        world = make()
        ours.append(replace(world.state.status(now=world.now), process=PROCESS))
    old = released(tmp_path)
    found = subprocess.run(
        old.argv("-c", ROUND_TRIP),
        input="\n".join(json.dumps(status_json(each)) for each in ours),
        check=True,
        capture_output=True,
        text=True,
    )
    for status, line in zip(ours, found.stdout.splitlines(), strict=True):
        facts = json.loads(line)
        assert "learner" not in facts, "this is no status of 0.1.0"
        read = read_status(facts)
        assert (read.committed_step, read.groups) == (status.committed_step, status.groups)
        assert [each.id for each in read.workers] == [each.id for each in status.workers]
        assert read.attention == status.attention
        assert read.learner == LearnerStatus()
        counts = status.trajectories
        assert read.totals == TotalsStatus(
            counts.trained, counts.dropped, status.versions_published
        )
        assert read.process is not None
        assert read.process.renting == replace(RENTING, alerts=())
