"""`echo2d worker drain BOX && destroy BOX` with 300 workers: it returns when the box has left, and not before."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run

pytestmark = [pytest.mark.timeout(900)]

WORKERS, DRAINED = 300, 20
FLEET = "echo2d_lab.bench.coordinator.shown_fleet"


def test_the_drain_command_returns_when_the_box_has_left(tmp_path: Path) -> None:
    words = [str(tmp_path / "fleet"), f"--workers={WORKERS}", "--rate=40"]
    run_dir = f"--run-dir={tmp_path / 'fleet' / 'coordinator'}"
    command = [sys.executable, "-m", FLEET, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as fleet:
        try:
            assert fleet.stdout is not None
            json.loads(fleet.stdout.readline())
            held = []
            for number in range(DRAINED):
                # The look before keeps an answer, which the order must not be judged by.
                before = {each["name"]: each for each in status(run_dir)}
                name = f"scripted-{number}"
                held.append(before[name]["leased"])
                said = run("worker", "drain", name, run_dir)
                assert said.splitlines()[-1] == f"{name}: ended", said
                after = [each for each in status(run_dir) if each["name"] == name]
                assert all(each["state"] != "joined" and not each["leased"] for each in after), (
                    after
                )
            assert sum(count > 0 for count in held) > DRAINED / 2, held
        finally:
            fleet.terminate()
            fleet.wait()


def status(run_dir: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("status", run_dir, "--json"))["workers"]
    return found
