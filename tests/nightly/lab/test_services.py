"""A box with a real systemd becomes a worker by `echo2d join --print-script`: its service starts, restarts, stops.

The box is a Debian that debootstrap makes and systemd-nspawn boots in this host's network.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.demo.processes import Program, Programs
from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.tiny_run import has_verified, start_tiny_run

pytestmark = [pytest.mark.timeout(1200)]

UNIT = "echo2d-join@box-1"
# Where CI unpacks systemd's programs, which it does not install.
UNPACKED = REPO / ".cache" / "systemd" / "usr" / "bin"
RESTART_S = 60.0  # RestartSec of the unit is 15 s
POWER_OFF_S = 30.0


class Box:
    """A booted machine. root: its file system."""

    def __init__(self, root: Path, nspawn: str, log: Path) -> None:
        self.root = root
        words = [nspawn, "--register=no", "--keep-unit", f"--directory={root}", "--boot"]
        self._machine = Program("machine", words, log)

    def wait_until_booted(self) -> None:
        poll(lambda: self._init() is not None)
        poll(lambda: self.asked("systemctl", "is-system-running") in ("running", "degraded"))

    def _init(self) -> str | None:
        """The id of its first process."""
        assert self._machine.returncode is None, self._machine.tail()
        pid = self._machine.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return children[0] if children else None

    def _inside(self, *words: str) -> list[str]:
        return ["nsenter", f"--target={self._init()}", "--all", *words]

    def run(self, *words: str) -> None:
        subprocess.run(self._inside(*words), check=True, timeout=300)

    def asked(self, *words: str) -> str:
        """What the command prints, whatever its exit code."""
        done = subprocess.run(
            self._inside(*words), capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def fact(self, name: str) -> str:
        """A property of the unit."""
        return self.asked("systemctl", "show", f"--property={name}", "--value", UNIT)

    def power_off(self) -> None:
        if self._machine.returncode is None:
            self.asked("systemctl", "poweroff")
        self._machine.wait(POWER_OFF_S)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    nspawn = shutil.which("systemd-nspawn") or shutil.which("systemd-nspawn", path=UNPACKED)
    if os.geteuid() or nspawn is None or shutil.which("debootstrap") is None:
        pytest.skip("a box needs root, debootstrap and systemd-nspawn")
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        monkeypatch.setenv("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "0")
    root = tmp_path / "debian"
    packages = ("systemd", "systemd-sysv", "dbus")
    subprocess.run([REPO / "tools" / "image" / "debian.sh", root, *packages], check=True)
    made = Box(root, nspawn, tmp_path / "machine.log")
    try:
        made.wait_until_booted()
        yield made
    finally:
        made.power_off()
        shutil.rmtree(root, ignore_errors=True)  # half a gigabyte


def test_a_box_becomes_a_worker_whose_service_restarts_and_stops(box: Box, tmp_path: Path) -> None:
    with Programs(tmp_path / "logs") as programs:
        run = start_tiny_run(tmp_path / "run", programs)
        asked = ["join", f"--token-file={run.box_token}", "--relay-only", "--print-script=systemd"]
        script = subprocess.run(
            [sys.executable, "-m", "echo2d", *asked],
            check=True, capture_output=True, text=True, timeout=START_S,
        )  # fmt: skip
        (box.root / "root" / "box.sh").write_text(script.stdout)
        bundle = "PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
        box.run(
            "env", "-u", "PIP_CONSTRAINT", "-u", "PIP_FIND_LINKS", bundle, "bash", "/root/box.sh"
        )
        with run.coordinator() as coordinator:
            poll(lambda: has_verified(coordinator))
            box.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", UNIT)
            poll(lambda: box.fact("NRestarts") == "1", timeout_s=RESTART_S)
            poll(lambda: box.fact("StatusText").endswith(f"connected to {run.url}"))
        assert box.fact("ActiveState") == "active"
        box.run("systemctl", "stop", UNIT)
        assert (box.fact("ActiveState"), box.fact("Result")) == ("inactive", "success")
        journal = box.asked("journalctl", f"--unit={UNIT}", "--no-pager", "--output=cat")
        assert "started peer=" in journal
        assert "level=WARNING" not in journal
        assert "level=ERROR" not in journal
