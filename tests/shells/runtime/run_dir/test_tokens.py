"""`echo2d token`: its effects and output, and its refusals in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.cli import main
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.earned import EarnedKept, WorkerEarned
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import enrol_proof, public_bytes, read_token_file
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE, RunDirectory, announce
from echo2d.runtime.run_dir.tokens import create_token, list_tokens, parse_duration_s
from echo2d.store.ledger import Ledger

URL = "https://10.0.0.1:7700"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return RunDirectory(tmp_path / "run")


def token(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["token", *words])
    assert result.exit_code == code, result.output
    if code:
        assert result.output.count("\n") == 1
    return result.output


def create(*more: str, code: int = 0) -> str:
    return token(
        "create", "box", "--role=worker", "--run-dir=run", f"--url={URL}", *more, code=code
    )


def join(run: RunDirectory, file: str = "box.token", number: int = 1) -> None:
    """Enrol a machine, as a coordinator does."""
    secret = read_token_file(Path(file)).secret
    key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    table = AccessTable(run)
    table.enrol(secret, public_bytes(key), enrol_proof(key, secret), now_s=0.0)


def test_durations_are_read_in_seconds() -> None:
    assert [parse_duration_s(text) for text in ("30d", "1.5h", "10m", "45s")] == [
        2592000.0,
        5400.0,
        600.0,
        45.0,
    ]
    for text in ("", "30", "d", "-1d", "1w"):
        with pytest.raises(OperatorFault, match="duration"):
            parse_duration_s(text)
    with pytest.raises(OperatorFault, match="never"):
        parse_duration_s("9" * 20 + "d")


def test_a_token_whose_file_cannot_be_written_was_never_created(
    run: RunDirectory, tmp_path: Path
) -> None:
    def create(out: Path, url: str = "http://127.0.0.1:7700") -> None:
        create_token(run.path, "box", role="worker", url=url, out=out, max_workers=1, expires="1h")

    with pytest.raises(OperatorFault, match="cannot write"):
        create(tmp_path / "no" / "folder")
    with pytest.raises(OperatorFault, match="not the URL"):
        create(tmp_path / "box.token", "7700")
    assert list_tokens(run.path) == []
    create(tmp_path / "box.token")
    assert [row["name"] for row in list_tokens(run.path)] == ["box"]


def test_a_mistyped_run_directory_is_not_created(run: RunDirectory, tmp_path: Path) -> None:
    create()
    before = Path("box.token").read_text()
    for words in (
        ["create", "box", "--role=worker", f"--url={URL}"],
        ["list"],
        ["revoke", "box"],
        ["revoke", "box", "--delete"],
        ["change", "box", "--new-secret"],
        ["change", "box", "--expires=1d"],
    ):
        said = token(*words, "--run-dir=runx", code=2)
        assert said.startswith("echo2d: runx is not a run directory: expected run.run_dir")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box.token", "run"]
    assert Path("box.token").read_text() == before


def test_a_token_file_is_not_overwritten_unasked(run: RunDirectory) -> None:
    create()
    before = Path("box.token").read_text()
    said = token("create", "b", "--role=worker", "--run-dir=run", f"--url={URL}",
                 "--out=box.token", code=2)  # fmt: skip
    assert "box.token exists already" in said
    assert "remove it first" in said
    assert Path("box.token").read_text() == before
    assert [row["name"] for row in list_tokens(run.path)] == ["box"]


def test_the_name_of_a_token_is_free_again_after_revoke_or_delete(run: RunDirectory) -> None:
    create()
    assert "echo2d token change box --new-secret" in create("--out=second.token", code=2)
    assert token("revoke", "box", "--run-dir=run") == "revoked box\n"
    create("--out=second.token")
    join(run, "second.token")
    delete = ("revoke", "box", "--delete", "--run-dir=run")
    assert token(*delete) == "deleted box; machines that lose access: 1\n"
    assert "no token named box" in token(*delete, code=2)
    create("--out=third.token")
    assert [row["peers"] for row in list_tokens(run.path)] == [[]]


def test_a_token_shows_what_its_machines_have_earned(run: RunDirectory) -> None:
    create("--max-workers=2")
    token("create", "looker", "--role=viewer", "--run-dir=run", f"--url={URL}")
    nothing = {"accepted_trajectories": 0, "trained_trajectories": 0, "sent_bytes": 0}

    def earned() -> dict[str, Any]:
        rows = json.loads(token("list", "--json", "--run-dir=run"))
        return {row["name"]: row["earned"] for row in rows}

    assert earned() == {"box": nothing, "looker": None}
    for number in (1, 2):
        join(run, number=number)
    first, second = map(PeerId, list_tokens(run.path)[0]["peers"])
    rows = [
        WorkerEarned(first, 5, 4, 100),
        WorkerEarned(second, 3, 2),
        WorkerEarned(PeerId("x"), 9),
    ]
    with Ledger.open(run.path / LEDGER_FILE) as ledger:
        ledger.append([EarnedKept(tuple(rows))])
        sums = {"accepted_trajectories": 8, "trained_trajectories": 6, "sent_bytes": 100}
        assert earned() == {"box": sums, "looker": None}


def test_the_url_in_a_token_file_is_where_the_coordinator_listens(run: RunDirectory) -> None:
    words = ("create", "box", "--role=worker", "--run-dir=run")
    said = token(*words, code=2)
    assert said == "echo2d: no coordinator runs in run; start it, or give --url https://HOST:PORT\n"
    announce(run, URL)
    token(*words)
    assert read_token_file(Path("box.token")).url == URL


def test_a_new_secret_is_written_with_the_url_of_the_old_file(run: RunDirectory) -> None:
    create("--max-workers=2")
    old = read_token_file(Path("box.token"))
    join(run)
    change = ("change", "box", "--run-dir=run", "--new-secret")
    said = token(*change)
    assert said == "wrote box.token; machines that have joined with box stay members: 1\n"
    new = read_token_file(Path("box.token"))
    assert (new.url, new.name) == (URL, "box")
    assert new.secret != old.secret
    join(run, number=2)
    Path("other.token").write_text("something else")
    assert "exists already" in token(*change, "--out=other.token", code=2)
    assert read_token_file(Path("box.token")).secret == new.secret
    token(*change, "--out=new.token", f"--url={URL}", "--expires=1h")
    assert read_token_file(Path("new.token")).name == "box"
    assert list_tokens(run.path)[0]["expires_in_s"] == pytest.approx(3600, abs=60)


def test_a_token_whose_new_file_cannot_be_written_keeps_its_secret(run: RunDirectory) -> None:
    create("--max-workers=2")
    join(run)
    said = token(
        "change", "box", "--run-dir=run", "--new-secret", f"--url={URL}", "--out=no/folder", code=2
    )
    assert "cannot write no/folder" in said
    join(run, number=2)
    assert len(list_tokens(run.path)[0]["peers"]) == 2


def test_a_change_of_a_token_prints_its_expiry(run: RunDirectory) -> None:
    create("--expires=0s")
    assert list_tokens(run.path)[0]["state"] == "expired"
    assert token("change", "box", "--run-dir=run", "--expires=30d") == "box expires in 30d\n"
    (row,) = list_tokens(run.path)
    assert row["state"] == "valid"
    assert row["expires_in_s"] == pytest.approx(30 * 86400, abs=60)
    assert token("change", "box", "--run-dir=run", "--expires=never") == "box never expires\n"
    assert list_tokens(run.path)[0]["expires_in_s"] is None
    assert "duration" in token("change", "box", "--run-dir=run", "--expires=soon", code=2)


def test_a_change_of_a_token_prints_what_it_changes(run: RunDirectory) -> None:
    create()
    assert "expected --expires, --new-secret" in token("change", "box", "--run-dir=run", code=2)
    assert "need --new-secret" in token(
        "change", "box", "--run-dir=run", "--expires=1h", "--out=x", code=2
    )


def test_the_list_of_tokens_is_printed_for_people(run: RunDirectory) -> None:
    create("--max-workers=5", "--expires=40d")
    for number in range(1, 5):
        join(run, number=number)
    token("create", "app", "--role=gateway", "--run-dir=run", f"--url={URL}", "--expires=never")
    header, app, box = token("list", "--run-dir=run").splitlines()
    assert header.split() == ["NAME", "ROLE", "STATE", "EXPIRES", "MACHINES", "LAST", "USE"]
    assert app.split() == ["app", "gateway", "valid", "never", "-", "-"]
    words = box.split()
    assert re.match(r"box +worker +valid +in (39|40) d +4 of 5", box)
    assert len(words[9]) == 8
    assert words[12:] == ["...", "-"]
    assert [len(row["peers"]) for row in json.loads(token("list", "--run-dir=run", "--json"))] == [
        0,
        4,
    ]
