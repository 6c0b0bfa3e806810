import random
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import PeerId
from echo2d.errors import OperatorFault, StoreFault
from echo2d.net.security.auth import (
    Denied,
    TokenFile,
    enrol_proof,
    peer_id_of,
    public_bytes,
    read_token_file,
)
from echo2d.runtime.run_dir import access_table
from echo2d.runtime.run_dir.access_table import _SUM, AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.runtime.run_dir.tokens import own_token

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


def test_a_run_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorFault, match="cannot use run directory"):
        RunDirectory(tmp_path / "file" / "run")


def test_the_table_gives_the_first_expiry_of_each_role(table: AccessTable) -> None:
    for name, role, expires_at in (
        ("soon", "worker", 20.0),
        ("later", "worker", 30.0),
        ("over", "worker", 5.0),
        ("revoked", "worker", 15.0),
        ("for-ever", "viewer", None),
        ("board", "viewer", 40.0),
    ):
        table.create(name, role, expires_at=expires_at)
    table.revoke("revoked")
    assert table.expiries(now_s=10.0) == {"worker": 20.0, "viewer": 40.0}
    assert table.expiries(now_s=50.0) == {}


def test_a_secret_identifies_its_token_and_is_not_stored(
    table: AccessTable, run: RunDirectory
) -> None:
    token = table.create("lea", "learner")
    caller = table.caller(token.secret, now_s=0.0)
    assert (caller.name, caller.role) == ("lea", "learner")
    assert token.secret.encode() not in (run.path / "access.sqlite").read_bytes()
    with pytest.raises(Denied) as caught:
        table.caller("wrong", now_s=0.0)
    assert (caught.value.status, caught.value.code) == (401, "credential")


def test_names_of_tokens_are_unique_and_harmless(table: AccessTable) -> None:
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


def test_only_workers_with_a_proof_can_enrol(table: AccessTable) -> None:
    with pytest.raises(Denied, match="has the role learner; this needs worker"):
        enrol(table, table.create("lea", "learner"), KEYS[0])
    token = table.create("box", "worker")
    with pytest.raises(Denied, match="possession"):
        table.enrol(
            token.secret, public_bytes(KEYS[0]), enrol_proof(KEYS[1], token.secret), now_s=0.0
        )
    with pytest.raises(Denied, match="not enrolled"):
        table.peer(PeerId("x"), now_s=0.0)


def test_the_expiry_of_a_workers_token_limits_only_enrolment(table: AccessTable) -> None:
    token = table.create("box", "worker", max_workers=2, expires_at=100.0)
    peer = enrol(table, token, KEYS[0], now_s=99.0)
    assert table.peer(peer, now_s=100.0).role == "worker"
    assert enrol(table, token, KEYS[0], now_s=100.0) == peer
    with pytest.raises(
        Denied, match=r"has expired and enrols no new machine: .* change box --expires"
    ) as no:
        enrol(table, token, KEYS[1], now_s=100.0)
    assert no.value.code == "expired"
    table.extend("box", None)
    assert enrol(table, token, KEYS[1], now_s=100.0) == peer_id_of(public_bytes(KEYS[1]))
    table.revoke("box")
    with pytest.raises(Denied, match="was revoked"):
        table.peer(peer, now_s=100.0)


@pytest.mark.parametrize("role", ["learner", "gateway", "agent", "viewer"])
def test_any_other_token_ends_when_it_expires(table: AccessTable, role: str) -> None:
    token = table.create("app", role, expires_at=100.0)
    assert table.caller(token.secret, now_s=99.0).role == role
    with pytest.raises(Denied, match=r"has expired: ask .* change app --expires") as no:
        table.caller(token.secret, now_s=100.0)
    assert no.value.code == "expired"
    table.extend("app", 200.0)
    assert table.caller(token.secret, now_s=100.0).role == role


def test_a_rotated_token_keeps_its_machines_and_enrols_with_the_new_secret_only(
    table: AccessTable,
) -> None:
    token = table.create("box", "worker", max_workers=3)
    peer = enrol(table, token, KEYS[0])
    new = table.rotate("box")
    assert table.peer(peer, now_s=0.0).role == "worker"
    assert enrol(table, token, KEYS[0]) == peer
    with pytest.raises(Denied, match="token box has a new secret"):
        enrol(table, token, KEYS[1])
    assert enrol(table, new, KEYS[1]) != peer
    with pytest.raises(Denied, match="token box has a new secret: ask the run's operator for its"):
        table.caller(token.secret, now_s=0.0)
    table.revoke("box")
    with pytest.raises(Denied, match="was revoked"):
        enrol(table, token, KEYS[0])


