"""Programs of two builds in one run: this checkout and the first release, as it was frozen.

What both understand goes on, in both directions; what they do not is refused by name, and heals when
one of them is upgraded. Programs, sockets and tokens are real; only the engine has no model.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.core.protocol.builds import PROTOCOL_VERSION, to_install
from echo2d.this_build import THIS_BUILD
from tests.support.builds import TODAY, BuildPrograms, Site, a_site, incompatible, released
from tests.support.polling import poll

pytestmark = [pytest.mark.timeout(600)]

NAMED_S = 30.0  # a worker of another build is named in the status after so long, at the latest


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with a_site(tmp_path) as site:
        yield site


@pytest.fixture
def old(tmp_path: Path) -> BuildPrograms:
    return released(tmp_path)


@pytest.mark.parametrize("upgraded", ["coordinator", "boxes and learner"])
def test_this_build_and_the_last_release_train_together(
    site: Site, old: BuildPrograms, upgraded: str
) -> None:
    """Weights pass between boxes of both builds: each chain has one after the other."""
    here, there = (TODAY, old) if upgraded == "coordinator" else (old, TODAY)
    site.coordinate(here)
    for name, build in (("box-1", there), ("box-2", here), ("box-3", there)):
        site.join(name, build, owner=here)
    poll(lambda: len(site.status()["workers"]) == 3)
    assert site.learn(there, steps=20).wait(120.0) == 0, site.log("learner")
    facts = site.status()
    assert facts["committed_step"] == 20
    builds = {row["name"]: row["build"] for row in facts["workers"]}
    names = {"today": THIS_BUILD.name, "0.1.0": "0.1.0"}
    assert builds == {
        "box-1": names[there.name], "box-2": names[here.name], "box-3": names[there.name],
    }  # fmt: skip
    assert facts["build"] == names[here.name]
    assert all(row["accepted"] > 0 for row in facts["workers"])
    assert facts["peer_faults"] == 0
    assert facts["other_builds"] == []


def test_a_worker_of_another_build_is_named_and_joins_once_it_is_upgraded(
    site: Site, tmp_path: Path
) -> None:
    later = incompatible(tmp_path, "0.9.0", 12)
    site.coordinate(TODAY)
    began = time.monotonic()
    box = site.join("gpu-7", later, owner=TODAY)
    line = site.says("gpu-7", "refused this peer")
    assert (
        "(build): this worker is echo2d 0.9.0 (control protocol 12); the coordinator is "
        f"echo2d {THIS_BUILD.name} (control protocol {PROTOCOL_VERSION}): "
        f"install {to_install(THIS_BUILD, on_a_box=True)}" in line
    )
    poll(lambda: any("is of another build" in line for line in site.status()["attention"]))
    assert time.monotonic() - began < NAMED_S
    assert box.returncode is None, "it waits, and tries again"
    assert site.stop("gpu-7") == 0
    site.join("gpu-7", TODAY)
    poll(lambda: [row["name"] for row in site.status()["workers"]] == ["gpu-7"])
    assert site.status()["other_builds"] == []


def test_this_worker_waits_for_a_coordinator_of_another_build(site: Site, tmp_path: Path) -> None:
    """It is welcome as soon as the coordinator is what it understands."""
    later = incompatible(tmp_path, "0.9.0", 12)
    site.coordinate(later)
    box = site.join("gpu-7", TODAY, owner=later)
    line = site.says("gpu-7", "refused this peer")
    assert f"this worker is echo2d {THIS_BUILD.name} (control protocol {PROTOCOL_VERSION})" in line
    assert "install echo2d 0.9.0" in line
    retry_s = float(line.rpartition("retry_s=")[2])
    assert 100.0 < retry_s < 140.0
    assert box.returncode is None
