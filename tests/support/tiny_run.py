"""A run of real programs, as `echo2d init --task tiny` sets it up, on ports of its own."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from echo2d.client import Coordinator
from echo2d.demo.processes import Programs
from tests.support.free_port import free_port
from tests.support.polling import START_S, poll


@dataclass(frozen=True, slots=True)
class TinyRun:
    """url: of its coordinator. box_token: of a worker that may join."""

    folder: Path
    url: str

    @property
    def box_token(self) -> Path:
        return self.folder / "box-1.token"

    def coordinator(self) -> Coordinator:
        viewer = self.folder / "coordinator" / "tokens" / "viewer.token"
        return Coordinator(self.url, token_file=viewer)


def start_tiny_run(folder: Path, programs: Programs) -> TinyRun:
    """Set up the run in a new folder, and start its coordinator and its learner."""
    asked = [
        "init",
        "--task=tiny",
        "--host=127.0.0.1",
        f"--port={free_port()}",
        "--boxes=1",
        "--yes",
    ]
    options = [f"--out={folder}", "--set=link.port=0"]
    subprocess.run([sys.executable, "-m", "echo2d", *asked, *options], check=True, timeout=START_S)
    config = f"--config={folder / 'run.toml'}"
    programs.start("coordinator", "-m", "echo2d", "coordinate", config)
    facts = folder / "coordinator" / "coordinator.json"
    poll(facts.exists)
    programs.start("learner", "-m", "echo2d", "learn", config)
    return TinyRun(folder, json.loads(facts.read_text())["url"])


def has_verified(coordinator: Coordinator) -> bool:
    """Whether a peer other than the seed has the version that spreads."""
    broadcast = coordinator.status()["broadcast"]
    return broadcast is not None and any(peer["verified"] for peer in broadcast["peers"])