def test_only_the_newest_old_secrets_bring_a_machine_back(
    table: AccessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_table, "OLD_SECRETS_MAX", 1)
    first = table.create("box", "worker")
    peer = enrol(table, first, KEYS[0])
    second = table.rotate("box")
    table.rotate("box")
    assert enrol(table, second, KEYS[0]) == peer
    with pytest.raises(Denied, match="unknown credential"):
        enrol(table, first, KEYS[0])


def test_the_name_of_a_revoked_or_deleted_token_is_free_and_its_machines_are_not(
    table: AccessTable,
) -> None:
    old = table.create("box", "worker")
    peer = enrol(table, old, KEYS[0])
    table.revoke("box")
    for end in (lambda: table.revoke("box"), lambda: table.retire("box")):
        new = table.create("box", "worker")
        with pytest.raises(Denied, match="not enrolled"):
            table.peer(peer, now_s=0.0)
        with pytest.raises(Denied, match="unknown credential"):
            enrol(table, old, KEYS[0])
        assert enrol(table, new, KEYS[0]) == peer
        end()
        old = new


def test_a_revoked_token_is_neither_extended_nor_rotated(table: AccessTable) -> None:
    table.create("box", "worker")
    table.revoke("box")
    for change in (lambda: table.extend("box", None), lambda: table.rotate("box")):
        with pytest.raises(OperatorFault, match=r"cannot be undone: .* token create box"):
            change()
    for change in (lambda: table.extend("nix", None), lambda: table.rotate("nix")):
        with pytest.raises(OperatorFault, match="no token named nix"):
            change()


def test_the_last_use_of_a_token_is_by_a_caller_or_by_any_machine(
    table: AccessTable, run: RunDirectory
) -> None:
    token, viewer = table.create("box", "worker"), table.create("eye", "viewer")
    peer = enrol(table, token, KEYS[0], now_s=1000.0)
    table.caller(viewer.secret, now_s=1000.0)
    table.peer(peer, now_s=1001.0)
    table.reload()
    other = AccessTable(run)
    assert (other.last_use("eye"), other.last_use("box")) == (1000.0, 1001.0)
    # Not every reload writes.
    table.peer(peer, now_s=1002.0)
    table.reload()
    assert AccessTable(run).last_use("box") == 1001.0
    table.peer(peer, now_s=1001.0 + access_table.USES_WRITTEN_S)
    table.reload()
    assert AccessTable(run).last_use("box") == 1001.0 + access_table.USES_WRITTEN_S
    table.retire("box")
    assert AccessTable(run).last_use("box") is None


