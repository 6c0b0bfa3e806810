"""Tracks which frames of one form a peer knows, holds, has asked for and lacks.

A frame is *known* once its segment's table is held, or if it is itself the table of one of the
form's segments. Every held frame is known. Every operation on a single frame takes constant time,
because a form has thousands of frames.

Not here: where frames come from and go to (`relay`), and whether their bytes are right (they are
verified before `hold`).
"""

import math
from collections.abc import Iterator, Sequence

from echo2d.core.base.ids import (
    FRAME_INDEX_BITS,
    FRAME_INDEX_MAX,
    FrameId,
    PeerId,
    SegmentId,
    frame_id,
)


class _Segment:
    """The frames of one segment by index; index 0 is the table."""

    __slots__ = ("held", "sizes")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = (0, *sizes)  # payload bytes, 0 for the table
        self.held = bytearray(len(self.sizes))  # 1 for each frame that is held
        self.held[0] = 1


class FrameSet:
    """The frames of one form at one peer."""

    __slots__ = (
        "_asked",
        "_missing",
        "_segments",
        "arrivals",
        "duplicates",
        "held_bytes",
        "known_bytes",
        "lost",
        "total",
    )

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        # How many known payload frames are not held.
        self._missing = 0
        # For each frame, the peer that was asked for it, and the deadline in monotonic seconds.
        self._asked: dict[FrameId, tuple[PeerId, float]] = {}
        # Frames that were held once and must come again.
        self.lost: set[FrameId] = set()
        # How many segments the form has; None until it is known.
        self.total: int | None = None
        # Every frame that was ever held, in the order of its first arrival; it only grows.
        self.arrivals: list[FrameId] = []
        self.known_bytes = 0  # payload of the known frames
        self.held_bytes = 0  # payload of the held frames
        # How many payload frames came although they were held already.
        self.duplicates = 0

    @property
    def missing_count(self) -> int:
        """The number of known frames that are not held."""
        tables = 0 if self.total is None else self.total - len(self._segments)
        return self._missing + tables

    @property
    def complete(self) -> bool:
        """Whether every frame of every segment is held."""
        return self._missing == 0 and self.total is not None and len(self._segments) == self.total

    @property
    def asked_count(self) -> int:
        return len(self._asked)

    def learn(self, segment: SegmentId, sizes: Sequence[int]) -> bool:
        """Record that the segment's table is held, so its frames are known. False if it was held before."""
        if segment in self._segments:
            return False
        assert self.total is None or segment < self.total
        self._segments[segment] = _Segment(sizes)
        self._missing += len(sizes)
        self.known_bytes += sum(sizes)
        table = frame_id(segment, 0)
        self._asked.pop(table, None)
        self.arrivals.append(table)
        return True

    def finish(self, segments: int) -> None:
        """Record that the form has exactly this many segments."""
        assert all(segment < segments for segment in self._segments)
        self.total = segments

    def hold(self, frame: FrameId) -> bool:
        """Record that the frame is verified and held. False if it was held before.

        The frame must be known. A table is held from `learn` on.
        """
        segment = self._segments[frame >> FRAME_INDEX_BITS]
        index = frame & FRAME_INDEX_MAX
        if segment.held[index]:
            # A table is no payload, so it is no duplicate either.
            self.duplicates += index > 0
            return False
        segment.held[index] = 1
        self._missing -= 1
        self.held_bytes += segment.sizes[index]
        # A frame that comes again keeps its old place in the order of arrival.
        if frame in self.lost:
            self.lost.discard(frame)
        else:
            self.arrivals.append(frame)
        if self._asked:
            self._asked.pop(frame, None)
        return True

    def lose(self, frame: FrameId) -> None:
        """Record that a payload frame is no longer held; no effect if it was not held or not known."""
        if self.holds(frame):
            self._segments[frame >> FRAME_INDEX_BITS].held[frame & FRAME_INDEX_MAX] = 0
            self._missing += 1
            self.held_bytes -= self.size(frame)
            self.lost.add(frame)

    def knows(self, frame: FrameId) -> bool:
        """Whether the segment's table is held and lists this frame."""
        segment = self._segments.get(frame >> FRAME_INDEX_BITS)
        return segment is not None and frame & FRAME_INDEX_MAX < len(segment.sizes)

    def holds(self, frame: FrameId) -> bool:
        """Whether the frame is held; False for an unknown frame."""
        return self.knows(frame) and bool(
            self._segments[frame >> FRAME_INDEX_BITS].held[frame & FRAME_INDEX_MAX]
        )

    def size(self, frame: FrameId) -> int:
        """Payload bytes of a known frame, 0 for a table."""
        return self._segments[frame >> FRAME_INDEX_BITS].sizes[frame & FRAME_INDEX_MAX]

    def unasked(self) -> Iterator[FrameId]:
        """Missing frames that no peer was asked for: tables first, then by frame id.

        The iterator is valid until the next change.
        """
        for segment in range(self.total or 0):
            if segment not in self._segments and frame_id(SegmentId(segment), 0) not in self._asked:
                yield frame_id(SegmentId(segment), 0)
        for segment in sorted(self._segments):
            held = self._segments[segment].held
            # `bytearray.find` skips held frames much faster than a loop would.
            index = held.find(0)
            while index >= 0:
                frame = frame_id(SegmentId(segment), index)
                if frame not in self._asked:
                    yield frame
                index = held.find(0, index + 1)

    def unasked_lost(self) -> Iterator[FrameId]:
        """Lost frames that no peer was asked for. The iterator is valid until the next change."""
        return (frame for frame in sorted(self.lost) if frame not in self._asked)

    def ask(self, frame: FrameId, peer: PeerId, until: float) -> None:
        """Record that the peer was asked for this frame and should send it by `until`."""
        assert frame not in self._asked
        self._asked[frame] = (peer, until)

    def extend(self, peer: PeerId, until: float) -> None:
        """The peer is sending, so `until` becomes its deadline for all frames that it was asked for."""
        self._asked.update(dict.fromkeys(self.asked_of(peer), (peer, until)))

    def give_back(self, frame: FrameId, peer: PeerId) -> bool:
        """Record that the peer will not send the frame, so another one may be asked.

        False if this peer was not asked for it.
        """
        if self.asked_from(frame) != peer:
            return False
        del self._asked[frame]
        return True

    def asked_from(self, frame: FrameId) -> PeerId | None:
        """The peer that was asked for the frame; None if no peer was."""
        return self._asked[frame][0] if frame in self._asked else None

    def asked_of(self, peer: PeerId) -> tuple[FrameId, ...]:
        """The frames that this peer was asked for and has not sent."""
        return tuple(frame for frame, (asked, _) in self._asked.items() if asked == peer)

    def asked_until(self, peer: PeerId) -> float:
        """The peer's earliest deadline; infinite if it was asked for nothing."""
        return min(
            (until for asked, until in self._asked.values() if asked == peer), default=math.inf
        )

    def overdue(self, now: float) -> list[tuple[FrameId, PeerId]]:
        """Frames that were not sent by their deadline, each with the peer that was asked."""
        return [(frame, peer) for frame, (peer, until) in self._asked.items() if until <= now]

    def check(self) -> None:
        """Assert that all counters agree with the frames."""
        segments = self._segments.values()
        assert self._missing == sum(segment.held.count(0) for segment in segments)
        assert self.known_bytes == sum(sum(segment.sizes) for segment in segments)
        held = [frame for frame in self.arrivals if frame not in self.lost]
        assert self.held_bytes == sum(map(self.size, held))
        assert len(set(held)) == len(held) == sum(segment.held.count(1) for segment in segments)
        assert all(map(self.holds, held))
        assert len(held) + len(self.lost) == len(self.arrivals)
        assert not any(map(self.holds, self.lost))
        assert all(not self.holds(frame) for frame in self._asked)
        assert all(segment.held[0] == 1 for segment in segments)
        assert self.total is None or all(number < self.total for number in self._segments)
