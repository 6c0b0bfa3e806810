"""The programs started one by one, as on several machines, and the errors after an operator's mistakes."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.support.free_port import free_port
from tests.support.polling import START_S, poll
from tests.support.programs import Site, run

pytestmark = [pytest.mark.timeout(900)]
LOOPBACK = "127.0.0.1"


def test_a_run_started_by_hand_trains_and_resumes(site: Site) -> None:
    # Each group waits for all its samples: the story of one of them is told below.
    text = site.config.read_text()
    site.config.write_text(text.replace("group_size = 8", "group_size = 8\ngroup_patience = 0.0"))
    site.coordinate("coordinator", "--log-level=debug")
    box = site.join(
        "box",
        "--threads=1",
        "--log-level=debug",
        "--log-json",
        f"--base-model={site.facts['model']}",
    )
    site.join("helper", "--relay-only")
    assert site.learn(2).wait(START_S) == 0
    assert "found in the base model version=0" in box.log.read_text()
    facts = site.status()
    assert (facts["epoch"], facts["committed_step"], facts["checkpoint_step"]) == (1, 2, 0)
    assert "step 2 of 2" in run("status", f"--run-dir={site.run_dir}")
    it_is_watched_until_ctrl_c(site)

    refused = site.learn(4)
    assert refused.wait(START_S) == 2
    assert "use --resume" in refused.tail().splitlines()[-1]

    assert site.learn(5, "--resume").wait(START_S) == 0
    facts = site.status()
    assert (facts["epoch"], facts["committed_step"], facts["checkpoint_step"]) == (2, 5, 2)
    rows = [
        json.loads(line)
        for line in (site.directory / "learner" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    one_id_tells_the_story(site)


def it_is_watched_until_ctrl_c(site: Site) -> None:
    arguments = ("status", f"--run-dir={site.run_dir}", "--watch", "--interval=0.1")
    with subprocess.Popen(
        [sys.executable, "-m", "echo2d", *arguments], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        blocks = 0
        for line in watching.stdout:
            blocks += line.startswith("--- ")
            if blocks == 3:
                break
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(START_S) == 0


def one_id_tells_the_story(site: Site) -> None:
    """From the lease of a group to the train step it was trained in, over the logs of all programs."""
    logs = {
        name: (site.directory / "logs" / f"{name}.log").read_text()
        for name in ("coordinator", "box", "learner-2")
    }
    trained = next(line for line in logs["learner-2"].splitlines() if " trained step=2 " in line)
    frozen = next(line for line in logs["coordinator"].splitlines() if " frozen step=2 " in line)
    group = re.findall(r"group=\d+", frozen)[0]
    found = [line for line in logs["coordinator"].splitlines() if re.search(rf"\b{group}\b", line)]
    told = [line.partition("area=echo2d.story ")[2].split()[0] for line in found]
    assert list(dict.fromkeys(told)) == [
        "admitted",
        "leased",
        "accepted",
        "scored",
        "buffered",
        "frozen",
    ]
    assert told.count("accepted") == told.count("scored") == 8
    assert " step=2 " in found[-1]
    digest = re.findall(r" digest=\w+", found[-1])[0]
    assert digest in trained
    assert f"committed step=2 epoch=1{digest}" in logs["coordinator"]
    work = [
        json.loads(line) for line in logs["box"].splitlines() if re.search(rf"\b{group}\b", line)
    ]
    # Each lease has as many of the samples as found a slot.
    leases = {lease for line in found for lease in re.findall(r" leased .*lease=(\S+)", line)}
    for lease in leases:
        of_lease = [line for line in work if line["lease"] == lease]
        assert [line["kind"] for line in of_lease] == ["generating", "generated"]
        assert {line["group"] for line in of_lease} == {int(group.partition("=")[2])}
    assert {line["lease"] for line in work} == leases


def test_a_second_coordinator_of_a_run_is_refused(site: Site) -> None:
    site.coordinate()
    site.url()
    second = site.coordinate("second")
    assert second.wait(START_S) == 2
    assert second.tail().count("\n") == 0


def test_a_port_in_use_is_refused(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        site.fix_port(port)
        coordinator = site.coordinate()
        assert coordinator.wait(START_S) == 2
    assert f"{port}" in coordinator.tail()
    assert "Traceback" not in coordinator.tail()


def test_wrong_expired_and_revoked_tokens_are_refused(site: Site) -> None:
    site.coordinate()
    url = site.url()
    create = ("token", "create", "--role=worker", f"--run-dir={site.run_dir}", f"--url={url}")
    expired, revoked, wrong = (
        site.directory / f"{name}.token" for name in ("expired", "revoked", "wrong")
    )
    run(*create, "expired", "--expires=0s", f"--out={expired}")
    run(*create, "revoked", f"--out={revoked}")
    run("token", "revoke", "revoked", f"--run-dir={site.run_dir}")
    facts = json.loads(revoked.read_text())
    wrong.write_text(json.dumps({**facts, "secret": facts["secret"][::-1]}))
    wrong.chmod(0o600)
    for path, word in ((expired, "expired"), (revoked, "revoked"), (wrong, "token")):
        state = f"--state-dir={site.directory / path.stem}"
        line = run("join", url, f"--token-file={path}", state, "--engine=fake", code=2)
        assert word in line.splitlines()[-1], line
        assert "Traceback" not in line


def test_a_worker_off_loopback_needs_tls(site: Site) -> None:
    token = site.directory / "box.token"
    site.coordinate()
    run(
        "token",
        "create",
        "box",
        "--role=worker",
        f"--run-dir={site.run_dir}",
        f"--url={site.url()}",
        f"--out={token}",
    )
    line = run(
        "join",
        "http://192.0.2.1:7700",
        f"--token-file={token}",
        f"--state-dir={site.directory}/s",
        code=2,
    )
    assert "--no-tls" in line.splitlines()[-1]


def test_a_run_off_loopback_uses_tls(site: Site) -> None:
    """At this machine's own address, or, where it has none but loopback, there and told to."""
    host = own_address()
    text = site.config.read_text().replace("[coordinator]", f'[coordinator]\nhost = "{host}"')
    tls = "" if host != LOOPBACK else 'tls = "on"\n'
    site.config.write_text(text.replace("port = 0", f'{tls}port = 0\n[link]\nhost = "{host}"', 1))
    coordinator = site.coordinate()
    assert site.url().startswith(f"https://{host}:")
    boxes = [site.join(name, f"--listen-host={host}", "--relay-only") for name in ("one", "two")]
    boxes.append(site.join("three", f"--listen-host={host}", "--threads=1"))
    assert site.learn(1).wait(START_S) == 0
    run("status", f"--url={site.url()}", f"--token-file={site.run_dir}/tokens/viewer.token")
    plain = site.url().replace("https", "http")
    with pytest.raises(OSError, match=r"closed|reset"):
        urllib.request.urlopen(plain, timeout=START_S)
    for program in (coordinator, *boxes):
        assert "no_tls" not in program.log.read_text()
    assert "link_opened" in boxes[0].log.read_text()


def own_address() -> str:
    """By which others would reach this machine; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chosen:
        try:
            chosen.connect(("198.51.100.1", 9))
        except OSError:
            return LOOPBACK
        return str(chosen.getsockname()[0])


def test_a_worker_waits_for_an_unreachable_coordinator(site: Site) -> None:
    """The owner of a box forgets it: the daemon says that it waits, and joins when the coordinator is there."""
    site.fix_port(free_port())
    first = site.coordinate()
    url = site.url()
    token = site.directory / "box.token"
    run(
        "token",
        "create",
        "box",
        "--role=worker",
        f"--run-dir={site.run_dir}",
        f"--url={url}",
        f"--out={token}",
    )
    first.terminate()
    assert first.wait(START_S) == 0
    state = f"--state-dir={site.directory}/box"
    box = site.programs.start(
        "box", "-m", "echo2d", "join", url, f"--token-file={token}", state, "--engine=fake"
    )
    poll(lambda: "unreachable" in box.tail())
    site.coordinate("again")
    site.url()
    poll(lambda: bool(site.status()["workers"]))
    assert box.returncode is None
