"""The sealing of a peer link: the exchange of keys through TLS, and the sealed units."""

import ssl

import pytest

from echo2d.core.protocol.peer_messages import TAG_BYTES
from echo2d.errors import PeerFault
from echo2d.net.security import sealing
from echo2d.net.security.sealing import MAGIC, SEALING_KEY_BYTES, KeyExchange, Seal
from tests.support.tls_peers import ALICE, ALICE_TLS, BOB_TLS

HEADER, PAYLOAD = b"header of a unit", b"weights " * 100


def two_seals() -> tuple[Seal, Seal]:
    one, other = b"1" * SEALING_KEY_BYTES, b"2" * SEALING_KEY_BYTES
    return Seal(one, other), Seal(other, one)


def opened(seal: Seal, header: bytes, sealed: bytes) -> bytes:
    return seal.open(header, memoryview(sealed))


def test_a_sealed_unit_opens_only_at_the_other_end() -> None:
    alice, bob = two_seals()
    sealed = alice.seal(HEADER, memoryview(PAYLOAD))
    assert len(sealed) == len(PAYLOAD) + TAG_BYTES
    assert b"weights" not in sealed
    assert opened(bob, HEADER, sealed) == PAYLOAD
    with pytest.raises(PeerFault, match="changed on the way"):
        opened(alice, HEADER, sealed)


@pytest.mark.parametrize("place", [0, len(PAYLOAD), -1], ids=["payload", "tag", "end of the tag"])
def test_a_changed_unit_does_not_open(place: int) -> None:
    alice, bob = two_seals()
    sealed = bytearray(alice.seal(HEADER, PAYLOAD))
    sealed[place] ^= 1
    with pytest.raises(PeerFault, match="changed on the way"):
        opened(bob, HEADER, bytes(sealed))


def test_a_unit_with_another_header_does_not_open() -> None:
    alice, bob = two_seals()
    with pytest.raises(PeerFault, match="changed on the way"):
        opened(bob, HEADER.upper(), alice.seal(HEADER, b""))


def test_a_unit_opens_once_and_only_in_sequence() -> None:
    alice, bob = two_seals()
    first, second = (alice.seal(HEADER, PAYLOAD) for _ in range(2))
    assert first != second
    assert opened(bob, HEADER, first) == PAYLOAD
    with pytest.raises(PeerFault, match="changed on the way"):
        opened(bob, HEADER, first)
    _, other_bob = two_seals()
    with pytest.raises(PeerFault, match="changed on the way"):
        opened(other_bob, HEADER, second)


def test_a_sealed_link_changes_its_keys_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "UNITS_PER_KEY", 3)
    alice, bob = two_seals()
    units = [alice.seal(HEADER, PAYLOAD) for _ in range(8)]
    assert [opened(bob, HEADER, unit) for unit in units] == [PAYLOAD] * 8
    assert len(set(units)) == 8


def meet(dialling: KeyExchange, accepting: KeyExchange, *, at_once: int = 1 << 20) -> None:
    """Carry bytes between the two, so many at a time, until both are silent."""
    dialling.received(b"")
    on_the_way = True
    while on_the_way:
        on_the_way = False
        for sender, receiver in ((dialling, accepting), (accepting, dialling)):
            data = sender.to_send()
            for start in range(0, len(data), at_once):
                on_the_way = True
                receiver.received(data[start : start + at_once])


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_both_ends_get_the_same_keys_and_each_others_certificate(at_once: int) -> None:
    bob = KeyExchange(BOB_TLS.dialler, expected=ALICE)
    alice = KeyExchange(ALICE_TLS.listener, expected=None)
    meet(bob, alice, at_once=at_once)
    assert alice.seal is not None
    assert bob.seal is not None
    assert opened(bob.seal, HEADER, alice.seal.seal(HEADER, PAYLOAD)) == PAYLOAD
    assert opened(alice.seal, HEADER, bob.seal.seal(HEADER, PAYLOAD)) == PAYLOAD
    assert alice.certificate != bob.certificate


def test_bytes_behind_the_key_are_left_for_the_link() -> None:
    bob = KeyExchange(BOB_TLS.dialler, expected=ALICE)
    alice = KeyExchange(ALICE_TLS.listener, expected=None)
    bob.received(b"")
    alice.received(bob.to_send())
    bob.received(alice.to_send())
    alice.received(bob.to_send() + b"the first unit")
    assert alice.rest == b"the first unit"


def test_a_peer_with_tls_but_another_protocol_gets_the_reason() -> None:
    """As a program of another version: it says its hello through TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    old = BOB_TLS.dialler.wrap_bio(incoming, outgoing, server_hostname=ALICE)
    alice = KeyExchange(ALICE_TLS.listener, expected=None)
    with pytest.raises(ssl.SSLWantReadError):
        old.do_handshake()
    alice.received(outgoing.read())
    incoming.write(alice.to_send())
    old.do_handshake()
    old.write(b"hello" + MAGIC)
    with pytest.raises(PeerFault, match="not this version"):
        alice.received(outgoing.read())