def test_a_token_revoked_by_another_process_loses_its_peer_to_a_new_token(
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


def test_a_hosts_own_token_is_kept_and_made_again_if_it_is_lost(
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


def test_a_hosts_own_token_is_made_again_when_its_file_gives_no_access(
    table: AccessTable, run: RunDirectory
) -> None:
    def own() -> TokenFile:
        return read_token_file(own_token(run, table, "viewer", "http://127.0.0.1:1"))

    own()
    for end in (table.retire, table.revoke, table.rotate):
        end("own-viewer")
        assert table.caller(own().secret, now_s=0.0).name == "own-viewer"
    kept = own()
    assert own() == kept


def test_a_token_deleted_in_the_midst_of_an_enrolment_leaves_no_peer_to_its_successor(
    table: AccessTable, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, other, reload = table.create("box", "worker"), AccessTable(run), table.reload

    def meanwhile() -> None:
        reload()
        if token.secret in spent:
            other.retire("box")
            other.create("box", "worker")
            spent.clear()

    spent = {token.secret}
    monkeypatch.setattr(table, "reload", meanwhile)
    enrol(table, token, KEYS[0])
    other.reload()
    assert (spent, other.peers_of("box")) == (set(), [])


def test_a_new_token_inherits_nothing_from_an_older_one_of_its_name(
    table: AccessTable, run: RunDirectory
) -> None:
    old = table.create("box", "worker")
    enrol(table, old, KEYS[0])
    with sqlite3.connect(run.path / "access.sqlite") as database:
        database.execute("DELETE FROM tokens")
        _SUM.write(database)
    table.create("box", "worker")
    assert table.peers_of("box") == []


def test_the_number_of_enrolled_peers_is_limited(
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


def test_a_returning_machine_keeps_its_place_after_its_token_has_expired(
    table: AccessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_table, "ENROLLED_MAX", 2)
    old = table.create("old", "worker", max_workers=None, expires_at=50.0)
    here, away = enrol(table, old, KEYS[0]), enrol(table, old, KEYS[1])
    now_s = 100.0 + access_table.AWAY_S
    table.peer(away, now_s=99.0)
    table.reload()
    table.peer(here, now_s=now_s)
    table.reload()
    new = table.create("new", "worker")
    assert enrol(table, new, KEYS[2], now_s=now_s)
    assert table.peer(here, now_s=now_s)
    with pytest.raises(Denied, match="not enrolled"):
        table.peer(away, now_s=now_s)
    with table._database() as database:
        holders = [each for (each,) in database.execute("SELECT holder FROM uses")]
    assert holders == [here]


def test_a_damaged_table_is_an_operators_fault(run: RunDirectory) -> None:
    (run.path / "access.sqlite").write_bytes(b"no database at all, whatever its name says" * 100)
    with pytest.raises(
        OperatorFault, match=r"cannot open the access table .*: file is not a database"
    ):
        AccessTable(run)


def test_a_cordon_survives_a_restart_and_ends_with_its_peer(
    table: AccessTable, run: RunDirectory
) -> None:
    token = table.create("boxes", "worker", max_workers=2)
    a, b = enrol(table, token, KEYS[0]), enrol(table, token, KEYS[1])
    table.cordon(a, cordoned=True, now_s=1.0)
    table.cordon(a, cordoned=True, now_s=2.0)
    assert [AccessTable(run).peer(peer, now_s=0.0).cordoned for peer in (a, b)] == [True, False]
    with pytest.raises(OperatorFault, match="no worker with id nobody"):
        table.cordon(PeerId("nobody"), cordoned=True, now_s=1.0)
    table.retire("boxes")
    again = enrol(table, table.create("boxes", "worker"), KEYS[1])
    table.cordon(again, cordoned=False, now_s=3.0)
    with table._database() as database:
        assert database.execute("SELECT count(*) FROM cordons").fetchone() == (0,)


def test_the_table_lists_needed_tokens_that_expire_soon(table: AccessTable) -> None:
    used = table.create("used", "worker", max_workers=1, expires_at=100.0)
    enrol(table, used, KEYS[0], now_s=1.0)
    pool = table.create("pool", "worker", expires_at=100.0)
    enrol(table, pool, KEYS[1], now_s=1.0)
    table.create("free", "worker", max_workers=1, expires_at=90.0)
    table.create("page", "viewer", expires_at=50.0)
    table.create("later", "viewer", expires_at=101.0)
    table.create("never", "viewer")
    found = table.expiring(now_s=1.0, within_s=99.5)
    assert [token.name for token in found] == ["free", "page", "pool"]
    table.revoke("page")
    found = table.expiring(now_s=95.0, within_s=5.5)
    assert [token.name for token in found] == ["free", "pool"], (
        "what is revoked is not told, what is over is"
    )


def test_a_hosts_own_token_is_made_again_when_its_file_is_damaged(
    table: AccessTable, run: RunDirectory
) -> None:
    path = own_token(run, table, "viewer", "http://127.0.0.1:1")
    path.write_bytes(path.read_bytes()[:40])
    token = read_token_file(own_token(run, table, "viewer", "http://127.0.0.1:1"))
    assert table.accepts(token, now_s=0.0)


def test_no_flipped_bit_gives_a_holder_other_rights(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    table = AccessTable(run)
    token = table.create("box", "worker", max_workers=3, expires_at=2e9)
    enrol(table, token, KEYS[0])
    file = run.path / "access.sqlite"
    content = file.read_bytes()
    known = [table.tokens(), table.peers_of("box")]
    # Most of the file is empty.
    used = [at for at, byte in enumerate(content) if byte]
    for at in random.Random(7).choices(used, k=600):
        damaged = bytearray(content)
        damaged[at] ^= 1 << random.Random(at).randrange(8)
        file.write_bytes(damaged)
        with suppress(OperatorFault, StoreFault):
            found = AccessTable(run)
            assert [found.tokens(), found.peers_of("box")] == known, at
