"""`echo2d token`: what it says and does, and what it refuses with one line."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.cli import main
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import enrol_proof, public_bytes, read_token_file
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory, announce
from echo2d.runtime.run_dir.tokens import create_token, list_tokens, parse_duration_s

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


def test_durations() -> None:
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


def test_a_mistyped_run_directory_makes_nothing(run: RunDirectory, tmp_path: Path) -> None:
    create()
    before = Path("box.token").read_text()
    for words in (
        ["create", "box", "--role=worker", f"--url={URL}"],
        ["list"],
        ["revoke", "box"],
        ["delete", "box"],
        ["rotate", "box"],
        ["extend", "box", "--expires=1d"],
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
    assert "--force" in said
    assert Path("box.token").read_text() == before
    assert [row["name"] for row in list_tokens(run.path)] == ["box"]
    token("create", "b", "--role=worker", "--run-dir=run", f"--url={URL}",
          "--out=box.token", "--force")  # fmt: skip
    assert read_token_file(Path("box.token")).name == "b"


def test_a_name_that_is_taken_is_free_again_after_revoke_or_delete(run: RunDirectory) -> None:
    create()
    assert "echo2d token rotate box" in create("--force", code=2)
    token("revoke", "box", "--run-dir=run")
    create("--force")
    join(run)
    assert token("delete", "box", "--run-dir=run") == "deleted box; machines that lose access: 1\n"
    assert "no token named box" in token("delete", "box", "--run-dir=run", code=2)
    create("--force")
    assert [row["peers"] for row in list_tokens(run.path)] == [[]]


def test_the_url_is_where_the_coordinator_listens(run: RunDirectory) -> None:
    words = ("create", "box", "--role=worker", "--run-dir=run")
    said = token(*words, code=2)
    assert said == "echo2d: no coordinator runs in run; start it, or give --url https://HOST:PORT\n"
    announce(run, URL)
    token(*words)
    assert read_token_file(Path("box.token")).url == URL


def test_rotate_writes_the_file_anew_with_its_url(run: RunDirectory) -> None:
    create("--max-workers=2")
    old = read_token_file(Path("box.token"))
    join(run)
    said = token("rotate", "box", "--run-dir=run")
    assert said == "wrote box.token; machines that have joined with box stay members: 1\n"
    new = read_token_file(Path("box.token"))
    assert (new.url, new.name) == (URL, "box")
    assert new.secret != old.secret
    join(run, number=2)
    Path("other.token").write_text("something else")
    assert "exists already" in token("rotate", "box", "--run-dir=run", "--out=other.token", code=2)
    assert read_token_file(Path("box.token")).secret == new.secret
    token("rotate", "box", "--run-dir=run", "--out=other.token", "--force", f"--url={URL}")
    assert read_token_file(Path("other.token")).name == "box"


def test_a_token_whose_new_file_cannot_be_written_keeps_its_secret(run: RunDirectory) -> None:
    create("--max-workers=2")
    join(run)
    said = token("rotate", "box", "--run-dir=run", f"--url={URL}", "--out=no/folder", code=2)
    assert "cannot write no/folder" in said
    join(run, number=2)
    assert len(list_tokens(run.path)[0]["peers"]) == 2


def test_extend_changes_when_it_expires(run: RunDirectory) -> None:
    create("--expires=0s")
    assert list_tokens(run.path)[0]["state"] == "expired"
    assert token("extend", "box", "--run-dir=run", "--expires=30d") == "box expires in 30d\n"
    (row,) = list_tokens(run.path)
    assert row["state"] == "valid"
    assert row["expires_in_s"] == pytest.approx(30 * 86400, abs=60)
    assert token("extend", "box", "--run-dir=run", "--expires=never") == "box never expires\n"
    assert list_tokens(run.path)[0]["expires_in_s"] is None
    assert "duration" in token("extend", "box", "--run-dir=run", "--expires=soon", code=2)


def test_the_list_is_for_people(run: RunDirectory) -> None:
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
