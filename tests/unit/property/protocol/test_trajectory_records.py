"""Records of groups: every valid one survives a batch, and damaged bytes are a peer's fault or whole."""

import math
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.control_messages import Finish
from echo2d.core.protocol.trajectory import (
    NOTHING,
    AuthoredSpan,
    BatchBody,
    GivenTokens,
    GroupRecord,
    RewardPart,
    Source,
    TrajectoryRecord,
    join_batch,
    pack_batch,
    pack_group,
    pack_logprobs,
    pack_tokens,
    unpack_batch,
    version_spans,
)
from echo2d.errors import PeerFault

ids = st.integers(0, (1 << 63) - 1)
authors = st.sampled_from([PeerId("a"), PeerId("b")])
digests = st.sampled_from([Digest(bytes([n]) * 32) for n in range(2)])
finite = st.floats(allow_nan=False)
names = st.text(max_size=9)


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[bytes, bytes, AuthoredSpan]]:
    """What one lease after another added to a sample; versions never decrease."""
    found, version = [], 0
    for _ in range(draw(st.integers(1, 5))):
        version += draw(st.integers(0, 2))
        length = draw(st.integers(1, 4))
        tokens = draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=length, max_size=length))
        logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=length, max_size=length))
        span = AuthoredSpan(0, length, Version(version), draw(digests), draw(authors))
        found.append((pack_tokens(tokens), pack_logprobs(logprobs), span))
    return found


@st.composite
def trajectories(draw: st.DrawFn) -> TrajectoryRecord:
    whole = NOTHING
    for tokens, logprobs, span in draw(pieces()):
        whole = whole.plus(tokens, logprobs, [span], shift=whole.length)
    return TrajectoryRecord(
        draw(st.integers(0, 63)),
        whole.tokens,
        whole.logprobs,
        whole.spans,
        draw(st.sampled_from(get_args(Finish))),
        draw(finite),
        tuple(draw(st.lists(st.builds(RewardPart, names, finite), max_size=2))),
        tuple(draw(st.lists(st.builds(GivenTokens, ids, ids), max_size=2))),
        draw(st.integers(1, 9)),
        draw(st.builds(Source, names, names)),
        tuple(draw(st.lists(ids, max_size=2))),
    )


groups = st.builds(
    GroupRecord,
    ids.map(GroupId),
    st.lists(st.integers(0, 99), max_size=4).map(pack_tokens),
    st.lists(trajectories(), max_size=3).map(tuple),
    st.lists(st.integers(0, 63), max_size=2).map(tuple),
)
batches = st.builds(BatchBody.of, ids, st.lists(groups, max_size=3))


@given(batches)
def test_a_batch_round_trips(batch: BatchBody) -> None:
    packed = pack_batch(batch)
    assert unpack_batch(packed) == batch
    assert (
        join_batch(batch.step, batch.trajectories, [pack_group(each) for each in batch.groups])
        == packed
    )


@given(pieces(), st.integers(0, 20))
def test_spans_cover_each_token_once_whichever_worker_continued(
    written: list[tuple[bytes, bytes, AuthoredSpan]], cut: int
) -> None:
    whole = NOTHING
    expected: list[tuple[Version, Digest, PeerId]] = []
    for tokens, logprobs, span in written:
        whole = whole.plus(tokens, logprobs, [span], shift=whole.length)
        expected += [(span.version, span.digest, span.author)] * span.end
    for part in (whole, whole.first(cut)):
        told = [
            (span.version, span.digest, span.author)
            for span in part.spans
            for _ in range(span.start, span.end)
        ]
        assert told == expected[: part.length]
        assert len(part.tokens) == len(part.logprobs) == 4 * part.length
        assert all(not b.continues(a) for a, b in zip(part.spans, part.spans[1:], strict=False))
        merged = version_spans(part.spans)
        assert [(s.version, s.digest) for s in merged for _ in range(s.start, s.end)] == [
            (version, digest) for version, digest, _ in told
        ]


@given(batch=batches, at=st.integers(0, 1 << 20), by=st.integers(1, 255))
def test_a_damaged_batch_is_refused_or_another_whole_one(
    batch: BatchBody, at: int, by: int
) -> None:
    data = bytearray(pack_batch(batch))
    data[at % len(data)] ^= by
    for damaged in (bytes(data), bytes(data[: at % len(data)])):
        try:
            found = unpack_batch(damaged)
        except PeerFault:
            continue
        numbers = [each.reward for group in found.groups for each in group.trajectories]
        numbers += [
            part.value
            for group in found.groups
            for each in group.trajectories
            for part in each.reward_parts
        ]
        assert any(map(math.isnan, numbers)) or unpack_batch(pack_batch(found)) == found


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.text(max_size=9) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(names, inner, max_size=3),
    max_leaves=40,
)  # fmt: skip


@given(batch=batches, data=st.data())
def test_any_structure_in_the_place_of_another_is_refused(
    batch: BatchBody, data: st.DataObject
) -> None:
    """A field of the right kind elsewhere in a batch is replaced by anything."""
    head, *_ = pack_batch(batch)
    tree = msgpack.unpackb(pack_batch(batch)[1:])
    place = tree
    while nested := [n for n, each in enumerate(place) if isinstance(each, list) and each]:
        if data.draw(st.booleans()):
            break
        place = place[data.draw(st.sampled_from(nested))]
    place[data.draw(st.integers(0, len(place) - 1))] = data.draw(values)
    try:
        found = unpack_batch(bytes([head]) + msgpack.packb(tree))
    except PeerFault:
        return
    assert isinstance(found, BatchBody)
    assert pack_batch(found)


@pytest.mark.parametrize("head", range(256))
def test_records_of_another_format_are_refused_by_name(head: int) -> None:
    data = pack_batch(BatchBody.of(1, ()))
    if head == data[0]:
        return
    with pytest.raises(PeerFault, match="no batch of format"):
        unpack_batch(bytes([head]) + data[1:])
