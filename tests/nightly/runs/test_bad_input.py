"""Mistakes of operators and lies of learners: a real coordinator answers with one line and exit code 2, and runs on."""

import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2d.client import Coordinator, Fenced, PeerFault
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.store.ledger import Ledger
from tests.support.ledger_rows import change_rows
from tests.support.polling import START_S, poll
from tests.support.programs import Site, run

pytestmark = [pytest.mark.timeout(900)]


def test_a_link_port_in_use_is_refused(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        site.config.write_text(site.config.read_text() + f"\n[link]\nport = {port}\n")
        coordinator = site.coordinate()
        assert coordinator.wait(START_S) == 2
    last = coordinator.tail().splitlines()[-1]
    assert last == f"echo2d: link.port: {port} on 127.0.0.1 is in use"


def test_a_damaged_row_of_the_ledger_is_refused(site: Site) -> None:
    RunDirectory(site.run_dir)
    ledger = site.run_dir / "ledger.sqlite"
    Ledger.open(ledger).close()
    change_rows(ledger, "INSERT INTO batches VALUES (7, zeroblob(32), 'x', 0, NULL)")
    coordinator = site.coordinate()
    assert coordinator.wait(START_S) == 2
    assert coordinator.tail().startswith(
        f"echo2d: ledger {ledger}: row step=7 of batches is damaged: "
    )
    assert "Traceback" not in coordinator.log.read_text()


def test_an_impossible_join_is_refused(site: Site) -> None:
    site.coordinate()
    url, token, state = (
        site.url(),
        site.directory / "box.token",
        f"--state-dir={site.directory}/box",
    )
    run(
        "token",
        "create",
        "box",
        "--role=worker",
        f"--run-dir={site.run_dir}",
        f"--url={url}",
        f"--out={token}",
    )
    garbage = site.directory / "garbage"
    garbage.write_bytes(os.urandom(99))
    port = url.rpartition(":")[2]
    for words, arguments in {
        "not the URL of a coordinator": (f"127.0.0.1:{port}", f"--token-file={token}", state),
        "'http://[127.0.0.1'": ("http://[127.0.0.1", f"--token-file={token}", state),
        "is not a token file": (url, f"--token-file={garbage}", state),
        "has the role learner": (url, f"--token-file={site.run_dir}/tokens/learner.token", state),
        "cannot use state directory": (url, f"--token-file={token}", f"--state-dir={garbage}/box"),
        f"cannot listen on 127.0.0.1:{port}": (
            url,
            f"--token-file={token}",
            state,
            f"--listen-port={port}",
        ),
        "worker.listen_port": (url, f"--token-file={token}", state, "--listen-port=70000"),
    }.items():
        said = run("join", *arguments, "--engine=fake", code=2).splitlines()
        assert words in said[-1], said
        assert said[-1].startswith("echo2d: ")
        assert not any("Traceback" in line for line in said)


def test_bad_snapshots_and_a_second_learner_are_refused(site: Site, tmp_path: Path) -> None:
    coordinator = site.coordinate()
    url, token = site.url(), site.run_dir / "tokens" / "learner.token"
    good = tmp_path / "snapshots" / "good"
    shutil.copytree(make_tiny_model(Path.home() / ".cache" / "echo2d"), good)
    with Coordinator(url, token_file=token) as first, Coordinator(url, token_file=token) as second:
        first.open_session(0)
        for number, (words, spoil) in enumerate(SPOILED.items()):
            bad = tmp_path / "snapshots" / str(number)
            shutil.copytree(good, bad)
            spoil(bad)
            with pytest.raises(PeerFault, match=words):
                first.publish(0, bad)
        digest = first.publish(0, good).digest
        text = (good / "config.json").read_text()
        (good / "config.json").unlink()  # its bytes are the published ones' by hard link
        (good / "config.json").write_text(text + " ")
        with pytest.raises(PeerFault, match="has other bytes in this epoch"):
            first.publish(0, good)
        fenced: list[Exception] = []
        waiting = threading.Thread(
            target=lambda: fenced.append(fault_of(lambda: first.take_batch(1)))
        )
        waiting.start()
        second.open_session(0)
        waiting.join(START_S)
        assert isinstance(fenced[0], Fenced)
        assert second.publish(0, good).digest != digest
        with pytest.raises(Fenced, match="epoch 2 is in force"):
            first.publish(0, good)
        poll(lambda: bool(second.status()["seed_alive"]))
    poll(lambda: len(list((site.run_dir / "versions").iterdir())) == 1)
    coordinator.terminate()
    assert coordinator.wait(START_S) == 0
    assert "Traceback" not in coordinator.log.read_text()


def fault_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as fault:  # noqa: BLE001 - the test judges it
        return fault
    return AssertionError("no fault")


def claim_header(directory: Path, length: int, file_bytes: int) -> None:
    """A model file of `file_bytes` whose header claims `length`."""
    (directory / "model.safetensors").write_bytes(length.to_bytes(8, "little"))
    os.truncate(directory / "model.safetensors", file_bytes)


SPOILED: dict[str, Callable[[Path], object]] = {
    "claims 104857600 bytes": lambda path: claim_header(path, 100 << 20, 101 << 20),
    "claims 9223372036854775808 bytes": lambda path: claim_header(path, 1 << 63, 1 << 20),
    "claims 1048576 bytes, but the file has 4096": lambda path: claim_header(path, 1 << 20, 4096),
    r"forbidden file 'modeling\.py'": lambda path: (path / "modeling.py").touch(),
    "has no tokenizer": lambda path: (path / "tokenizer.json").unlink(),
    "symbolic link": lambda path: (path / "more.json").symlink_to("/etc/passwd"),
    "plain file": lambda path: os.mkfifo(path / "pipe.json"),
}
