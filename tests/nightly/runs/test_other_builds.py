"""Programs of two builds in one run, which do not understand each other: one line of refusal, and a later retry.

The other build is a copy of this checkout with another version and protocol number. Programs, sockets and
tokens are real.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2d.core.protocol.builds import PROTOCOL_VERSION, to_install
from echo2d.demo.processes import Program
from echo2d.this_build import THIS_BUILD
from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.programs import Site

pytestmark = [pytest.mark.timeout(600)]

OTHER_VERSION, OTHER_PROTOCOL = "0.9.0", PROTOCOL_VERSION + 1
OURS = f"echo2d {THIS_BUILD.name} (control protocol {PROTOCOL_VERSION})"
THEIRS = f"echo2d {OTHER_VERSION} (control protocol {OTHER_PROTOCOL})"

Start = Callable[[Callable[[], Program]], Program]


@pytest.fixture
def other_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a program of the other build, whose folder is first in the path of its children, too."""
    place = tmp_path / OTHER_VERSION
    ignored = shutil.ignore_patterns("__pycache__", "share")
    shutil.copytree(REPO / "echo2d", place / "echo2d", ignore=ignored)
    builds, init = (place / "echo2d" / each for each in ("core/protocol/builds.py", "__init__.py"))
    numbers, count = re.subn(
        r"^(PROTOCOL_(?:VERSION|OLDEST)) = .*$",
        rf"\1 = {OTHER_PROTOCOL}",
        builds.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 2
    builds.write_text(numbers)
    init.write_text(init.read_text().replace("0.1.0", OTHER_VERSION))

    def start(begin: Callable[[], Program]) -> Program:
        with monkeypatch.context() as there:
            there.chdir(place)
            there.setenv("PYTHONPATH", str(place))
            return begin()

    return start


def refusal(program: Program) -> str:
    """The line of its log that says why it was refused."""
    words = "refused this peer"
    poll(lambda: words in program.log.read_text())
    return next(line for line in program.log.read_text().splitlines() if words in line)


def test_a_worker_of_another_build_is_named_and_joins_once_it_is_upgraded(
    site: Site, other_build: Start
) -> None:
    site.coordinate()
    site.url()
    box = other_build(lambda: site.join("gpu-7", "--engine=fake"))
    assert (
        f"(build): this worker is {THEIRS}; the coordinator is {OURS}: "
        f"install {to_install(THIS_BUILD, on_a_box=True)}" in refusal(box)
    )
    poll(lambda: len(site.status()["other_builds"]) == 1)
    (alert,) = (each for each in site.status()["alerts"] if each["kind"] == "peer_build")
    assert "is of another build" in alert["sentence"]
    assert box.returncode is None, "it does not wait until it may try again"
    box.terminate()
    assert box.wait(START_S) == 0
    box.start()  # of this build
    poll(lambda: len(site.status()["workers"]) == 1)
    assert site.status()["other_builds"] == []


def test_a_worker_waits_for_a_coordinator_of_another_build(site: Site, other_build: Start) -> None:
    other_build(site.coordinate)
    box = site.join("gpu-7", "--engine=fake")
    line = refusal(box)
    assert f"this worker is {OURS}; the coordinator is {THEIRS}: install echo2d 0.9.0" in line
    assert 100.0 < float(line.rpartition("retry_s=")[2]) < 140.0
    assert box.returncode is None
