"""Records what a peer holds of one form, from its first root until the form is given up.

A table or frame is held once it is verified, and is on disk or waits in memory to be written
(`write_behind`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2d.core.base.ids import (
    ChunkId,
    FormId,
    FrameId,
    SegmentId,
    is_table,
    segment_of,
)
from echo2d.core.weights.verifier import FormIndex


@dataclass(slots=True, eq=False)
class HeldForm:
    """What is held of one form."""

    index: FormIndex
    # The frames that were on disk when the process started. Each is held once its digest is signed.
    found: frozenset[FrameId]
    # The payload bytes of each held frame, 0 for a table. They are kept here because, when a form is received
    # again, its index knows the frames that are already on disk only once their table has arrived.
    frames: dict[FrameId, int] = field(default_factory=dict)
    payload_bytes: int = 0
    duplicates: int = 0  # frames
    lost: int = 0  # frames
    # The first segment of the page of digests that was asked for. None: no page is under way.
    page_asked: SegmentId | None = None
    end_told: bool = False  # FormComplete was emitted
    first_searched: bool = False  # the base was searched for chunks of the first segment
    searched: bool = False  # FormSearched was emitted

    @property
    def form(self) -> FormId:
        return self.index.facts.form

    @property
    def whole(self) -> bool:
        """Whether every table and frame of the form is held."""
        if not self.index.complete:
            return False
        segments = range(self.index.segment_count)
        payloads = sum(len(self.index.spans(SegmentId(segment))) for segment in segments)
        return len(self.frames) == payloads + len(segments)

    def knows(self, frame: FrameId) -> bool:
        """Whether the frame can be verified: a table by its digest, others by their table."""
        segment = segment_of(frame)
        known = self.index.table_digest(segment) if is_table(frame) else self.index.table(segment)
        return known is not None

    def hold(self, frame: FrameId, size: int) -> None:
        """Count a table or frame of `size` bytes as held."""
        if frame not in self.frames:
            self.frames[frame] = 0 if is_table(frame) else size
            self.payload_bytes += self.frames[frame]

    def hold_found(self, frames: Iterable[FrameId]) -> None:
        """Count tables and frames of known segments as held."""
        for frame in frames:
            self.hold(frame, self.index.length(frame) or 0)

    def lose(self, frames: Iterable[FrameId]) -> tuple[FrameId, ...]:
        """Count these as no longer held; returns those that were."""
        lost = tuple(frame for frame in frames if frame in self.frames)
        self.payload_bytes -= sum(self.frames.pop(frame) for frame in lost)
        self.lost += len(lost)
        return lost

    def missing_chunks(self, segment: SegmentId) -> set[ChunkId]:
        """Chunks of which not all frames are held."""
        spans = self.index.spans(segment)
        return {span.chunk for span in spans if span.frame not in self.frames}

    def frame_sizes(self, segment: SegmentId) -> tuple[int, ...]:
        """The sizes of a known segment's payload frames 1, 2, ..., in bytes."""
        return tuple(span.length for span in self.index.spans(segment))
