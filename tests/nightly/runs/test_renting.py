"""Boxes of a provider of kind "exec", processes of this machine: rented, used, given back, never forgotten."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.demo.processes import Program, Programs, wait_for
from echo2d_lab.standins.fake_learner import FakeLearner
from tests.support.free_port import free_port
from tests.support.paths import REPO
from tests.support.polling import START_S, poll

pytestmark = [pytest.mark.timeout(900)]
SCRIPT = REPO / "examples" / "local_boxes.py"
CONFIG = """
[run]
run_dir = "{root}/run"
snapshot_root = "{root}/snapshots"
[coordinator]
port = {port}
[policy]
trajectories_per_step = 8
group_size = 2
filter_zero_variance = false
[sampling]
max_new_tokens = 4
vocab_size = 32000
[task]
kind = "echo2d_lab.bench.lab.stub_task:StubTask"
options = {{ prompt_tokens = 4, vocab_size = 100 }}
processes = 1
[rent]
usd_per_h = 1.0
usd_total = 2.0
idle_s = 2.0
patience_s = 0.0
life_h = {life_h}
[[provider]]
name = "here"
kind = "exec"
start = ["{python}", "{script}", "start"]
stop = ["{python}", "{script}", "stop"]
list = ["{python}", "{script}", "list"]
timeout_s = 2.0
settle_s = 0.5
list_every_s = 0.5
billed_by_s = 1.0
[[provider.offer]]
name = "process"
usd_per_h = 0.5
trajectories_per_h = 3600
max = 1
"""


class Site:
    def __init__(self, root: Path, programs: Programs) -> None:
        self.root, self.programs = root, programs
        self.boxes = root / "boxes"
        self.planted: list[subprocess.Popen[bytes]] = []
        self.config = root / "run.toml"
        (root / "snapshots").mkdir()
        self.configure()

    def configure(self, *, life_h: float = 24.0) -> None:
        facts = {
            "root": self.root,
            "port": free_port(),
            "python": sys.executable,
            "script": SCRIPT,
            "life_h": life_h,
        }
        self.config.write_text(CONFIG.format(**facts))

    def coordinate(self, name: str, *options: str) -> Program:
        return self.programs.start(
            name, "-m", "echo2d", "coordinate", f"--config={self.config}", *options
        )

    def url(self) -> str:
        return str(
            json.loads(wait_for(self.root / "run" / "coordinator.json", self.programs, START_S))[
                "url"
            ]
        )

    def learner(self) -> FakeLearner:
        return FakeLearner(
            self.url(), self.root / "run" / "tokens" / "learner.token", self.root / "snapshots"
        )

    def command(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "echo2d", *arguments, "--json"], capture_output=True, check=True
        )
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    def renting(self) -> dict[str, Any]:
        found: dict[str, Any] = self.command("status", f"--run-dir={self.root / 'run'}")["renting"]
        return found

    def plant(self, label: str) -> None:
        """A box of this run that no book knows, with no worker in it."""
        box = self.boxes / label
        box.mkdir()
        self.planted.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        (box / "pid").write_text(str(self.planted[-1].pid))

    def labels(self) -> set[str]:
        return {box.name for box in self.boxes.glob("*")}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("BOXES_DIR", str(tmp_path / "boxes"))
    monkeypatch.setenv("BOXES_FLAGS", "--engine=fake --slots=8")
    with Programs(tmp_path / "logs") as programs:
        site = Site(tmp_path, programs)
        yield site
    for box in (tmp_path / "boxes").glob("*"):
        subprocess.run(
            [sys.executable, SCRIPT, "stop"],
            env={**os.environ, "ECHO2D_LABEL": box.name},
            check=True,
        )
    for process in site.planted:
        process.wait(START_S)


def test_a_box_is_rented_used_found_again_and_given_back(site: Site) -> None:
    first = site.coordinate("first", "--rent")
    url = site.url()
    assert "at most 1 usd/h and 2 usd in all" in first.log.read_text()
    assert site.labels() == set()  # nobody needs anything yet

    learner = site.learner()
    learner.start()
    poll(lambda: learner.steps >= 2)
    (label,) = site.labels()
    assert site.renting()["boxes"][0]["label"] == label
    token = site.root / "run" / "tokens" / f"{label}.token"
    assert token.stat().st_mode & 0o777 == 0o600

    first.kill()
    learner.stop()
    nobodys = label.rpartition("-")[0] + "-99"
    site.plant(nobodys)
    (site.root / "run" / "coordinator.json").unlink()
    first.start()
    assert site.url() == url
    assert "1 boxes, 0.5 usd/h" in first.log.read_text()
    poll(lambda: nobodys not in site.labels())
    poll(lambda: f"gone {nobodys}: " in first.log.read_text())  # gone, as lists say
    poll(lambda: f"{label}: it had no work for" in first.log.read_text())  # no learner is there
    assert token.exists()

    first.kill()
    left = site.command("rented", f"--config={site.config}", "--stop")
    assert (left["boxes"], site.labels()) == ([], set())
    assert not token.exists()
    book = site.command("rented", f"--config={site.config}")
    assert book["boxes"] == []
    assert 0 < book["spent_usd"] < 0.1


def test_a_box_whose_time_ends_finishes_what_it_holds(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease takes half a second, and there always is one; the next box takes over."""
    monkeypatch.setenv("BOXES_FLAGS", "--engine=fake --slots=8 --set=tokens_per_s_max=64")
    site.configure(life_h=0.006)
    coordinator = site.coordinate("coordinator", "--rent")
    site.url()
    learner = site.learner()
    learner.start()
    found: list[str] = []

    def drained() -> bool:
        log = coordinator.log.read_text()
        found[:] = re.findall(r"returning (\S+): its time ends; it has", log)
        return bool(found) and f"gone {found[0]}: " in log

    poll(drained)
    steps = learner.steps
    poll(lambda: learner.steps > steps)
    log = coordinator.log.read_text()
    (worker,) = re.findall(rf" connected peer=(\w+) name={found[0]} ", log)
    told, stopped = (
        log.index(f"leaving {found[0]}: its time ends"),
        log.index(f"stop label={found[0]}"),
    )
    assert f"worker={worker}" in log[:told]
    assert not re.search(rf" leased .* worker={worker}", log[told:])
    assert told < stopped < log.index(f"disconnected peer={worker}")  # before its time was over
    status = site.command("status", f"--run-dir={site.root / 'run'}")
    assert (status["handed_over"]["partials"], status["groups_dropped"]) == (0, {})
    learner.stop()


def test_nothing_is_rented_without_a_budget(site: Site) -> None:
    site.config.write_text(site.config.read_text().replace("usd_total = 2.0", ""))
    coordinator = site.coordinate("coordinator", "--rent")
    assert coordinator.wait(START_S) == 2
    assert "rent.usd_total" in coordinator.tail()
