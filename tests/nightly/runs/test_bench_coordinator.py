"""`echo2d bench coordinator` with a small fleet: only engines and learner are scripted, and the figures add up."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
LOAD = ("--workers=50", "--rate=100", "--tokens=200", "--slots=4", "--seconds=3")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echo2d", "bench", "coordinator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_small_fleet_is_served() -> None:
    done = bench(*LOAD, "--json")
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["lease_p50_ms"] <= result["lease_p99_ms"] <= result["lease_max_ms"]
    assert (
        result["lease_p99_ms_parts"][0] <= result["lease_p99_ms"] <= result["lease_p99_ms_parts"][1]
    )
    assert 0 < result["answer_p50_ms"] <= result["answer_p99_ms"]
    assert 0 < result["cpu_share"] <= result["cores"]
    assert 20 < result["rss_mb"] < 1000
    assert result["leases_measured"] > 100
    assert (result["results_refused"], result["links_lost"]) == ({}, 0)
    assert 0.5 * 100 < result["trajectories_per_s"] < 1.5 * 100
    assert result["settings"]["workers"] == 50
    assert result["settings"]["generate_s"] == 2.0


def test_a_fleet_too_small_for_a_group_is_reported_in_one_line() -> None:
    done = bench("--workers=1", "--slots=4")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("echo2d: --workers x --slots: expected at least 8")
