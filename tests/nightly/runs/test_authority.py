"""The key of a run is changed, on purpose and after a loss, while real boxes and a learner work for it."""

import shutil

import pytest

from echo2d.demo.processes import Program
from tests.support.free_port import free_port
from tests.support.polling import START_S, poll
from tests.support.programs import Site, run

pytestmark = [pytest.mark.timeout(900)]


def workers(site: Site) -> int:
    return len([each for each in site.status()["workers"] if each["serving"] is not None])


def train(site: Site, to: int, *options: str) -> None:
    learner = site.learn(to, *options)
    assert learner.wait(3 * START_S) == 0, learner.tail()


def stop(program: Program) -> None:
    program.terminate()
    assert program.wait(START_S) == 0, program.tail()


def test_boxes_follow_a_new_key_signed_by_the_old_one_and_no_key_after_a_loss(site: Site) -> None:
    port = free_port()
    # `fix_port` writes another table after the port.
    site.config.write_text(site.config.read_text().replace("port = 0", 'tls = "on"\nport = 0', 1))
    site.fix_port(port)
    coordinator = site.coordinate("first")
    boxes = {name: site.join(name) for name in ("one", "two")}
    train(site, 2)
    run_id = site.status()["run_id"]
    refused = run("token", "new-authority", f"--run-dir={site.run_dir}", code=2)
    assert "stop it first" in refused
    stop(coordinator)
    run("token", "new-authority", f"--run-dir={site.run_dir}")
    copy = site.directory / "thief"
    coordinator = site.coordinate("second")
    site.url()
    poll(lambda: workers(site) == 2)
    train(site, 4, "--resume")
    assert site.status()["run_id"] == run_id
    for box in boxes.values():
        assert "the authority of this run was changed number=1" in box.log.read_text()
    # A box that starts again believes the new authority alone, with the token file of the old one.
    stop(boxes["two"])
    boxes["two"].start()
    poll(lambda: workers(site) == 2)
    train(site, 6, "--resume")
    stop(coordinator)
    shutil.copytree(site.run_dir, copy)
    new = site.directory / "new"
    lost = ("--lost", f"--url=https://127.0.0.1:{port}", f"--out={new}")
    run("token", "new-authority", f"--run-dir={site.run_dir}", *lost)
    assert sorted(each.name for each in new.iterdir()) == ["one.token", "two.token"]
    coordinator = site.coordinate("third")
    site.url()
    poll(lambda: "its certificate is not for the expected member" in boxes["one"].log.read_text())
    assert workers(site) == 0
    for name, box in boxes.items():
        stop(box)
        shutil.copy(new / f"{name}.token", site.directory / f"{name}.token")
        box.start()
    poll(lambda: workers(site) == 2)
    train(site, 8, "--resume")
    stop(coordinator)
    # A thief has the key from before the loss, at the same address.
    seen = boxes["one"].log.stat().st_size
    thief = site.coordinate("thief", f"--set=run.run_dir={copy}")
    poll(lambda: "its certificate is not for" in boxes["one"].log.read_text()[seen:])
    assert boxes["one"].returncode is None
    stop(thief)
