"""Streams, frames and the end of a link, once it is open. The handshake is in test_peer_handshake."""

import pytest

from echo2d.core.base.ids import FrameId
from echo2d.core.protocol.peer_link import AHEAD_BYTES_MAX, STREAMS_MAX, PeerLink
from echo2d.core.protocol.peer_messages import (
    PEER_REASON_CHARS_MAX,
    STREAM_MAX,
    FrameReceived,
    FrameRun,
    FramesCancelled,
    FramesHeld,
    FramesWanted,
    LinkEnded,
    StreamEnded,
    StreamOpened,
    encode,
    frame_header,
)
from echo2d.core.weights.form import FRAME_BYTES_MAX
from echo2d.errors import PeerFault
from tests.support.peer_link import ALICE, FORM, OTHER_FORM, STRIPE, feed, joined, wire

ONE, TWO = FrameId(1), FrameId(2)


def with_stripe(from_sequence: int = 0) -> tuple[PeerLink, PeerLink]:
    """Bob is Alice's child on his stream 2."""
    alice, bob = joined()
    assert feed(alice, bob.tell(StreamOpened(2, *STRIPE, from_sequence))) == [
        StreamOpened(2, *STRIPE, from_sequence)
    ]
    return alice, bob


def with_repair() -> tuple[PeerLink, PeerLink]:
    """Alice repairs from Bob on her stream 1."""
    alice, bob = joined()
    assert feed(bob, alice.tell(FramesWanted(1, FORM, (ONE, TWO)))) == [
        FramesWanted(1, FORM, (ONE, TWO))
    ]
    return alice, bob


def test_frames_arrive_on_a_stripe_in_sequence() -> None:
    alice, bob = with_stripe(from_sequence=5)
    data = wire(alice.send_frame(2, ONE, 5, memoryview(b"one"))) + wire(
        alice.send_frame(2, TWO, 6, None)
    )
    assert feed(bob, data) == [
        FrameReceived(2, FORM, ONE, 5, memoryview(b"one")),
        FrameReceived(2, FORM, TWO, 6, None),
    ]


def test_a_received_payload_belongs_to_its_receiver() -> None:
    alice, bob = with_stripe()
    first, second = (
        feed(bob, wire(alice.send_frame(2, ONE, sequence, memoryview(payload))))[0]
        for sequence, payload in enumerate((b"first", b"other"))
    )
    assert isinstance(first, FrameReceived)
    assert isinstance(second, FrameReceived)
    assert first.payload == memoryview(b"first")
    assert second.payload == memoryview(b"other")
    assert first.payload.readonly


def test_the_largest_frame_is_read_directly_into_its_own_buffer() -> None:
    alice, bob = with_stripe()
    header, payload = alice.send_frame(2, ONE, 0, memoryview(bytes(FRAME_BYTES_MAX)))
    assert feed(bob, bytes(header)) == []
    assert len(bob.get_buffer()) == FRAME_BYTES_MAX + AHEAD_BYTES_MAX
    assert feed(bob, bytes(payload)) == [FrameReceived(2, FORM, ONE, 0, memoryview(payload))]


def test_bytes_behind_a_frame_need_no_second_read() -> None:
    """The next header and more: the read says of how many bytes it is certain that they come."""
    alice, bob = with_stripe()
    first, second = (
        wire(alice.send_frame(2, frame, n, memoryview(bytes(4000))))
        for n, frame in enumerate((ONE, TWO))
    )
    assert feed(bob, first[:16]) == []
    assert bob.missing == 4000
    data = first[16:] + second[:100]
    bob.get_buffer()[: len(data)] = data
    assert bob.bytes_received(len(data)) == FrameReceived(2, FORM, ONE, 0, memoryview(bytes(4000)))
    assert bob.bytes_received(0) is None
    bob.check()
    assert bob.missing == 4000 - 84
    assert feed(bob, second[100:]) == [FrameReceived(2, FORM, TWO, 1, memoryview(bytes(4000)))]


def test_a_frame_before_a_fault_is_delivered() -> None:
    alice, bob = with_stripe()
    header, payload = alice.send_frame(2, ONE, 0, memoryview(bytes(400)))
    assert feed(bob, bytes(header)) == []
    data = bytes(payload) + bytes(16)
    bob.get_buffer()[: len(data)] = data
    assert bob.bytes_received(len(data)) == FrameReceived(2, FORM, ONE, 0, memoryview(bytes(400)))
    with pytest.raises(PeerFault, match="unknown message type 0"):
        bob.bytes_received(0)
    assert bob.ended
    bob.check()


def test_small_frames_that_arrive_together_keep_little_extra_memory() -> None:
    alice, bob = with_stripe()
    for event in feed(
        bob, b"".join(wire(alice.send_frame(2, ONE, n, memoryview(b"small"))) for n in range(100))
    ):
        assert isinstance(event, FrameReceived)
        assert event.payload is not None
        assert memoryview(event.payload.obj).nbytes <= 6


@pytest.mark.parametrize(("stream", "sequence"), [(2, 0), (2, 2), (4, 1), (1, 1), (0, 1)])
def test_a_frame_out_of_place_is_refused_before_its_payload(stream: int, sequence: int) -> None:
    _, bob = with_stripe(from_sequence=1)
    with pytest.raises(PeerFault):
        feed(bob, frame_header(stream, ONE, sequence, FRAME_BYTES_MAX))
    assert bob.ended


