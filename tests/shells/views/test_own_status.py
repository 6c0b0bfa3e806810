"""`echo2d status` with a worker's token: the owner's own boxes, from a real coordinator."""

import asyncio
import io
import json
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from echo2d.core.status.json_form import plain, read_own_status
from echo2d.core.status.schema import EarnedStatus, OwnPeerStatus, OwnStatus, VersionStatus
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import enrol_proof, public_bytes, write_token_file
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.views.own_status import is_own, own_picture
from echo2d.views.status import narrowed
from echo2d.views.watch import Screen, status_once
from tests.support.scripted_core import make_config, serving

BOX = OwnPeerStatus(
    id="a" * 32, name="box[/x]", kind="worker", state="joined", alive=True, silent_s=0.4, reachable=False,
    quarantined=True, cordoned=False, draining=False, convicted=False, uplink=9.4e6, payload_bytes=25,
    verified=False, active=True,
    leaving=False, serving=VersionStatus(3, "00", 4), lag=1, slots=8, running=5, accepted=1200, trained=900,
    used=0.75, mu=0.5, usd_per_h=0.4, cost_usd=1.204, received_bytes=3_100_000_000, sent_bytes=450_000_000,
    attention=("is quarantined: it only receives",),
)  # fmt: skip
STATUS = OwnStatus(
    run_id="run-1", committed_step=7, staleness_max=3, newest_version=VersionStatus(4, "01", 5),
    spreading_version=4, spreading_bytes=100, peers=(BOX,), absent=("b" * 32, "c" * 32),
    convicted=("c" * 32,),
    earned=EarnedStatus(accepted_trajectories=4200, trained_trajectories=4000, sent_bytes=9_500_000_000),
)  # fmt: skip


def picture(status: OwnStatus) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    console.print(own_picture(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_owner_sees_what_a_box_does_gives_and_gets() -> None:
    text = picture(STATUS)
    assert "run run-1: step 7 committed, version 4 published" in text
    (row,) = [line for line in text.splitlines() if "box[/x]" in line and "!" not in line]
    for words in ("joined, not dialable", " v3 ", " 5/8 ", " 1,200 ", " 900 ", " 75% ", " 1,800 "):
        assert words in row
    assert "9.4 MB/s" in row
    assert picture(read_own_status(narrowed(plain(STATUS), "box"))) == text
    assert "box[/x]" not in picture(read_own_status(narrowed(plain(STATUS), "lab")))
    assert " 0.40 " in row
    assert " 1.20 " in row
    assert (
        "since the coordinator started: 3.1 GB received, 450.0 MB passed on, and 1.20 usd" in text
    )
    assert (
        "since the run began: 4,200 trajectories accepted, 4,000 trained, 9.5 GB passed on" in text
    )
    assert row.rstrip().endswith("25%")
    assert "! box[/x] is quarantined: it only receives" in text
    assert f"{'b' * 32} enrolled earlier, but has not connected" in text
    assert f"! {'c' * 32} is convicted" in text


def test_the_status_of_an_unused_token_says_that_it_is_unused() -> None:
    nothing = OwnStatus(
        run_id="run-1", committed_step=0, staleness_max=3, newest_version=None, spreading_version=None,
        spreading_bytes=None, peers=(), absent=(), convicted=(),
    )  # fmt: skip
    assert "no box has enrolled with this token yet" in picture(nothing)


def test_the_watch_option_shows_the_owners_boxes_too(capsys: pytest.CaptureFixture[str]) -> None:
    facts = plain(STATUS)
    assert is_own(facts)
    with Screen(as_json=False, console=Console(width=140, highlight=False)) as screen:
        screen.show(facts, now=0.0)
    assert "box[/x]" in capsys.readouterr().out
    with Screen(as_json=True) as screen:
        screen.show(facts, now=0.0)
    assert read_own_status(json.loads(capsys.readouterr().out)) == STATUS


def at(url: str, token_file: Path) -> tuple[str, Path]:
    return url, token_file


def enrol(access: AccessTable, name: str, path: Path) -> str:
    """Makes a token file at `path`, and enrols one box with it. Returns its peer id. Blocking."""
    token, key = access.create(name, "worker"), Ed25519PrivateKey.generate()
    write_token_file(path, token)
    public, proof = public_bytes(key), enrol_proof(key, token.secret)
    return access.enrol(token.secret, public, proof, now_s=0.0)


async def test_each_valid_token_shows_only_its_own_boxes(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path), core_machine) as opened:
        files = {name: tmp_path / f"{name}.token" for name in ("alice", "bob")}
        ids = {
            name: await asyncio.to_thread(enrol, opened.access, name, path)
            for name, path in files.items()
        }
        for name, path in files.items():
            found = read_own_status(await status_once(partial(at, opened.url, path)))
            assert found.absent == (ids[name],)
            assert found.run_id
        await asyncio.to_thread(opened.access.revoke, "bob")
        with pytest.raises(OperatorFault, match="token bob was revoked"):
            await status_once(partial(at, opened.url, files["bob"]))
