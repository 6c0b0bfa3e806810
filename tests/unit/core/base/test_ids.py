"""Frame numbers and version labels."""

import pytest

from echo2d.core.base.ids import (
    FRAME_INDEX_MAX,
    SEGMENTS_MAX,
    Digest,
    SegmentId,
    Version,
    frame_id,
    index_of,
    is_table,
    segment_of,
    version_label,
)


@pytest.mark.parametrize(
    ("segment", "index"), [(0, 0), (0, 1), (3, FRAME_INDEX_MAX), (SEGMENTS_MAX - 1, 5)]
)
def test_a_frame_id_can_be_split_into_its_parts(segment: int, index: int) -> None:
    frame = frame_id(SegmentId(segment), index)
    assert (segment_of(frame), index_of(frame), is_table(frame)) == (segment, index, index == 0)
    assert frame < 1 << 32, "fits the link header"


def test_a_label_has_the_version_and_the_digest() -> None:
    assert (
        version_label(Version(12), Digest(bytes.fromhex("abcdef0123456789" * 4)))
        == "12-abcdef012345"
    )
