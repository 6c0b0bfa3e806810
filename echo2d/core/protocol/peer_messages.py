"""The messages of the peer link and their form on the wire.

`peer_link` has the rest of the protocol.

Each unit on the wire is a header (HEADER_BYTES, little-endian) and `length` payload bytes:

    type u8 | flags u8 | stream u16 | frame u32 | sequence u32 | length u32

    type 1 Hello   2 Proof   3 LinkEnded   4 StreamOpened   5 StreamEnded   6 FramesHeld
         7 FramesWanted   8 FramesCancelled   9 a frame   10 FramesPassed

A frame (type FRAME; a segment's table is one, too) is sent raw, at most FRAME_BYTES_MAX. Its length
is 0 exactly if it has the flag WITHOUT_PAYLOAD. On a stripe this flag means that the receiver has
said that it holds the frame; on a repair stream, that the sender does not hold it.

Every other type is one message, a record of this module as `codec.pack` writes it: a msgpack array of
its fields in order, which may grow as `builds` says. It has 1 to PEER_MESSAGE_BYTES_MAX bytes, and at
most HANDSHAKE_BYTES_MAX before the link is open. The other header fields are 0. The names of messages
are in the past tense, because each message is also an event of the end that receives it.

On a sealed link each payload, even an empty one, is encrypted and followed by a tag of TAG_BYTES.
`length` does not count the tag. The tag covers the header, too.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from echo2d.core.base.codec import pack, unpacker
from echo2d.core.base.ids import (
    FORM_ID_CHARS,
    FormId,
    FrameId,
    Generation,
    PeerId,
    PlanId,
    RunId,
    StripeId,
)
from echo2d.core.weights.form import FRAME_BYTES_MAX
from echo2d.errors import PeerFault

HEADER_BYTES = 16
TAG_BYTES = 16  # after the payload of a sealed unit
PEER_MESSAGE_BYTES_MAX = 64 << 10  # room for FRAMES_MAX runs of one frame
HANDSHAKE_BYTES_MAX = 1 << 10  # the most bytes that a stranger may make us keep
# One message names at most this many frames, whether it lists them singly or as runs. A longer list becomes several
# messages.
FRAMES_MAX = 4096
PEER_REASON_CHARS_MAX = 200  # a reason is one line for a person
WORD_MAX = (1 << 32) - 1

FRAME = 9
WITHOUT_PAYLOAD = 1

StreamId = int  # 1 to STREAM_MAX; `peer_link` says which end uses which numbers
STREAM_MAX = (1 << 16) - 1

_HEADER = struct.Struct("<BBHIII")
_FORM = re.compile(f"[0-9a-f]{{{FORM_ID_CHARS}}}")


class Header(NamedTuple):
    """The header of one unit, its fields in wire order."""

    type: int
    flags: int
    stream: int
    frame: int
    sequence: int
    length: int


# --- messages


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The sender, and the peer that it wants to reach."""

    protocol: int  # of the peer link, as in a `Build`
    run_id: RunId
    sender: PeerId
    receiver: PeerId
    nonce: bytes  # NONCE_BYTES never used before
    oldest: int  # of the peer link, as in a `Build`


@dataclass(frozen=True, slots=True)
class Proof:
    """Shows that the sender knows the edge's secret: DIGEST_BYTES over both Hellos."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The sender sends nothing more; the connection closes."""

    reason: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The sender, a child in the plan, takes this stripe from its parent, from from_sequence on."""

    stream: StreamId
    form: FormId
    plan: PlanId
    generation: Generation
    stripe: StripeId
    from_sequence: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """No more frames come on this stream. If this answers the other end's StreamEnded, the reason
    is empty.
    """

    stream: StreamId
    reason: str


@dataclass(frozen=True, slots=True)
class FrameRun:
    """The frames first, first + 1, ... first + count - 1."""

    first: FrameId
    count: int


@dataclass(frozen=True, slots=True)
class FramesHeld:
    """The sender holds these verified frames, in addition to those that it named before.

    No runs: it has dropped the form, and no longer holds what it named before.
    """

    form: FormId
    runs: tuple[FrameRun, ...]

    def frames(self) -> tuple[FrameId, ...]:
        """The frames of all runs: at most FRAMES_MAX."""
        return tuple(FrameId(run.first + i) for run in self.runs for i in range(run.count))


@dataclass(frozen=True, slots=True)
class FramesWanted:
    """Asks for frames on a repair stream; the first with a new stream number opens that stream."""

    stream: StreamId
    form: FormId
    frames: tuple[FrameId, ...]


@dataclass(frozen=True, slots=True)
class FramesCancelled:
    """The sender no longer needs these frames, which it asked for before."""

    form: FormId
    frames: tuple[FrameId, ...]


@dataclass(frozen=True, slots=True)
class FramesPassed:
    """The sender, a child with children, has passed on the frames before this sequence number."""

    stream: StreamId
    sequence: int
    # How many frames came to the sender, or to a peer below it, and are not passed on yet.
    waiting: int


# The messages of an open link, until it ends.
RelayMessage = (
    StreamOpened | StreamEnded | FramesHeld | FramesWanted | FramesCancelled | FramesPassed
)
LinkMessage = LinkHello | Proof | LinkEnded | RelayMessage


# --- events that are not messages


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The other end has proved that it is `peer`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A whole frame, not verified."""

    stream: StreamId
    form: FormId
    frame: FrameId
    sequence: int
    payload: memoryview | None  # read-only; None for WITHOUT_PAYLOAD


