"""The image of `Containerfile`, built here without a registry, joins a run as a relay."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.demo.processes import STOP_S, Program, Programs
from tests.support.paths import REPO
from tests.support.polling import poll
from tests.support.tiny_run import has_verified, start_tiny_run

pytestmark = [pytest.mark.timeout(1200)]

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
    with Programs(tmp_path / "logs") as programs:
        run = start_tiny_run(tmp_path / "run", programs)
        token = tmp_path / "box.token"
        shutil.copyfile(run.box_token, token)
        token.chmod(0o600)
        os.chown(token, USER, USER)
        words = ["buildah", "run", f"--volume={token}:/box.token:ro", container, "--"]
        join = ["echo2d", "join", run.url, "--token-file=/box.token", "--relay-only"]
        state = "--state-dir=/var/lib/echo2d/state"
        relay = Program("relay", [*words, *join, state], tmp_path / "logs" / "relay.log")
        try:
            with run.coordinator() as coordinator:
                poll(lambda: has_verified(coordinator))
        finally:
            relay.terminate()
            relay.wait(STOP_S)
