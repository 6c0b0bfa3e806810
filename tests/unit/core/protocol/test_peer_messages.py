"""Units of the wire: which are accepted, and which are a PeerFault before a byte of payload is kept."""

import struct

import msgpack
import pytest

from echo2d.core.base.ids import FrameId, Generation, PeerId, PlanId, RunId, StripeId
from echo2d.core.protocol.peer_messages import (
    FRAME,
    FRAMES_MAX,
    HEADER_BYTES,
    PEER_MESSAGE_BYTES_MAX,
    TYPE_OF,
    WITHOUT_PAYLOAD,
    WORD_MAX,
    FrameRun,
    FramesCancelled,
    FramesHeld,
    FramesPassed,
    FramesWanted,
    Header,
    LinkEnded,
    LinkHello,
    LinkMessage,
    Proof,
    StreamEnded,
    StreamOpened,
    decode,
    encode,
    frame_header,
    frames_held,
    parse_header,
    runs_of,
)
from echo2d.core.weights.form import FRAME_BYTES_MAX
from echo2d.errors import PeerFault
from tests.support.peer_link import FORM

FRAME_7 = FrameId(7)
MESSAGES: list[LinkMessage] = [
    LinkHello(1, RunId("run"), PeerId("a"), PeerId("b"), b"n" * 32, 1),
    Proof(b"p" * 32),
    LinkEnded("why"),
    StreamOpened(1, FORM, PlanId(2), Generation(3), StripeId(4), 5),
    StreamEnded(1, ""),
    FramesHeld(FORM, (FrameRun(FRAME_7, 2), FrameRun(FrameId(WORD_MAX), 1))),
    FramesHeld(FORM, ()),
    FramesWanted(2, FORM, (FRAME_7, FrameId(0))),
    FramesCancelled(FORM, (FRAME_7,)),
    FramesPassed(2, 7, 3),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_encoded_message_is_decoded(message: LinkMessage) -> None:
    data = encode(message)
    header = parse_header(data[:HEADER_BYTES])
    assert header == Header(TYPE_OF[type(message)], 0, 0, 0, 0, len(data) - HEADER_BYTES)
    assert decode(header.type, memoryview(data)[HEADER_BYTES:]) == message


def test_the_header_is_sixteen_little_endian_bytes() -> None:
    assert (
        frame_header(0x0102, FrameId(0x03040506), 0x0708090A, 0x00010000).hex()
        == "09000201060504030a09080700000100"
    )
    assert parse_header(frame_header(1, FRAME_7, 2, 0)) == Header(
        FRAME, WITHOUT_PAYLOAD, 1, 7, 2, 0
    )


@pytest.mark.parametrize(
    "header",
    [
        Header(0, 0, 0, 0, 0, 1),
        Header(11, 0, 0, 0, 0, 1),
        Header(FRAME, 0, 1, 0, 0, 0),
        Header(FRAME, WITHOUT_PAYLOAD, 1, 0, 0, 1),
        Header(FRAME, 2, 1, 0, 0, 1),
        Header(FRAME, 2, 1, 0, 0, 0),
        Header(FRAME, 0, 1, 0, 0, FRAME_BYTES_MAX + 1),
        Header(3, 0, 0, 0, 0, 0),
        Header(3, 0, 0, 0, 0, PEER_MESSAGE_BYTES_MAX + 1),
        Header(3, 1, 0, 0, 0, 1),
        Header(3, 0, 1, 0, 0, 1),
        Header(3, 0, 0, 1, 0, 1),
        Header(3, 0, 0, 0, 1, 1),
    ],
)
def test_a_header_that_means_nothing_is_refused(header: Header) -> None:
    with pytest.raises(PeerFault):
        parse_header(struct.pack("<BBHIII", *header))


def test_other_protocols_are_refused_by_their_first_bytes() -> None:
    with pytest.raises(PeerFault, match="unknown message type 71"):
        parse_header(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (StreamOpened, [1, FORM, 2, 3, 4, WORD_MAX + 1]),
        (StreamOpened, [1, "../../etc/passwd", 2, 3, 4, 5]),
        (StreamOpened, [1, FORM, 2, 3, 4, -5]),
        (StreamOpened, [1, FORM, 2, 3, 4]),
        (FramesWanted, [2, FORM, []]),
        (FramesWanted, [2, FORM.upper(), [7]]),
        (FramesWanted, [2, FORM, [WORD_MAX + 1]]),
        (FramesWanted, [2, FORM, [0] * (FRAMES_MAX + 1)]),
        (FramesCancelled, [FORM, []]),
        (FramesHeld, [FORM, [[7, 0], [8, 1]]]),
        (FramesHeld, [FORM, [[7, FRAMES_MAX + 1]]]),
        (FramesHeld, [FORM, [[WORD_MAX, 2]]]),
        (FramesHeld, [FORM, [[7]]]),
        (LinkEnded, {"reason": "map"}),
    ],
)
def test_a_message_beyond_its_limits_is_refused(cls: type, fields: object) -> None:
    with pytest.raises(PeerFault):
        decode(TYPE_OF[cls], memoryview(msgpack.packb(fields)))


def test_bytes_after_the_message_are_refused() -> None:
    with pytest.raises(PeerFault):
        decode(TYPE_OF[LinkEnded], memoryview(msgpack.packb([""]) + b"\0"))


def test_long_lists_are_cut_and_neighbours_joined() -> None:
    frames = [FrameId(number) for number in (*range(10, 10 + FRAMES_MAX), 3, 1, 2)]
    first, second = frames_held(FORM, frames)
    assert first.runs == (FrameRun(FrameId(10), FRAMES_MAX),)
    assert second.runs == (FrameRun(FrameId(3), 1), FrameRun(FrameId(1), 2))
    assert second.frames() == (3, 1, 2)


def test_the_longest_lists_fit_into_a_message() -> None:
    apart = tuple(FrameId(WORD_MAX - 2 * number) for number in range(FRAMES_MAX))
    for message in (FramesHeld(FORM, runs_of(apart)), FramesWanted(1, FORM, apart)):
        assert len(encode(message)) <= PEER_MESSAGE_BYTES_MAX