LinkEvent = LinkOpened | FrameReceived | RelayMessage | LinkEnded


# --- to and from bytes

_TYPES: dict[int, type] = {
    1: LinkHello,
    2: Proof,
    3: LinkEnded,
    4: StreamOpened,
    5: StreamEnded,
    6: FramesHeld,
    7: FramesWanted,
    8: FramesCancelled,
    10: FramesPassed,
}
TYPE_OF = {cls: number for number, cls in _TYPES.items()}
_UNPACK: dict[int, Callable[[memoryview], Any]] = {
    number: unpacker(cls, bytes_max=PEER_MESSAGE_BYTES_MAX, grows=True)
    for number, cls in _TYPES.items()
}


def encode(message: LinkMessage) -> bytes:
    """The whole unit: header and payload."""
    payload = pack(message)
    assert len(payload) <= PEER_MESSAGE_BYTES_MAX
    return _HEADER.pack(TYPE_OF[type(message)], 0, 0, 0, 0, len(payload)) + payload


def frame_header(stream: StreamId, frame: FrameId, sequence: int, length: int) -> bytes:
    """The header of a frame; length 0 means WITHOUT_PAYLOAD."""
    return _HEADER.pack(FRAME, 0 if length else WITHOUT_PAYLOAD, stream, frame, sequence, length)


def parse_header(data: bytes | memoryview) -> Header:
    """Parses the first HEADER_BYTES. PeerFault: they are no header of a frame or message."""
    header = Header(*_HEADER.unpack_from(data))
    if header.type == FRAME:
        _check_frame(header)
    else:
        _check_message(header)
    return header


def decode(type_: int, payload: memoryview) -> LinkMessage:
    """The message in a payload whose header was parsed. PeerFault says what is wrong with it."""
    message: LinkMessage = _UNPACK[type_](payload)
    match message:
        case StreamOpened(form=form, from_sequence=sequence):
            require(sequence <= WORD_MAX, "a sequence number")
            require(_FORM.fullmatch(form) is not None, "a form id")
        case FramesWanted(form=form, frames=frames) | FramesCancelled(form=form, frames=frames):
            require(_FORM.fullmatch(form) is not None, "a form id")
            require(0 < len(frames) <= FRAMES_MAX and max(frames) <= WORD_MAX, "frame ids")
        case FramesPassed(sequence=sequence, waiting=waiting):
            require(max(sequence, waiting) <= WORD_MAX, "sequence numbers")
        case FramesHeld(form, runs):
            require(_FORM.fullmatch(form) is not None, "a form id")
            require(
                sum(run.count for run in runs) <= FRAMES_MAX and all(map(_is_run, runs)),
                "runs of frames",
            )
    return message


def frames_held(form: FormId, frames: Sequence[FrameId]) -> Iterator[FramesHeld]:
    """The messages that say that these frames are held; consecutive frames take the fewest bytes."""
    for start in range(0, len(frames), FRAMES_MAX):
        yield FramesHeld(form, runs_of(frames[start : start + FRAMES_MAX]))


def runs_of(frames: Sequence[FrameId]) -> tuple[FrameRun, ...]:
    """The frames in order, with consecutive ones joined to runs."""
    runs: list[FrameRun] = []
    for frame in frames:
        if runs and frame == runs[-1].first + runs[-1].count:
            runs[-1] = FrameRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(FrameRun(frame, 1))
    return tuple(runs)


def stream_after(number: StreamId) -> StreamId:
    """The next number of the same end, two higher; it starts over after STREAM_MAX."""
    return number + 2 if number + 2 <= STREAM_MAX else 2 - number % 2


def require(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise PeerFault with `what` unless it holds."""
    if not holds:
        raise PeerFault(f"expected {what}")


def _check_frame(header: Header) -> None:
    if header.flags not in (0, WITHOUT_PAYLOAD) or (header.length == 0) != (
        header.flags == WITHOUT_PAYLOAD
    ):
        raise PeerFault(f"a frame of {header.length} bytes cannot have flags {header.flags}")
    if header.length > FRAME_BYTES_MAX:
        raise PeerFault(f"a frame of {header.length} bytes; at most {FRAME_BYTES_MAX} are allowed")


def _check_message(header: Header) -> None:
    if header.type not in _TYPES:
        raise PeerFault(f"unknown message type {header.type}")
    if header.flags or header.stream or header.frame or header.sequence:
        raise PeerFault("a message header: expected flags, stream, frame and sequence 0")
    if not 0 < header.length <= PEER_MESSAGE_BYTES_MAX:
        raise PeerFault(
            f"a message of {header.length} bytes; allowed are 1 to {PEER_MESSAGE_BYTES_MAX}"
        )


def _is_run(run: FrameRun) -> bool:
    return run.count > 0 and run.first + run.count - 1 <= WORD_MAX