def test_wanted_frames_may_arrive_in_any_order() -> None:
    alice, bob = with_repair()
    data = wire(bob.send_frame(1, TWO, 0, memoryview(b"two"))) + wire(
        bob.send_frame(1, ONE, 0, None)
    )
    assert feed(alice, data) == [
        FrameReceived(1, FORM, TWO, 0, memoryview(b"two")),
        FrameReceived(1, FORM, ONE, 0, None),
    ]
    assert feed(bob, alice.tell(FramesWanted(1, FORM, (TWO,)))) == [FramesWanted(1, FORM, (TWO,))]


def test_frames_of_a_repair_stream_are_not_numbered() -> None:
    alice, _ = with_repair()
    with pytest.raises(PeerFault, match="where 0 is next"):
        feed(alice, frame_header(1, ONE, 1, 10))


def test_a_stream_serves_one_form_in_one_way() -> None:
    _, bob = with_repair()
    with pytest.raises(PeerFault, match="not a repair stream of this form"):
        feed(bob, encode(FramesWanted(1, OTHER_FORM, (ONE,))))
    alice, _ = with_stripe()
    with pytest.raises(PeerFault, match="not a repair stream of this form"):
        feed(alice, encode(FramesWanted(2, FORM, (ONE,))))


def test_messages_about_held_and_cancelled_frames_arrive() -> None:
    alice, bob = joined()
    for message in (FramesHeld(FORM, (FrameRun(ONE, 2),)), FramesCancelled(FORM, (TWO, ONE))):
        assert feed(bob, alice.tell(message)) == [message]


def test_a_stream_that_the_parent_ends_is_confirmed() -> None:
    alice, bob = with_stripe()
    assert feed(bob, alice.tell(StreamEnded(2, "done"))) == [StreamEnded(2, "done")]
    assert not alice.serves(2)
    assert feed(alice, bob.take_replies()) == []
    with pytest.raises(PeerFault, match="not open"):
        feed(alice, encode(StreamEnded(2, "")))


def test_frames_under_way_to_a_child_that_left_are_dropped() -> None:
    alice, bob = with_stripe()
    under_way = wire(alice.send_frame(2, ONE, 0, memoryview(b"late")))
    assert feed(alice, bob.tell(StreamEnded(2, "another parent"))) == [
        StreamEnded(2, "another parent")
    ]
    assert not alice.serves(2)
    assert feed(bob, under_way + alice.take_replies()) == []
    with pytest.raises(PeerFault, match="has not opened"):
        feed(bob, frame_header(2, ONE, 1, 4))


def test_wants_under_way_to_an_end_that_ended_the_stream_are_dropped() -> None:
    alice, bob = with_repair()
    under_way = alice.tell(FramesWanted(1, FORM, (ONE,)))
    feed(alice, bob.tell(StreamEnded(1, "busy")))
    assert feed(bob, under_way + alice.take_replies()) == []


def test_end_messages_that_cross_end_the_stream_once() -> None:
    alice, bob = with_stripe()
    from_alice, from_bob = alice.tell(StreamEnded(2, "a")), bob.tell(StreamEnded(2, "b"))
    assert feed(alice, from_bob) == []
    assert feed(bob, from_alice) == []
    assert alice.take_replies() == bob.take_replies() == b""


def test_nothing_is_sent_on_an_ended_stream() -> None:
    alice, bob = with_repair()
    feed(alice, bob.tell(StreamEnded(1, "busy")))
    assert alice.tell(FramesWanted(1, FORM, (ONE,))) == b""
    assert alice.tell(StreamEnded(1, "again")) == b""


def test_streams_are_opened_in_sequence() -> None:
    alice, bob = joined()
    for wrong in (1, 4):
        alice, bob = joined()
        with pytest.raises(PeerFault, match="stream 2 to be the next"):
            feed(alice, encode(StreamOpened(wrong, *STRIPE, 0)))
    alice, bob = joined()
    alice._next_theirs = bob._next_mine = STREAM_MAX - 1  # the last even number
    feed(
        alice,
        bob.tell(FramesWanted(STREAM_MAX - 1, FORM, (ONE,)))
        + bob.tell(StreamOpened(2, *STRIPE, 0)),
    )
    assert alice.serves(2)


def test_no_end_opens_more_streams_than_allowed() -> None:
    alice, bob = joined()
    for number in range(STREAMS_MAX):
        feed(alice, bob.tell(StreamOpened(2 + 2 * number, *STRIPE, 0)))
    too_many = 2 + 2 * STREAMS_MAX
    with pytest.raises(PeerFault, match="256 streams"):
        bob.tell(StreamOpened(too_many, *STRIPE, 0))
    with pytest.raises(PeerFault, match="256 streams"):
        feed(alice, encode(StreamOpened(too_many, *STRIPE, 0)))


def test_the_end_of_a_link_is_reported_with_its_reason() -> None:
    alice, bob = with_stripe()
    assert feed(bob, alice.end("x" * 1000)) == [LinkEnded("x" * PEER_REASON_CHARS_MAX)]
    assert alice.ended
    assert bob.ended
    assert not alice.serves(2)


def test_nothing_is_read_after_a_fault() -> None:
    alice, _ = joined()
    with pytest.raises(PeerFault):
        feed(alice, bytes(16))
    assert feed(alice, encode(LinkEnded(ALICE))) == []
