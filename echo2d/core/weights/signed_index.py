"""Defines roots: signed summaries that name a form's segments while it is still being encoded.

    root 1   segments 0..1   running digest over 0..1
    root 2   segments 2..2   running digest over 0..2
    root 3   segments -      running digest over 0..2, totals: the form is complete

The run's key signs `signing_bytes()`. A newcomer gets the newest root, and the digests of older
segments in unsigned pages, which it checks against the root's running digest. Not here: signatures,
which need a key, and what a receiver does with roots (`verifier`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from echo2d.core.base.canonical import canonical_unpacker, digest_of
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import DIGEST_BYTES, SEGMENTS_MAX, Digest, FormId, SegmentId
from echo2d.core.weights.form import FormFacts
from echo2d.errors import IntegrityFault

ROOT_BYTES_MAX = 1024  # roots go over the control link to every peer
ROOT_SEGMENTS_MAX = 16  # digests that fit into ROOT_BYTES_MAX beside the longest facts and totals
PAGE_SEGMENTS_MAX = 1024  # 34 KiB per page; four pages list the largest form


def running_digest(segments: Sequence[Digest]) -> Digest:
    """The digest over the digests of all segments from the first on."""
    return digest_of(b"".join(segments))


@dataclass(frozen=True, slots=True)
class FormTotals:
    """Totals of a complete form."""

    wire_bytes: int  # bytes of all frames and tables
    full_bytes: int  # bytes of the files
    snapshot: Digest  # the manifest's digest

    def __post_init__(self) -> None:
        if len(self.snapshot) != DIGEST_BYTES:
            raise IntegrityFault(f"a snapshot digest is not {DIGEST_BYTES} bytes long")


@dataclass(frozen=True, slots=True)
class Root:
    """A root; see the module docstring."""

    facts: FormFacts
    first_segment: SegmentId
    # The digests of the segments [first_segment, segment_count), which are new since the last root.
    segments: tuple[Digest, ...]
    running: Digest  # the running digest over the segments [0, segment_count)
    totals: FormTotals | None

    def __post_init__(self) -> None:
        if len(self.segments) > ROOT_SEGMENTS_MAX or self.segment_count > SEGMENTS_MAX:
            raise IntegrityFault("a root names too many segments")
        if any(len(digest) != DIGEST_BYTES for digest in (*self.segments, self.running)):
            raise IntegrityFault(f"a root has a digest that is not {DIGEST_BYTES} bytes long")
        if self.segment_count == 0:
            raise IntegrityFault("a root names no segment")

    @property
    def form(self) -> FormId:
        return self.facts.form

    @property
    def segment_count(self) -> int:
        """The number of segments of the form so far; final once there are totals."""
        return self.first_segment + len(self.segments)

    def signing_bytes(self) -> bytes:
        """The bytes that are signed and sent: at most ROOT_BYTES_MAX."""
        return pack(_SignedRecord("echo2d-root-1", self))

    @staticmethod
    def decode(data: bytes) -> "Root":
        """Decode `signing_bytes()` whose signature was verified. IntegrityFault: other bytes."""
        return _unpack(data).root


@dataclass(frozen=True, slots=True)
class _SignedRecord:
    """What is signed. The format name distinguishes this signature from signatures over other things."""

    format: Literal["echo2d-root-1"]
    root: Root


_unpack = canonical_unpacker(_SignedRecord, bytes_max=ROOT_BYTES_MAX)
