"""The bench of a train step's overhead runs with the learner of today."""

import re
import subprocess
import sys
from pathlib import Path


def test_a_short_bench_prints_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo2d_lab.bench.learner_overhead", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--steps", "8", "--tokens", "16"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # noqa: T201
    overhead = re.search(r"overhead of a step that begins a version: median=(\S+)", done.stdout)
    assert overhead, done.stdout
    assert 0 < float(overhead[1]) < 1
