"""The session on a GPU runs on a CPU in small, so that it still works when there is a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tools.gpu.session import SECTIONS, table


@pytest.mark.timeout(900)  # a minute on an idle machine
def test_every_section_of_the_session_gives_its_figures_or_a_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu.session", "--small", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "session.json").read_text())
    assert list(found["sections"]) == list(SECTIONS)
    for section in found["sections"].values():
        assert not section["error"]
        assert any(row["figures"] for row in section["rows"])
        for row in section["rows"]:
            assert row["figures"] or row["skipped"]
    assert table(found) in run.stdout
    # A line for each section says how much time is left.
    assert run.stdout.count(" s left\n") == len(SECTIONS)
