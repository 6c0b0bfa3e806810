"""The programs of a run, started one by one as on several machines, each with its log.

`site` is a fixture. A folder of tests that needs it imports it in its conftest.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.demo.processes import Program, Programs, wait_for
from echo2d.demo.run import CONFIG, DEMO_LEARNER
from echo2d.demo.tiny_model import make_tiny_model
from tests.support.control_link import worker_token
from tests.support.polling import START_S


class Site:
    """A learner host and its boxes, all on this machine, with every file below `directory`."""

    learner_table = DEMO_LEARNER

    def __init__(self, directory: Path, model: Path, programs: Programs) -> None:
        self.directory = directory
        self.run_dir = directory / "coordinator"
        self.config = directory / "run.toml"
        self.programs = programs
        self.facts = {
            "run": directory,
            "model": model,
            "staleness": 1,
            "kappa": 1,
            "seed": 0,
            "delta": "true",
            "task": "sort_digits",
        }
        (directory / "snapshots").mkdir()
        self.config.write_text(CONFIG.format(**self.facts).replace("= 256", "= 32"))

    def coordinate(self, name: str = "coordinator", *options: str) -> Program:
        return self.programs.start(
            name, "-m", "echo2d", "coordinate", "--config", str(self.config), *options
        )

    def url(self) -> str:
        announced = wait_for(self.run_dir / "coordinator.json", self.programs, START_S)
        return str(json.loads(announced)["url"])

    def fix_port(self, port: int) -> None:
        """The coordinator listens here from its first start on, and the seed at any free port."""
        ports = f"port = {port}\n\n[link]\nport = 0"
        self.config.write_text(self.config.read_text().replace("port = 0", ports, 1))

    def join(self, name: str, *options: str) -> Program:
        out = self.directory / f"{name}.token"
        worker_token(self.run_dir, self.url(), name, out=out)
        state = f"--state-dir={self.directory / name}"
        return self.programs.start(
            name, "-m", "echo2d", "join", self.url(), f"--token-file={out}", state, *options
        )

    def learn(self, steps: int, *options: str) -> Program:
        text = self.config.read_text().partition("\n[learner]")[0]
        self.config.write_text(
            text + self.learner_table.format(**self.facts, steps=steps, url=self.url())
        )
        return self.programs.start(
            f"learner-{steps}", "-m", "echo2d", "learn", "--config", str(self.config), *options
        )

    def status(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(run("status", f"--run-dir={self.run_dir}", "--json"))
        return facts

    def serving(self) -> int | None:
        """The version that the first worker serves."""
        now = self.status()["workers"][0]["serving"]
        return None if now is None else int(now["version"])


def run(*arguments: str, code: int = 0) -> str:
    """Run an `echo2d` command to its end; returns its stdout, or its stderr if `code` is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", "echo2d", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site on which nothing runs yet. Programs that still run after the test are stopped."""
    model = make_tiny_model(Path.home() / ".cache" / "echo2d")
    with Programs(tmp_path / "logs") as programs:
        yield Site(tmp_path, model, programs)
