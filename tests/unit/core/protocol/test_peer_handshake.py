"""Which peers the handshake lets in, and which it refuses."""

import pytest

from echo2d.core.base.ids import PeerId, RunId
from echo2d.core.protocol.builds import LINK_PROTOCOL_OLDEST, LINK_PROTOCOL_VERSION
from echo2d.core.protocol.peer_handshake import NONCE_BYTES
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import (
    FRAME,
    HANDSHAKE_BYTES_MAX,
    LinkEnded,
    LinkHello,
    LinkOpened,
    Proof,
    encode,
)
from echo2d.errors import PeerFault
from tests.support.peer_link import ALICE, BOB, CAROL, RUN, SECRET, an_end, feed, joined

NONCE = b"n" * NONCE_BYTES


def listener() -> PeerLink:
    return an_end(BOB, ALICE, dials=False)


def test_both_ends_open_after_a_round_trip_and_a_half() -> None:
    joined()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            LinkHello(LINK_PROTOCOL_VERSION + 1, RUN, ALICE, BOB, NONCE, LINK_PROTOCOL_VERSION + 1),
            f"link protocol {LINK_PROTOCOL_VERSION}, not",
        ),
        (
            LinkHello(
                LINK_PROTOCOL_VERSION, RunId("run-2"), ALICE, BOB, NONCE, LINK_PROTOCOL_OLDEST
            ),
            "same run",
        ),
        (
            LinkHello(LINK_PROTOCOL_VERSION, RUN, ALICE, CAROL, NONCE, LINK_PROTOCOL_OLDEST),
            "expected a hello for this peer",
        ),
        (
            LinkHello(LINK_PROTOCOL_VERSION, RUN, CAROL, BOB, NONCE, LINK_PROTOCOL_OLDEST),
            "no link with that peer",
        ),
        (
            LinkHello(LINK_PROTOCOL_VERSION, RUN, BOB, BOB, NONCE, LINK_PROTOCOL_OLDEST),
            "no link with that peer",
        ),
        (
            LinkHello(LINK_PROTOCOL_VERSION, RUN, ALICE, BOB, b"short", LINK_PROTOCOL_OLDEST),
            "nonce",
        ),
    ],
)
def test_a_stranger_is_refused_without_an_answer(hello: LinkHello, reason: str) -> None:
    bob = listener()
    with pytest.raises(PeerFault, match=reason):
        feed(bob, encode(hello))
    assert bob.ended
    assert bob.take_replies() == b""


@pytest.mark.parametrize("protocol", [LINK_PROTOCOL_VERSION, LINK_PROTOCOL_VERSION + 7])
def test_a_later_build_that_still_understands_us_is_answered(protocol: int) -> None:
    bob = listener()
    feed(bob, encode(LinkHello(protocol, RUN, ALICE, BOB, NONCE, LINK_PROTOCOL_VERSION)))
    assert bob.take_replies()


def test_the_peer_that_answers_must_be_the_one_that_was_dialled() -> None:
    secrets = {BOB: SECRET, CAROL: SECRET}
    alice = PeerLink(run_id=RUN, me=ALICE, secrets=secrets, nonce=NONCE, dialled=BOB)
    with pytest.raises(PeerFault, match="dialled"):
        feed(
            alice,
            encode(
                LinkHello(LINK_PROTOCOL_VERSION, RUN, CAROL, ALICE, NONCE, LINK_PROTOCOL_OLDEST)
            ),
        )


def test_a_wrong_secret_is_noticed_by_both_ends() -> None:
    alice, bob = an_end(ALICE, BOB, dials=True), an_end(BOB, ALICE, dials=False, secret=b"x" * 32)
    feed(bob, alice.start())
    with pytest.raises(PeerFault, match="wrong proof"):
        feed(alice, bob.take_replies())
    with pytest.raises(PeerFault, match="wrong proof"):
        feed(bob, alice.take_replies())


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    alice = an_end(ALICE, BOB, dials=True)
    feed(
        alice,
        encode(LinkHello(LINK_PROTOCOL_VERSION, RUN, BOB, ALICE, NONCE, LINK_PROTOCOL_OLDEST)),
    )
    with pytest.raises(PeerFault, match="wrong proof"):
        feed(alice, alice.take_replies())


def test_a_recorded_handshake_does_not_open_another_link() -> None:
    alice, bob = an_end(ALICE, BOB, dials=True, nonce=1), an_end(BOB, ALICE, dials=False, nonce=2)
    hello = alice.start()
    feed(bob, hello)
    feed(alice, bob.take_replies())
    recorded = hello + alice.take_replies()
    with pytest.raises(PeerFault, match="wrong proof"):
        feed(an_end(BOB, ALICE, dials=False, nonce=3), recorded)


@pytest.mark.parametrize(
    "data",
    [
        encode(Proof(b"p" * 32)),
        bytes([FRAME, 0, 1, 0]) + bytes(11) + b"\1",
        encode(LinkEnded("x" * HANDSHAKE_BYTES_MAX)),
        bytes(16),
    ],
    ids=["a proof first", "a frame", "too long", "zeros"],
)
def test_nothing_but_a_hello_opens_the_conversation(data: bytes) -> None:
    with pytest.raises(PeerFault):
        feed(listener(), data)


def test_a_refusal_is_read_by_the_end_that_dialled() -> None:
    alice, bob = an_end(ALICE, BOB, dials=True), an_end(BOB, PeerId("c" * 32), dials=False)
    with pytest.raises(PeerFault) as fault:
        feed(bob, alice.start())
    assert feed(alice, bob.end(str(fault.value))) == [
        LinkEnded("no link with that peer is expected")
    ]
    assert alice.ended


def test_a_second_hello_is_refused() -> None:
    _, bob = joined()
    with pytest.raises(PeerFault, match="not expected now"):
        feed(
            bob,
            encode(LinkHello(LINK_PROTOCOL_VERSION, RUN, ALICE, BOB, NONCE, LINK_PROTOCOL_OLDEST)),
        )


def test_the_name_of_the_peer_is_given_with_the_proof() -> None:
    bob = listener()
    alice = an_end(ALICE, BOB, dials=True)
    assert feed(bob, alice.start()) == []
    feed(alice, bob.take_replies())
    assert feed(bob, alice.take_replies()) == [LinkOpened(ALICE)]
