"""The peer link: one end of a connection between two peers, without I/O: bytes in, events out.

A link makes sure that what arrives is well-formed, comes from the expected peer, belongs to an open
stream, is in order and keeps the limits. Anything else is a `PeerFault` and ends the link. Not here:
the wire format (`peer_messages`), sockets and time limits (`net/peer/links`), which frames to send
or to ask for (`relay`), and whether a frame is the right one (its receiver hashes it).

    dialled: start()                accepted
         | Hello out                    |
         v                              v
       HELLO                          HELLO
         | Hello in: Proof out          | Hello in: Hello, Proof out
         +----------> PROOF <-----------+
                        | Proof in: event LinkOpened              (`peer_handshake`)
                        v
                      OPEN     both ends are alike from here on

    any state: end(), LinkEnded in or PeerFault -> ENDED

A stream carries frames of one form in one direction. The receiver of the frames opens it: a stripe
with StreamOpened, a repair stream with the first FramesWanted for a form. Each end numbers the
streams that it opens in order, and starts over after STREAM_MAX: the end with the smaller peer id
uses 1, 3, 5 ..., the other end 2, 4, 6 ... The frames of a stripe have sequence numbers without
holes from `from_sequence` on; all frames of a repair stream have 0. Either end may end a stream,
and each says StreamEnded once:

    OPEN -- StreamEnded out --> ENDING -- StreamEnded in --> gone     (frames until then: dropped)
    OPEN -- StreamEnded in: event, StreamEnded out --> gone

Bytes are received straight into a buffer for the one frame or message that is arriving. There is no
other buffer, and this buffer is made only after the header was checked. On an open link the buffer
has some extra room for bytes that arrive right behind the frame, such as the next header. These
bytes need no second read, and are copied. A completed payload belongs to the receiver of the event.
The link never writes to that buffer again, so read-only views of it may wait in send queues;
dropping the last view frees it. To limit how many payloads are kept, the receiver stops reading.

A link may be sealed from its first byte on (`seal`). Then all payloads are received into one buffer,
and each event has the payload that was decrypted from it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np

from echo2d.core.base.ids import FormId, FrameId, PeerId, RunId
from echo2d.core.protocol.peer_handshake import Handshake
from echo2d.core.protocol.peer_messages import (
    FRAME,
    HANDSHAKE_BYTES_MAX,
    HEADER_BYTES,
    PEER_REASON_CHARS_MAX,
    TAG_BYTES,
    TYPE_OF,
    FrameReceived,
    FramesCancelled,
    FramesHeld,
    FramesPassed,
    FramesWanted,
    Header,
    LinkEnded,
    LinkEvent,
    LinkHello,
    LinkMessage,
    LinkOpened,
    Proof,
    RelayMessage,
    StreamEnded,
    StreamId,
    StreamOpened,
    decode,
    encode,
    frame_header,
    parse_header,
    require,
    stream_after,
)
from echo2d.core.weights.form import FRAME_BYTES_MAX
from echo2d.errors import PeerFault

# One end may have at most this many streams open: the stripes of two versions, and repair.
STREAMS_MAX = 256
# The extra room after a frame: more than a paced link of 100 Mbit/s brings in one burst, but at most
# a quarter (AHEAD_SHARE) of the frame, because the room is kept as long as the frame.
AHEAD_BYTES_MAX = 64 << 10
AHEAD_SHARE = 4


class _State(enum.Enum):
    HELLO = enum.auto()
    PROOF = enum.auto()
    OPEN = enum.auto()
    ENDED = enum.auto()


_ALLOWED = {
    _State.HELLO: {TYPE_OF[LinkHello], TYPE_OF[LinkEnded]},
    _State.PROOF: {TYPE_OF[Proof], TYPE_OF[LinkEnded]},
    _State.OPEN: {*TYPE_OF.values()} - {TYPE_OF[LinkHello], TYPE_OF[Proof]},
}


class UnitSeal(Protocol):
    """Encrypts the payloads of one link (`net/security/sealing.py`)."""

    def seal(self, header: bytes, payload: bytes | memoryview) -> bytes:
        """The encrypted payload and its tag."""

    def open(self, header: bytes, sealed: memoryview) -> bytes:
        """The decrypted payload. PeerFault: header, payload or tag is not what was sealed."""


@dataclass(slots=True)
class _Stream:
    form: FormId
    sequence: int | None  # of the next frame; None: repair, not numbered
    ending: bool = False  # whether this end has sent StreamEnded and the other end has not yet


class PeerLink:
    """One end of a link. Each method that sends something returns the bytes to write. Write them in the order
    of the calls.

    `secrets`, `nonce` and `dialled` are as in `Handshake`.
    """

    def __init__(
        self,
        *,
        run_id: RunId,
        me: PeerId,
        secrets: Mapping[PeerId, bytes],
        nonce: bytes,
        dialled: PeerId | None,
    ) -> None:
        self._handshake = Handshake(
            run_id=run_id, me=me, secrets=secrets, nonce=nonce, dialled=dialled
        )
        self._me = me
        self._seal: UnitSeal | None = None
        self._tag_bytes = 0  # after each payload
        # Sealed payloads arrive here, one after the other.
        self._sealed = memoryview(bytearray())
        self._state = _State.HELLO
        self._asked: dict[StreamId, _Stream] = {}  # opened by this end: frames come in
        self._serving: dict[StreamId, _Stream] = {}  # opened by the other end: frames go out
        self._next_mine = self._next_theirs = 0
        self._replies = bytearray()
        # The buffer for headers; it has extra room once the link is open.
        self._header = memoryview(bytearray(HEADER_BYTES))
        # The header whose payload is being received; None: a header is being received.
        self._arriving: Header | None = None
        self._target = self._header  # the buffer that is being filled, with its extra room
        # The size of what is being received, and how many bytes of it have arrived.
        self._wanted, self._here = HEADER_BYTES, 0
        # Bytes that arrived after a whole header or payload and are not processed yet.
        self._behind = self._header[:0]

    @property
    def ended(self) -> bool:
        """Whether the link has ended: nothing may be received or sent any more."""
        return self._state is _State.ENDED

    def seal(self, seal: UnitSeal) -> None:
        """Seal all payloads. Call it before anything is sent or received."""
        self._seal, self._tag_bytes = seal, TAG_BYTES

    def start(self) -> bytes:
        """The first bytes of the end that dialled."""
        return self._unit(self._handshake.start())

    def _unit(self, message: LinkMessage) -> bytes:
        """The bytes of a message on this link."""
        unit = encode(message)
        if self._seal is None:
            return unit
        header = unit[:HEADER_BYTES]
        return header + self._seal.seal(header, unit[HEADER_BYTES:])

    # receiving

    def get_buffer(self) -> memoryview:
        """The buffer for the next bytes; never empty. Call it once there are no more events."""
        return self._target[self._here :]

    @property
    def missing(self) -> int:
        """How many bytes of the arriving header or payload are missing.

        Never 0 once there are no more events.
        """
        return self._wanted - self._here

    def bytes_received(self, count: int) -> LinkEvent | None:
        """Takes the first `count` bytes of `get_buffer()` and returns one event.

        There may be more events: call it with count 0 until it returns None, and then write
        `take_replies()`. PeerFault ends the link.
        """
        assert not self.ended
        here = self._here + count
        assert here <= len(self._target)
        if here > self._wanted:
            self._behind = self._target[self._wanted : here]
            here = self._wanted
        self._here = here
        try:
            return self._next_event()
        except PeerFault:
            self._end()
            raise

    def _next_event(self) -> LinkEvent | None:
        while self._here == self._wanted:
            event = (
                self._header_complete()
                if self._arriving is None
                else self._payload_complete(self._arriving)
            )
            if self._state is _State.ENDED:
                self._end()
                return event
            if self._behind:
                self._here = count = min(len(self._behind), self._wanted)
                self._target[:count], self._behind = self._behind[:count], self._behind[count:]
            if event is not None:
                return event
        return None

    def _end(self) -> None:
        self._state = _State.ENDED
        self._behind = self._header[:0]
        self._expect_header()  # TLS still asks for one more buffer

    def take_replies(self) -> bytes:
        """Answers to the bytes received. Write them before anything that is sent later."""
        replies, self._replies = bytes(self._replies), bytearray()
        return replies

    def _header_complete(self) -> LinkEvent | None:
        header = parse_header(self._header)
        if header.type == FRAME:
            self._check_place(header)  # fails before the link is open
        elif header.type not in _ALLOWED[self._state]:
            raise PeerFault(f"message type {header.type} is not expected now")
        elif self._state is not _State.OPEN:
            require(
                header.length <= HANDSHAKE_BYTES_MAX,
                f"at most {HANDSHAKE_BYTES_MAX} bytes before the link is open",
            )
        wanted = header.length + self._tag_bytes
        if wanted == 0:
            self._expect_header()
            return self._on_frame(header, None)
        self._arriving = header
        ahead = (
            min(header.length // AHEAD_SHARE, AHEAD_BYTES_MAX) if self._state is _State.OPEN else 0
        )
        self._target = self._buffer(wanted + ahead)
        self._wanted, self._here = wanted, 0
        return None

    def _buffer(self, size: int) -> memoryview:
        if self._seal is None:
            return np.empty(size, np.uint8).data
        if size > len(self._sealed):
            self._sealed = np.empty(size, np.uint8).data
        return self._sealed[:size]

    def _payload_complete(self, header: Header) -> LinkEvent | None:
        payload = self._target[: self._wanted].toreadonly()
        if self._seal is not None:
            payload = memoryview(self._seal.open(bytes(self._header[:HEADER_BYTES]), payload))
        self._expect_header()
        if header.type == FRAME:
            return self._on_frame(header, payload if header.length else None)
        return self._on_message(decode(header.type, payload), payload)

    def _expect_header(self) -> None:
        self._arriving = None
        self._target = self._header
        self._wanted, self._here = HEADER_BYTES, 0

    def _check_place(self, header: Header) -> None:
        stream = self._asked.get(header.stream)
        if stream is None:
            raise PeerFault(f"a frame on stream {header.stream}, which this end has not opened")
        if header.sequence != (stream.sequence or 0):
            raise PeerFault(
                f"frame number {header.sequence} of a stream where {stream.sequence or 0} is next"
            )

    def _on_frame(self, header: Header, payload: memoryview | None) -> LinkEvent | None:
        stream = self._asked[header.stream]  # still there: streams end between frames
        if stream.sequence is not None:
            stream.sequence += 1
        if stream.ending:
            return None
        return FrameReceived(
            header.stream, stream.form, FrameId(header.frame), header.sequence, payload
        )

    def _on_message(self, message: LinkMessage, payload: memoryview) -> LinkEvent | None:
        match message:
            case LinkHello():
                for answer in self._handshake.answer(message, bytes(payload)):
                    self._replies += self._unit(answer)
                self._state = _State.PROOF
                return None
            case Proof():
                return self._open(self._handshake.verify(message))
            case StreamOpened():
                self._accept(message.stream, _Stream(message.form, message.from_sequence))
            case FramesWanted():
                return self._on_wanted(message)
            case FramesPassed():
                return self._on_passed(message)
            case StreamEnded():
                return self._on_stream_ended(message)
            case LinkEnded():
                self._state = _State.ENDED
            case FramesHeld() | FramesCancelled():
                pass
            case _:
                assert_never(message)
        return message

    def _open(self, peer: PeerId) -> LinkOpened:
        self._state = _State.OPEN
        self._header = memoryview(bytearray(HEADER_BYTES + AHEAD_BYTES_MAX))
        self._expect_header()
        self._next_mine, self._next_theirs = (1, 2) if self._me < peer else (2, 1)
        return LinkOpened(peer)

    # streams that the other end opened: frames go out

    def _accept(self, number: StreamId, stream: _Stream) -> None:
        require(
            number == self._next_theirs,
            f"stream {self._next_theirs} to be the next one opened, not {number}",
        )
        if number in self._serving or len(self._serving) >= STREAMS_MAX:
            raise PeerFault(f"more than {STREAMS_MAX} streams")
        self._serving[number] = stream
        self._next_theirs = stream_after(number)

    def _on_wanted(self, wanted: FramesWanted) -> FramesWanted | None:
        if wanted.stream not in self._serving:
            self._accept(wanted.stream, _Stream(wanted.form, None))
        stream = self._serving[wanted.stream]
        if stream.sequence is not None or stream.form != wanted.form:
            raise PeerFault(f"stream {wanted.stream} is not a repair stream of this form")
        return None if stream.ending else wanted

    def _on_passed(self, passed: FramesPassed) -> FramesPassed | None:
        stream = self._serving.get(passed.stream)
        if stream is None or stream.sequence is None or passed.sequence > stream.sequence:
            raise PeerFault(
                f"frame number {passed.sequence} of stream {passed.stream} was passed on,"
                " but not sent"
            )
        return None if stream.ending else passed

    def serves(self, stream: StreamId) -> bool:
        """Whether frames may be sent on this stream."""
        served = self._serving.get(stream)
        return self._state is _State.OPEN and served is not None and not served.ending

    def send_frame(
        self, stream: StreamId, frame: FrameId, sequence: int, payload: memoryview | None
    ) -> tuple[bytes | memoryview, ...]:
        """The buffers to write. Call it only if `serves(stream)`, in sequence (0 for repair).

        payload: None sends only the header.
        """
        assert self.serves(stream)
        served = self._serving[stream]
        assert sequence == (served.sequence or 0), (
            f"frame number {sequence} where {served.sequence} is next"
        )
        if served.sequence is not None:
            served.sequence += 1
        header = frame_header(stream, frame, sequence, 0 if payload is None else payload.nbytes)
        assert payload is None or 0 < payload.nbytes <= FRAME_BYTES_MAX
        if self._seal is not None:
            return header, self._seal.seal(header, payload or b"")
        return (header,) if payload is None else (header, payload)

    # what both ends send on an open link

    def tell(self, message: RelayMessage) -> bytes:
        """The bytes of a message; empty if its stream has ended meanwhile.

        StreamOpened, and the first FramesWanted of a repair stream, open the stream with the next
        number. PeerFault: the other end leaves too many ended streams unconfirmed.
        """
        match message:
            case StreamOpened(number, form, from_sequence=sequence):
                assert number == self._next_mine
                self._ask(_Stream(form, sequence))
            case FramesWanted(number, form) if number == self._next_mine:
                self._ask(_Stream(form, None))
            case FramesWanted(number) | FramesPassed(number) | StreamEnded(number):
                stream = self._streams_of(number).get(number)
                if stream is None or stream.ending:
                    return b""
                assert not isinstance(message, FramesWanted) or stream == _Stream(
                    message.form, None
                )
                stream.ending = isinstance(message, StreamEnded)
            case FramesHeld() | FramesCancelled():
                pass
            case _:
                assert_never(message)
        return self._unit(message)

    def _ask(self, stream: _Stream) -> None:
        assert self._state is _State.OPEN
        if self._next_mine in self._asked or len(self._asked) >= STREAMS_MAX:
            raise PeerFault(f"{len(self._asked)} streams are open or not confirmed as ended")
        self._asked[self._next_mine] = stream
        self._next_mine = stream_after(self._next_mine)

    def end(self, reason: str) -> bytes:
        """Ends the link, also after a PeerFault, and returns the bytes to write."""
        self._end()
        return self._unit(LinkEnded(reason[:PEER_REASON_CHARS_MAX]))

    def _on_stream_ended(self, ended: StreamEnded) -> StreamEnded | None:
        stream = self._streams_of(ended.stream).pop(ended.stream, None)
        if stream is None:
            raise PeerFault(f"stream {ended.stream} ended, which is not open")
        if stream.ending:
            return None
        self._replies += self._unit(StreamEnded(ended.stream, ""))
        return ended

    def _streams_of(self, number: StreamId) -> dict[StreamId, _Stream]:
        return self._asked if number % 2 == self._next_mine % 2 else self._serving

    def check(self) -> None:
        """Asserts every invariant of this end."""
        assert (
            0
            <= self._here
            <= self._wanted
            <= len(self._target)
            <= FRAME_BYTES_MAX + AHEAD_BYTES_MAX + self._tag_bytes
        )
        assert self._wanted == (
            HEADER_BYTES if self._arriving is None else self._arriving.length + self._tag_bytes
        )
        assert len(self._behind) <= AHEAD_BYTES_MAX
        assert self._here == self._wanted or not self._behind
        assert max(len(self._asked), len(self._serving)) <= STREAMS_MAX
        if self._state in (_State.HELLO, _State.PROOF):
            assert len(self._asked) + len(self._serving) + len(self._behind) == 0
            assert len(self._target) <= HANDSHAKE_BYTES_MAX + self._tag_bytes
        if self._state is _State.OPEN:
            assert (self._next_mine + self._next_theirs) % 2 == 1
        assert all(self._streams_of(number) is self._asked for number in self._asked)
        assert all(self._streams_of(number) is self._serving for number in self._serving)
