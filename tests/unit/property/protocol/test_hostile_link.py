"""A real conversation of two peers, damaged and split anywhere, as input of a link and of the relay behind it.

A link gives events or one PeerFault; the relay reacts or raises PeerFault. Neither keeps more than its limits.
"""

import random
from contextlib import suppress

from echo2d.core.base.ids import FrameId, Generation, PlanId, SegmentId, StripeId, frame_id
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges, StripeEdge
from echo2d.core.protocol.peer_link import AHEAD_BYTES_MAX, PeerLink
from echo2d.core.protocol.peer_messages import (
    HANDSHAKE_BYTES_MAX,
    FrameReceived,
    FramesCancelled,
    FramesHeld,
    FramesPassed,
    FramesWanted,
    LinkEnded,
    LinkEvent,
    LinkOpened,
    StreamEnded,
    StreamOpened,
    runs_of,
)
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.frame_repair import HELD_FRAMES_MAX
from echo2d.core.relay.relay import Relay
from echo2d.core.weights.form import FRAME_BYTES_MAX
from echo2d.errors import PeerFault
from tests.support.fuzz import Fuzz, assert_bounded, damaged
from tests.support.peer_link import ALICE, BOB, CAROL, FORM, STRIPE, an_end, feed, joined, wire

STRIPE_ID, PASSED_ON = STRIPE[3], StripeId(9)
SIZES = (65536, 65536, 9)


def frames(*indices: int) -> tuple[FrameId, ...]:
    return tuple(frame_id(SegmentId(0), index) for index in indices)


def alice_says() -> tuple[PeerLink, list[bytes]]:
    """Bob, just joined, who takes a stripe of Alice and wants frames; and what she then says, unit by unit."""
    alice, bob = joined()
    feed(alice, bob.tell(StreamOpened(2, *STRIPE, 0)) + bob.tell(FramesWanted(4, FORM, frames(2))))
    return bob, [
        alice.tell(FramesHeld(FORM, runs_of(frames(0, 1, 2)))),
        wire(alice.send_frame(2, frames(0)[0], 0, memoryview(b"table" * 9))),
        alice.tell(StreamOpened(1, *STRIPE, 0)),
        wire(alice.send_frame(2, frames(1)[0], 1, memoryview(b"payload" * 20))),
        wire(alice.send_frame(2, frames(3)[0], 2, None)),
        wire(alice.send_frame(4, frames(2)[0], 0, memoryview(b"x"))),
        alice.tell(StreamOpened(3, *STRIPE[:3], PASSED_ON, 0)),
        alice.tell(FramesPassed(3, 0, 0)),
        alice.tell(FramesWanted(5, FORM, frames(1, 2))),
        alice.tell(FramesCancelled(FORM, frames(2))),
        alice.tell(StreamEnded(2, "done")),
        alice.tell(StreamEnded(1, "changed")),
        alice.end("goodbye"),
    ]


def a_relay() -> Relay:
    """Bob's: he takes one stripe from Alice; she takes another one from him."""
    relay = Relay(BOB)
    edges = tuple(EdgePeer(peer, None, dial=False, secret=bytes(32)) for peer in (ALICE, CAROL))
    stripes = (StripeEdge(STRIPE_ID, ALICE, ()), StripeEdge(PASSED_ON, CAROL, (ALICE,)))
    relay.handle(relay_events.TableHeld(FORM, SegmentId(0), SIZES), now=0.0)
    relay.handle(relay_events.LinkUp(ALICE), now=0.0)
    plan = PlanEdges(FORM, PlanId(STRIPE[1]), Generation(STRIPE[2]), stripes, edges)
    relay.handle(relay_events.PlanReceived(plan), now=0.0)
    return relay


def for_the_relay(event: LinkEvent, *, right: bool) -> relay_events.RelayEvent | None:
    """As the receiver makes it; `right`: whether a frame verifies."""
    match event:
        case FrameReceived(stream, form, frame, sequence, payload) if right or payload is None:
            return relay_events.FrameVerified(ALICE, stream, form, frame, sequence, payload is None)
        case FrameReceived(stream, form, frame):
            return relay_events.FrameRejected(ALICE, stream, form, frame)
        case LinkOpened() | LinkEnded():
            return None
        case _:
            return relay_events.Heard(ALICE, event)


def hear(link: PeerLink, data: bytes, rng: random.Random, buffer_max: int) -> list[LinkEvent]:
    """The events of these bytes, which arrive in pieces of any size; PeerFault ends it."""
    events: list[LinkEvent] = []
    rest = memoryview(data)
    with suppress(PeerFault):
        while rest and not link.ended:
            buffer = link.get_buffer()
            assert len(buffer) <= buffer_max
            count = min(len(buffer), len(rest), rng.choice((1, 7, 16, 64, 1 << 20)))
            buffer[:count], rest = rest[:count], rest[count:]
            event = link.bytes_received(count)
            link.check()
            while event is not None:
                events.append(event)
                event = None if link.ended else link.bytes_received(0)
                link.check()
    link.check()
    return events


def test_a_link_and_its_relay_survive_damaged_units_of_a_linked_peer(fuzz: Fuzz) -> None:
    rng, heard, relayed, relay = fuzz.rng, 0, 0, a_relay()
    for _ in fuzz.share(0.3):
        bob, units = alice_says()
        at = rng.randrange(len(units))
        units[at] = damaged(rng, units[at], units)
        if rng.random() < 0.2:
            rng.shuffle(units)
        for event in hear(bob, b"".join(units), rng, FRAME_BYTES_MAX + AHEAD_BYTES_MAX):
            heard += not isinstance(event, LinkEnded)
            translated = for_the_relay(event, right=rng.random() < 0.8)
            if translated is not None:
                with suppress(PeerFault):
                    relay.handle(translated, now=float(heard))
                    relayed += 1
                relay.check()
        if rng.random() < 0.2:
            relay.handle(relay_events.LinkDown(ALICE, "gone"), now=float(heard))
            relay.handle(relay_events.LinkUp(ALICE), now=float(heard))
        if rng.random() < 0.05:
            assert_bounded(relay, items_max=HELD_FRAMES_MAX, total_max=4 * HELD_FRAMES_MAX)
            relay = a_relay()
    assert heard > relayed > 100


def test_a_link_survives_damaged_bytes_of_a_stranger(fuzz: Fuzz) -> None:
    hello = an_end(ALICE, BOB, dials=True, nonce=1).start()
    for _ in fuzz.share(0.05):
        bob = an_end(BOB, ALICE, dials=False, nonce=2)
        wrong = damaged(fuzz.rng, hello, [fuzz.rng.randbytes(64)])
        assert hear(bob, wrong, fuzz.rng, HANDSHAKE_BYTES_MAX) in ([], [LinkEnded("")])
        assert_bounded(bob, items_max=HANDSHAKE_BYTES_MAX, total_max=8 * HANDSHAKE_BYTES_MAX)
