import dataclasses
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import PEER_ID_CHARS
from echo2d.errors import IntegrityFault, OperatorFault
from echo2d.net.security import auth
from echo2d.net.security.auth import TokenFile

RUN, OTHER_RUN, PEER, OTHER_PEER = (
    Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(4)
)
RUN_KEY, PEER_KEY = auth.public_bytes(RUN), auth.public_bytes(PEER)
NONCE = b"n" * auth.AUTH_NONCE_BYTES
TOKEN = TokenFile("box", "worker", "s3cret", RUN_KEY.hex(), "http://127.0.0.1:1")


def test_peer_ids_are_hashes_of_keys() -> None:
    assert len(auth.peer_id_of(PEER_KEY)) == PEER_ID_CHARS
    assert auth.run_id_of(RUN_KEY) == TOKEN.run_id != auth.run_id_of(PEER_KEY)


def test_roots_verify_under_the_run_key_alone() -> None:
    signature = auth.sign_root(RUN, b"root")
    auth.verify_root(RUN_KEY, b"root", signature)
    for key, root, given in [
        (PEER_KEY, b"root", signature),
        (RUN_KEY, b"rooT", signature),
        (RUN_KEY, b"root", signature[:-1]),
        (RUN_KEY, b"root", RUN.sign(b"root")),
        (b"short", b"root", signature),
    ]:
        with pytest.raises(IntegrityFault):
            auth.verify_root(key, root, given)


def test_an_answer_proves_the_peers_key_for_this_challenge_only() -> None:
    asked = auth.challenge(RUN, NONCE, auth.peer_id_of(PEER_KEY))
    given = auth.answer(PEER, RUN_KEY, NONCE, asked)
    assert auth.is_answer(PEER_KEY, RUN_KEY, NONCE, asked, given)
    again = auth.challenge(RUN, NONCE, auth.peer_id_of(PEER_KEY))
    assert not auth.is_answer(PEER_KEY, RUN_KEY, NONCE, again, given)
    assert not auth.is_answer(auth.public_bytes(OTHER_PEER), RUN_KEY, NONCE, asked, given)


def test_a_peer_answers_no_coordinator_but_its_own() -> None:
    peer = auth.peer_id_of(PEER_KEY)
    for asked in (auth.challenge(OTHER_RUN, NONCE, peer), auth.challenge(RUN, b"m" * 32, peer)):
        with pytest.raises(IntegrityFault, match="key of this run"):
            auth.answer(PEER, RUN_KEY, NONCE, asked)


def test_an_enrolment_proof_is_for_one_key_and_one_secret() -> None:
    proof = auth.enrol_proof(PEER, "s3cret")
    assert auth.is_enrol_proof(PEER_KEY, proof, "s3cret")
    assert not auth.is_enrol_proof(PEER_KEY, proof, "other")
    assert not auth.is_enrol_proof(auth.public_bytes(OTHER_PEER), proof, "s3cret")


def test_keys_and_token_files_are_private_and_can_be_read_again(tmp_path: Path) -> None:
    key = auth.load_or_make_key(tmp_path / "key")
    assert auth.public_bytes(auth.load_or_make_key(tmp_path / "key")) == auth.public_bytes(key)
    auth.write_token_file(tmp_path / "token", TOKEN)
    assert auth.read_token_file(tmp_path / "token") == TOKEN
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": 1, "role": "worker", "secret": "", "run_key": ""}',
        "\xff",
        "[" * 9000,
        '[run]\nbase_model = "base"',
        '{"name": "box-1", "role": "wor',
    ],
)
def test_a_file_that_is_no_token_file_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(OperatorFault, match=r"is not a token file: expected .*; copy it again"):
        auth.read_token_file(tmp_path / "token")


def test_a_token_file_of_a_newer_build_may_have_more_keys(tmp_path: Path) -> None:
    facts = {**dataclasses.asdict(TOKEN), "expires_at": 1.8e9}
    (tmp_path / "token").write_text(json.dumps(facts))
    assert auth.read_token_file(tmp_path / "token") == TOKEN


def test_a_token_file_that_others_can_read_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auth.write_token_file(tmp_path / "token", TOKEN)
    auth.read_token_file(tmp_path / "token")
    assert caplog.messages == []
    (tmp_path / "token").chmod(0o640)
    auth.read_token_file(tmp_path / "token")
    assert "chmod 600" in caplog.messages[0]


def test_missing_and_broken_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="there is no token file"):
        auth.read_token_file(tmp_path / "none")
    (tmp_path / "key").write_text("zz")
    with pytest.raises(OperatorFault, match="not a readable key"):
        auth.load_or_make_key(tmp_path / "key")
    with pytest.raises(OperatorFault, match="cannot write"):
        auth.write_token_file(tmp_path / "no" / "folder", TOKEN)


def test_a_key_that_another_process_makes_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: list[Ed25519PrivateKey] = []
    write = auth.write_private

    def write_late(path: Path, text: str) -> None:
        monkeypatch.undo()
        theirs.append(auth.load_or_make_key(tmp_path / "key"))
        write(path, text)

    monkeypatch.setattr(auth, "write_private", write_late)
    mine = auth.load_or_make_key(tmp_path / "key")
    assert auth.public_bytes(mine) == auth.public_bytes(theirs[0])
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
