"""The image of `Containerfile`, built here without a registry, joins a run as a relay."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.bench.lab.processes import STOP_S, Program, Programs
from echo2d.client import Coordinator
from tests.support.paths import REPO
from tests.support.polling import START_S, poll

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

USER = 10001  # of the Containerfile


def buildah(*words: str) -> str:
    done = subprocess.run(
        ["buildah", *words], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout.strip()


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its name. The image takes two minutes to build the first time."""
    if os.geteuid() or not (shutil.which("buildah") and shutil.which("debootstrap")):
        pytest.skip("an image needs root, buildah and debootstrap")
    monkeypatch.setenv("STORAGE_DRIVER", "vfs")
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    subprocess.run([REPO / "tools" / "image" / "build.sh"], check=True, timeout=1000)
    made = buildah("from", "localhost/echo2d")
    yield made
    buildah("rm", made)


def test_a_container_without_an_engine_passes_versions_on(container: str, tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "echo2d", "init", "--task=tiny", "--host=127.0.0.1", "--yes"]
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--boxes=1", f"--out={folder}", f"--port={port}", "--set=link.port=0"]
    subprocess.run([*asked, *options], check=True, timeout=START_S)
    token = tmp_path / "box.token"
    shutil.copyfile(folder / "box-1.token", token)
    token.chmod(0o600)
    os.chown(token, USER, USER)
    with Programs(tmp_path / "logs") as programs:
        config = f"--config={folder / 'run.toml'}"
        programs.start("coordinator", "-m", "echo2d", "coordinate", config)
        facts = folder / "coordinator" / "coordinator.json"
        poll(facts.exists)
        url = json.loads(facts.read_text())["url"]
        viewer = folder / "coordinator" / "tokens" / "viewer.token"
        programs.start("learner", "-m", "echo2d", "learn", config)
        words = ["buildah", "run", f"--volume={token}:/box.token:ro", container, "--"]
        join = ["echo2d", "join", url, "--token-file=/box.token", "--relay-only"]
        state = "--state-dir=/var/lib/echo2d/state"
        relay = Program("relay", [*words, *join, state], tmp_path / "logs" / "relay.log")
        try:
            with Coordinator(url, token_file=viewer) as coordinator:
                poll(lambda: _has_verified(coordinator))
        finally:
            relay.terminate()
            relay.wait(STOP_S)


def _has_verified(coordinator: Coordinator) -> bool:
    broadcast = coordinator.status()["broadcast"]
    return broadcast is not None and any(peer["verified"] for peer in broadcast["peers"])
