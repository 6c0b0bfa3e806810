"""`echo2d bench publish`: its figures add up; and `kill -9` at every stage of a publish loses nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echo2d.demo.processes import children_of
from echo2d.store.snapshots import build_manifest
from echo2d_lab.bench.publish.run import PATIENCE_S, STAGES, PublishRun

pytestmark = [pytest.mark.timeout(900)]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echo2d", "bench", "publish", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_stages_of_a_publish_follow_each_other(tmp_path: Path) -> None:
    done = bench(
        "--bytes=20MB", "--bytes=60MB", "--predict=100MB", "--rounds=2", f"--dir={tmp_path}", "--json"
    )  # fmt: skip
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    for series in result["series"]:
        for each in series["rounds"]:
            stages = [each[stage] for stage in STAGES[1:]]
            # The daemons' clocks are this machine's, but their lines are only good to a millisecond.
            assert stages[0] < stages[1] < stages[3] < stages[4], stages
            assert stages[0] < stages[2] < stages[3]
            assert 0 < each["wire_bytes"] < 0.05 * series["snapshot_bytes"]
        assert series["ratio_least"] <= series["ratio"] <= series["ratio_most"]
    assert set(result["predicted"]) == set(STAGES)
    assert list(tmp_path.iterdir()) == []


def test_one_measured_size_predicts_no_other_size(tmp_path: Path) -> None:
    done = bench("--predict=1GB", f"--dir={tmp_path}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "expected at least two sizes" in done.stderr


# Who is killed, at which line of whose log. A stage that passes quickly may be over by then.
KILLS = [
    ("seed", "coordinator", "encoding"),
    ("coordinator", "coordinator", "encoding"),
    ("coordinator", "coordinator", "first frame"),
    ("coordinator", "coordinator", "encoded"),
    ("coordinator", "worker-0", "verified"),
    ("worker-0", "worker-0", "first frame"),
    ("worker-0", "worker-0", "verified"),
    ("worker-0", "worker-0", "serving"),
]


def test_a_kill_at_any_stage_of_a_publish_loses_nothing(tmp_path: Path) -> None:
    with PublishRun(tmp_path, 64_000_000, changed=0.01, workers=1) as run:
        for victim, whose, kind in KILLS:
            written = run.write()
            run.publish(written)
            deadline = time.monotonic() + PATIENCE_S
            while kind not in run.seen(whose, run.version):
                assert time.monotonic() < deadline, (victim, kind)
                time.sleep(0.001)
            kill(run, victim)
            run.wait()
            right = build_manifest(written[0]).digest
            served = json.loads((tmp_path / "worker-0/slots/current.json").read_text())
            slot = tmp_path / "worker-0/slots" / served["slot"] / "model"
            assert served["version"] == run.version
            assert build_manifest(slot).digest == right, (victim, kind)


def kill(run: PublishRun, victim: str) -> None:
    if victim == "seed":
        (seed,) = [
            pid
            for pid in children_of(run.programs["coordinator"].pid)
            if b"echo2d.runtime.seed.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        subprocess.run(["kill", "-9", str(seed)], check=True)
    else:
        run.programs[victim].kill()
        run.programs[victim].start()
