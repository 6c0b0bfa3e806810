"""Two ends of a peer link, and a way to feed bytes to one of them. Every step is followed by `check()`."""

from collections.abc import Iterable, Iterator
from itertools import chain, repeat

from echo2d.core.base.ids import FormId, Generation, PeerId, PlanId, RunId, StripeId
from echo2d.core.protocol.peer_handshake import NONCE_BYTES, SECRET_BYTES
from echo2d.core.protocol.peer_link import PeerLink
from echo2d.core.protocol.peer_messages import LinkEvent, LinkOpened
from echo2d.net.security.sealing import SEALING_KEY_BYTES, Seal

RUN = RunId("run-1")
ALICE, BOB, CAROL = (
    PeerId(letter * 32) for letter in "abc"
)  # Alice opens odd streams, Bob even ones
FORM, OTHER_FORM = FormId("0f" * 16), FormId("1f" * 16)
SECRET = bytes(range(SECRET_BYTES))
STRIPE = (FORM, PlanId(3), Generation(1), StripeId(2))


def an_end(
    me: PeerId,
    other: PeerId,
    *,
    dials: bool,
    secret: bytes = SECRET,
    run_id: RunId = RUN,
    nonce: int = 0,
) -> PeerLink:
    """One end that expects the other."""
    return PeerLink(
        run_id=run_id,
        me=me,
        secrets={other: secret},
        nonce=bytes([nonce]) * NONCE_BYTES,
        dialled=other if dials else None,
    )


def pieces(link: PeerLink, data: bytes, splits: Iterable[int]) -> Iterator[LinkEvent]:
    """The events while the bytes arrive in pieces of at most `splits` bytes; stops when the link ends."""
    rest = memoryview(data)
    for split in chain(splits, repeat(1 << 30)):
        buffer = link.get_buffer()
        count = min(len(buffer), len(rest), split)
        if count == 0 or link.ended:
            return
        buffer[:count] = rest[:count]
        rest = rest[count:]
        event = link.bytes_received(count)
        link.check()
        while event is not None:
            yield event
            event = None if link.ended else link.bytes_received(0)
            link.check()


def feed(link: PeerLink, data: bytes, splits: Iterable[int] = ()) -> list[LinkEvent]:
    """All events of these bytes."""
    return list(pieces(link, data, splits))


def joined(*, sealed: bool = False) -> tuple[PeerLink, PeerLink]:
    """Alice, who dialled, and Bob, with their link open."""
    alice, bob = an_end(ALICE, BOB, dials=True, nonce=1), an_end(BOB, ALICE, dials=False, nonce=2)
    if sealed:
        one, other = b"1" * SEALING_KEY_BYTES, b"2" * SEALING_KEY_BYTES
        alice.seal(Seal(one, other))
        bob.seal(Seal(other, one))
    assert feed(bob, alice.start()) == []
    assert feed(alice, bob.take_replies()) == [LinkOpened(BOB)]
    assert feed(bob, alice.take_replies()) == [LinkOpened(ALICE)]
    return alice, bob


def wire(buffers: Iterable[bytes | memoryview]) -> bytes:
    """What `send_frame` puts on the wire."""
    return b"".join(buffers)
