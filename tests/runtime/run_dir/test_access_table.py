from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import PeerId
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import (
    Denied,
    TokenFile,
    enrol_proof,
    peer_id_of,
    public_bytes,
    read_token_file,
)
from echo2d.runtime.run_dir import access_table
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.runtime.run_dir.tokens import create_token, list_tokens, own_token, parse_duration_s

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(3)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def table(run: RunDirectory) -> AccessTable:
    return AccessTable(run)


def enrol(
    table: AccessTable, token: TokenFile, key: Ed25519PrivateKey, *, now_s: float = 0.0
) -> PeerId:
    return table.enrol(token.secret, public_bytes(key), enrol_proof(key, token.secret), now_s=now_s)


def test_the_run_directory_is_private_and_keeps_its_key(run: RunDirectory) -> None:
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert RunDirectory(run.path).run_id == run.run_id
    AccessTable(run)
    assert {file.stat().st_mode & 0o077 for file in run.path.iterdir()} == {0}


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorFault, match="cannot use run directory"):
        RunDirectory(tmp_path / "file" / "run")


def test_a_secret_tells_name_and_role_and_is_not_stored(
    table: AccessTable, run: RunDirectory
) -> None:
    token = table.create("lea", "learner")
    caller = table.caller(token.secret, now_s=0.0)
    assert (caller.name, caller.role) == ("lea", "learner")
    assert token.secret.encode() not in (run.path / "access.sqlite").read_bytes()
    with pytest.raises(Denied) as caught:
        table.caller("wrong", now_s=0.0)
    assert (caught.value.status, caught.value.code) == (401, "credential")


def test_names_are_unique_and_harmless(table: AccessTable) -> None:
    table.create("box", "worker")
    for name in ("box", "", "../x", "a/b", "x" * 65, ".hidden"):
        with pytest.raises(OperatorFault, match="token name"):
            table.create(name if name != "box" else "b x", "worker")
    with pytest.raises(OperatorFault, match="exists already"):
        table.create("box", "worker")
    with pytest.raises(OperatorFault, match="role"):
        table.create("other", "admin")


def test_enrolment_is_idempotent_and_bounded(table: AccessTable) -> None:
    token = table.create("box", "worker", max_workers=2)
    first, again, second = (enrol(table, token, KEYS[n]) for n in (0, 0, 1))
    assert first == again == peer_id_of(public_bytes(KEYS[0])) != second
    with pytest.raises(Denied, match="its 2 workers already"):
        enrol(table, token, KEYS[2])
    assert table.peer(first, now_s=0.0).public_key == public_bytes(KEYS[0])


def test_only_workers_with_a_proof_enrol(table: AccessTable) -> None:
    with pytest.raises(Denied, match="for a learner"):
        enrol(table, table.create("lea", "learner"), KEYS[0])
    token = table.create("box", "worker")
    with pytest.raises(Denied, match="possession"):
        table.enrol(
            token.secret, public_bytes(KEYS[0]), enrol_proof(KEYS[1], token.secret), now_s=0.0
        )
    with pytest.raises(Denied, match="not enrolled"):
        table.peer(PeerId("x"), now_s=0.0)


def test_expiry_ends_access_and_the_peers(table: AccessTable) -> None:
    token = table.create("box", "worker", expires_at=100.0)
    peer = enrol(table, token, KEYS[0], now_s=99.0)
    for call in (
        lambda: table.caller(token.secret, now_s=100.0),
        lambda: table.peer(peer, now_s=100.0),
    ):
        with pytest.raises(Denied, match="expired"):
            call()


def test_another_process_revokes_and_a_new_token_takes_the_peer_over(
    table: AccessTable, run: RunDirectory
) -> None:
    token = table.create("box", "worker")
    peer = enrol(table, token, KEYS[0])
    other = AccessTable(run)
    other.revoke("box")
    assert table.peer(peer, now_s=0.0).role == "worker"
    table.reload()
    with pytest.raises(Denied, match="revoked"):
        table.peer(peer, now_s=0.0)
    with pytest.raises(Denied, match="revoked"):
        enrol(table, token, KEYS[0])
    assert enrol(table, table.create("box2", "worker"), KEYS[0]) == peer
    assert table.peer(peer, now_s=0.0).role == "worker"
    with pytest.raises(OperatorFault, match="no token named"):
        table.revoke("none")


def test_tokens_are_listed_by_name(table: AccessTable) -> None:
    table.create("b", "viewer")
    table.create("a", "worker", max_workers=3)
    assert [(token.name, token.max_workers, token.revoked) for token in table.tokens()] == [
        ("a", 3, False),
        ("b", None, False),
    ]


def test_the_seed_is_known_by_its_key_alone(table: AccessTable) -> None:
    peer = table.admit_own(public_bytes(KEYS[0]), "seed")
    assert table.peer(peer, now_s=0.0).role == "seed"


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


def test_a_hosts_own_token_is_kept_made_again_when_lost_and_in_nobodys_way(
    table: AccessTable, run: RunDirectory
) -> None:
    table.create("learner", "learner")
    path = own_token(run, table, "learner", "http://127.0.0.1:1")
    first = read_token_file(path)
    again = read_token_file(own_token(run, table, "learner", "http://127.0.0.1:2"))
    assert (again.secret, again.url) == (first.secret, "http://127.0.0.1:2")
    path.unlink()
    lost = read_token_file(own_token(run, table, "learner", "http://127.0.0.1:2"))
    assert table.caller(lost.secret, now_s=0.0).role == "learner"
    with pytest.raises(Denied):
        table.caller(first.secret, now_s=0.0)


def test_a_run_enrols_so_many_peers_and_no_more(
    table: AccessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_table, "ENROLLED_MAX", 1)
    token = table.create("box", "worker")
    first = enrol(table, token, KEYS[0])
    with pytest.raises(Denied, match="enrolled 1 workers"):
        enrol(table, token, KEYS[1])
    assert enrol(table, token, KEYS[0]) == first


@pytest.mark.parametrize("ends_by", ["revoked", "expired"])
def test_peers_of_a_token_that_is_not_valid_make_room(
    table: AccessTable, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    monkeypatch.setattr(access_table, "ENROLLED_MAX", 2)
    bad = table.create("bad", "worker", max_workers=None, expires_at=50.0)
    good = table.create("good", "worker")
    enrol(table, bad, KEYS[0])
    enrol(table, bad, KEYS[1])
    with pytest.raises(Denied, match="enrolled 2 workers"):
        enrol(table, good, KEYS[2])
    if ends_by == "revoked":
        table.revoke("bad")
    now_s = 0.0 if ends_by == "revoked" else 60.0
    assert enrol(table, good, KEYS[2], now_s=now_s) == peer_id_of(public_bytes(KEYS[2]))


def test_a_damaged_table_is_the_operators(run: RunDirectory) -> None:
    (run.path / "access.sqlite").write_bytes(b"no database at all, whatever its name says" * 100)
    with pytest.raises(
        OperatorFault, match=r"cannot open the access table .*: file is not a database"
    ):
        AccessTable(run)
