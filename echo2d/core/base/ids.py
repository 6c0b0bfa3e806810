"""Define identifiers as distinct types, so that they cannot be mixed up, and the rules for making
them.
"""

from typing import NewType

Version = NewType("Version", int)  # train steps that made the weights; 0 is the base model
Epoch = NewType("Epoch", int)  # learner session; higher fences lower
PublishSeq = NewType("PublishSeq", int)  # grows with every accepted publish of a run
RunId = NewType("RunId", str)
PeerId = NewType("PeerId", str)  # PEER_ID_CHARS hex characters: hash of the peer's public key
Digest = NewType("Digest", bytes)  # blake3-256, DIGEST_BYTES long
FormId = NewType("FormId", str)  # FORM_ID_CHARS hex characters, see manifest.form_id
# segment << FRAME_INDEX_BITS | index, where index 0 is the segment's table
FrameId = NewType("FrameId", int)
SegmentId = NewType("SegmentId", int)  # 0, 1, ... within a form
ChunkId = NewType("ChunkId", int)  # 0, 1, ... within a manifest
PlanId = NewType("PlanId", int)
Generation = NewType("Generation", int)  # of a plan; a repair raises it
StripeId = NewType("StripeId", int)  # 0, 1, ... within a plan
GroupId = NewType("GroupId", int)
LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)  # one per accepted WebSocket, never reused within a process
RequestId = NewType("RequestId", int)  # one per waiting HTTP call, never reused within a process

DIGEST_BYTES = 32
PEER_ID_CHARS = 32
FORM_ID_CHARS = 32
FRAME_INDEX_BITS = 20
FRAME_INDEX_MAX = (1 << FRAME_INDEX_BITS) - 1
SEGMENTS_MAX = 1 << 12  # with segments of 64 MiB: forms of up to 256 GiB
LABEL_DIGEST_CHARS = 12
# The lowest 32 bits of a lease or plan id are a number; those above are a tag of the process that made it.
TAG_SHIFT = 32


def frame_id(segment: SegmentId, index: int) -> FrameId:
    assert 0 <= segment < SEGMENTS_MAX
    assert 0 <= index <= FRAME_INDEX_MAX
    return FrameId(segment << FRAME_INDEX_BITS | index)


def segment_of(frame: FrameId) -> SegmentId:
    return SegmentId(frame >> FRAME_INDEX_BITS)


def index_of(frame: FrameId) -> int:
    return frame & FRAME_INDEX_MAX


def is_table(frame: FrameId) -> bool:
    """Whether this frame is its segment's table (frame digests and chunk modes), not payload."""
    return index_of(frame) == 0


def lease_name(lease: LeaseId) -> str:
    """A readable name: the tag of the granting process (hex), and the lease's number there."""
    return f"{lease >> TAG_SHIFT:x}.{lease & ((1 << TAG_SHIFT) - 1)}"


def version_label(version: Version, digest: Digest) -> str:
    """An engine's name for a published version: `<version>-<first 12 hex of digest>`."""
    return f"{version}-{digest.hex()[:LABEL_DIGEST_CHARS]}"


def label_version(label: str) -> int:
    """The version in an engine's name for it."""
    return int(label.partition("-")[0])
