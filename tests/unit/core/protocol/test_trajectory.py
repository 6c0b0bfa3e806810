"""The stored form of groups and batches."""

import pytest

from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    BatchBody,
    GivenTokens,
    GroupRecord,
    TrajectoryRecord,
    batch_digest,
    join_batch,
    pack_batch,
    pack_group,
    pack_logprobs,
    pack_tokens,
    unpack_batch,
)
from echo2d.errors import PeerFault

DIGEST = Digest(b"d" * 32)


def trajectory(sample: int, *versions: int) -> TrajectoryRecord:
    spans = tuple(
        AuthoredSpan(i, i + 1, Version(version), DIGEST, PeerId("w"))
        for i, version in enumerate(versions)
    )
    count = len(versions)
    return TrajectoryRecord(
        sample, pack_tokens(range(count)), pack_logprobs([-0.5] * count), spans, "stop", 1.0
    )


GROUP = GroupRecord(GroupId(4), pack_tokens([1, 2]), (trajectory(0, 3, 3, 5), trajectory(1, 2, 4)))


def test_a_group_knows_its_oldest_and_newest_version() -> None:
    assert [t.version_min for t in GROUP.trajectories] == [3, 2]
    assert (GROUP.version_min, GROUP.version_max) == (2, 5)


def test_given_tokens_do_not_count_as_written() -> None:
    given = (GivenTokens(2, 5), GivenTokens(6, 8))
    record = TrajectoryRecord(0, pack_tokens(range(9)), b"", (), "stop", given=given)
    assert record.written == 4
    assert [record.written_before(at) for at in (0, 2, 5, 6, 8, 9)] == [0, 2, 2, 3, 3, 4]


def test_batches_round_trip() -> None:
    batch = BatchBody.of(9, (GROUP, GROUP))
    assert unpack_batch(pack_batch(batch)) == batch


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_packed_groups_join_to_the_same_bytes(count: int) -> None:
    small = GroupRecord(GroupId(1), b"", ())
    groups = (GROUP, *[small] * (count - 1))
    count = sum(len(group.trajectories) for group in groups)
    assert join_batch(300, count, list(map(pack_group, groups))) == pack_batch(
        BatchBody.of(300, groups)
    )


def test_the_digest_of_a_batch_is_that_of_its_bytes() -> None:
    body = pack_batch(BatchBody.of(9, (GROUP,)))
    assert batch_digest(body) == batch_digest(pack_batch(BatchBody.of(9, (GROUP,))))
    assert batch_digest(body) != batch_digest(pack_batch(BatchBody.of(10, (GROUP,))))


def test_truncated_bytes_are_a_peer_fault() -> None:
    with pytest.raises(PeerFault):
        unpack_batch(pack_batch(BatchBody.of(9, (GROUP,)))[:-1])
