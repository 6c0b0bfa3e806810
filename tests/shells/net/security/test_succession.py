"""A run's authority is changed: which boxes follow, and which authority no box follows."""

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.errors import OperatorFault
from echo2d.net.control.client import Identity
from echo2d.net.security.auth import Succession, TokenFile, last_of, public_bytes, signed
from echo2d.net.security.tls import COORDINATOR, Tls
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.run_dir.authority import (
    AUTHORITY_FILE,
    KEY_FILE,
    NEXT_KEY_FILE,
    change_authority,
    known_authority,
    open_authority,
)
from echo2d.runtime.run_dir.run_directory import RunDirectory

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n in range(1, 6)]
PUBLIC = [public_bytes(key) for key in KEYS]


def named(old: int, new: int, number: int) -> Succession:
    return signed(KEYS[old], Succession(PUBLIC[new], f"PEM {new}", number))


def test_a_member_follows_only_a_chain_of_rising_numbers_from_its_own_key() -> None:
    chain = [named(0, 1, 1), named(1, 2, 2), named(2, 3, 3)]
    for at, number, found in ((0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 3, None), (4, 0, None)):
        last = last_of(PUBLIC[at], number, chain)
        assert (last and last.run_key) == (None if found is None else PUBLIC[found])
    assert last_of(PUBLIC[0], 1, [named(0, 4, 1)]) is None, "a number that was there already"
    assert last_of(PUBLIC[0], 0, [replace(named(0, 1, 1), authority="PEM 2")]) is None
    assert last_of(PUBLIC[0], 0, [replace(named(0, 1, 1), number=2)]) is None


async def shaken_hands(server: Tls, client: Tls, name: str = COORDINATOR) -> bool:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()

    serving = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=server.listener)
    async with serving:
        port = serving.sockets[0].getsockname()[1]
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client.dialler, server_hostname=name
            )
            got = await reader.read(1)
            writer.close()
        except (ssl.SSLError, ConnectionError):
            return False
        return got == b"x"


def test_members_of_an_older_authority_and_of_the_new_one_trust_each_other(
    tmp_path: Path,
) -> None:
    old = RunDirectory(tmp_path / "run")
    member = Tls(old.authority.certificate)
    member.present(KEYS[0], old.authority.certify_peer(PUBLIC[0]))
    for _ in range(2):  # it was away for the first change
        change_authority(old.path, open_authority(old.path), named=True)
    new = RunDirectory(old.path)
    assert (new.run_id, new.keys.seeds, new.keys.number) == (old.run_id, old.keys.seeds, 2)
    assert new.public_key != old.public_key
    assert asyncio.run(shaken_hands(new.authority.coordinator(), member))
    newcomer = Tls(new.authority.certificate)
    newcomer.present(KEYS[1], new.authority.certify_peer(PUBLIC[1]))
    assert asyncio.run(shaken_hands(new.authority.coordinator(), newcomer))
    # The old key's coordinator is none to a member that obeys the new one.
    assert not asyncio.run(shaken_hands(old.authority.coordinator(), newcomer))
    change_authority(old.path, new.keys, named=False)
    lost = RunDirectory(old.path)
    assert (lost.run_id, lost.keys.number, lost.keys.successions) == (old.run_id, 3, ())
    for believer in (member, newcomer):
        assert not asyncio.run(shaken_hands(lost.authority.coordinator(), believer))


def test_a_killed_change_leaves_the_old_authority_or_the_new_one(tmp_path: Path) -> None:
    before = open_authority(tmp_path)
    key = (tmp_path / KEY_FILE).read_text()
    after = change_authority(tmp_path, before, named=True)
    new_key, facts = (tmp_path / KEY_FILE).read_text(), (tmp_path / AUTHORITY_FILE).read_text()
    # After the next key, before authority.json.
    (tmp_path / KEY_FILE).write_text(key)
    (tmp_path / NEXT_KEY_FILE).write_text(new_key)
    (tmp_path / AUTHORITY_FILE).unlink()
    assert public_bytes(open_authority(tmp_path).key) == public_bytes(before.key)
    # After authority.json.
    (tmp_path / AUTHORITY_FILE).write_text(facts)
    assert public_bytes(open_authority(tmp_path).key) == public_bytes(after.key)
    assert not (tmp_path / NEXT_KEY_FILE).exists()
    # An old key beside a newer authority, as from two backups.
    (tmp_path / KEY_FILE).write_text(key)
    with pytest.raises(OperatorFault, match=r"run\.key is not the key that authority\.json names"):
        open_authority(tmp_path)
    (tmp_path / AUTHORITY_FILE).write_text(json.dumps({"run_id": "x"}))
    with pytest.raises(OperatorFault, match=r"authority\.json is damaged"):
        open_authority(tmp_path)


def test_a_lost_key_is_replaced_in_the_same_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(OperatorFault, match="nothing says which run it is"):
        known_authority(tmp_path)
    token = run.believed(TokenFile("own-viewer", "viewer", "secret", ""))
    (tmp_path / "tokens" / "viewer.token").write_text(json.dumps(vars_of(token)))
    changed = change_authority(tmp_path, known_authority(tmp_path), named=False)
    assert (changed.run_id, changed.number) == (run.run_id, 1)
    (tmp_path / KEY_FILE).unlink()
    again = change_authority(tmp_path, known_authority(tmp_path), named=False)
    assert (again.run_id, again.seeds, again.number) == (run.run_id, changed.seeds, 2)


def vars_of(token: TokenFile) -> dict[str, object]:
    return {name: getattr(token, name) for name in TokenFile.__slots__}


def test_a_worker_never_returns_to_an_older_authority(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path / "state", 1 << 30)
    first = TokenFile("box", "worker", "s", PUBLIC[0].hex(), authority="PEM 0", run="aa")
    assert state_dir.authority(first) is None
    state_dir.obey(first.run_id, named(0, 1, 1))
    later = state_dir.authority(first)
    assert later is not None
    assert (later.run_key, later.number, later.authority) == (PUBLIC[1], 1, "PEM 1")
    # A file that was written after a loss counts at once, and the one before it no more.
    lost = replace(first, run_key=PUBLIC[2].hex(), authority="PEM 2", number=2)
    assert state_dir.authority(lost) is None
    obeyed = state_dir.authority(first)
    assert obeyed is not None
    assert obeyed.run_key == PUBLIC[2]
    with pytest.raises(OperatorFault, match="another authority than the one that this worker"):
        state_dir.authority(replace(lost, run_key=PUBLIC[3].hex()))
    assert state_dir.authority(replace(first, run="bb")) is None, "of another run"
    (tmp_path / "state" / "authority.json").write_text("{}")
    with pytest.raises(OperatorFault, match="is damaged"):
        state_dir.authority(first)
    state_dir.close()


async def test_a_worker_reports_a_new_authority_before_it_follows() -> None:
    heard: list[Succession] = []

    async def follow(authority: Succession) -> None:
        assert identity.run_key == PUBLIC[0]
        heard.append(authority)

    identity = Identity(KEYS[4], PUBLIC[0], run="aa", on_follow=follow)
    await identity.follow([named(0, 1, 1)])
    await identity.follow([named(0, 1, 1), named(0, 2, 2)])
    assert (identity.run_key, identity.number, identity.run_id) == (PUBLIC[1], 1, "aa")
    assert [each.number for each in heard] == [1]
