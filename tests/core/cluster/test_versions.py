"""Publishes: what an epoch may publish, what is revoked, which copies go."""

import pytest

from echo2d.core.base.ids import Epoch, PublishSeq, RequestId, Version
from echo2d.core.cluster.events import DeleteVersion, PublishAsked
from echo2d.core.cluster.versions import RECOVERED_COPIES_MAX, PublishedVersions, PublishRefusal
from tests.support.coordinator_world import version_digest, version_key


def asked(version: int, *, epoch: int = 1, salt: int = 0) -> PublishAsked:
    path = f"v/{epoch}-{version}-{salt}"
    return PublishAsked(
        RequestId(1), Epoch(epoch), Version(version), version_digest(version, salt), path, 10
    )


def published(*asks: PublishAsked) -> PublishedVersions:
    versions = PublishedVersions((), PublishSeq(0))
    for ask in asks:
        versions.publish(ask)
        versions.check()
    return versions


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (asked(3), None),
        (asked(4), "order"),  # of a step that is not committed
        (asked(1), "order"),  # older than the newest of this epoch
        (asked(2, salt=9), "digest"),
        (asked(7, epoch=2), "order"),  # a session publishes its resume_step first
    ],
)
def test_judge(ask: PublishAsked, error: str | None) -> None:
    versions = published(asked(0), asked(2))
    verdict = versions.judge(ask, resume_step=0, committed=3)
    assert (verdict.error if isinstance(verdict, PublishRefusal) else verdict) == error


def test_the_same_again_is_the_earlier_answer() -> None:
    versions = published(asked(0), asked(2))
    record = versions.judge(asked(0), resume_step=0, committed=3)
    assert record == versions.live(version_key(0))


def test_a_newer_epoch_publishes_again() -> None:
    versions = published(asked(0), asked(2))
    assert versions.judge(asked(2, epoch=2), resume_step=2, committed=2) is None
    versions.publish(asked(2, epoch=2))
    newest = versions.newest
    assert newest is not None
    assert (newest.version, newest.epoch, newest.publish_seq) == (2, 2, 3)
    versions.check()


def test_other_bytes_under_the_same_number_revoke() -> None:
    versions = published(asked(0), asked(2))
    replacing = asked(2, epoch=2, salt=1)
    assert versions.replaced_by(replacing) == [version_key(2)]
    versions.revoke(versions.replaced_by(replacing))
    versions.publish(replacing)
    versions.check()
    assert versions.live(version_key(2)) is None
    assert versions.live(version_key(2, 1)) == versions.newest


def test_resuming_below_revokes_above() -> None:
    versions = published(asked(0), asked(1), asked(2))
    assert versions.above(1, before=Epoch(2)) == [version_key(2)]
    assert versions.above(1, before=Epoch(1)) == []


def test_what_is_older_than_a_revoked_publish_is_not_current() -> None:
    versions = published(asked(0), asked(1))
    assert versions.current == versions.newest
    versions.revoke([version_key(1)])
    assert versions.newest is not None
    assert versions.current is None
    assert PublishedVersions([versions.newest], PublishSeq(2)).current is None


def test_copies_go_but_the_newest_and_the_needed() -> None:
    versions = published(asked(0), asked(1), asked(2))
    assert versions.surplus([asked(0).path], bases=0, bytes_max=0) == [DeleteVersion(asked(1).path)]
    assert versions.surplus([], bases=0, bytes_max=0) == [DeleteVersion(asked(0).path)]
    assert versions.surplus([], bases=0, bytes_max=0) == []


def test_the_newest_copies_are_kept_as_bases_while_the_next_version_fits() -> None:
    versions = published(*(asked(version) for version in range(5)))
    size = asked(0).full_bytes
    assert versions.surplus([], bases=4, bytes_max=6 * size) == [DeleteVersion(asked(0).path)]
    assert [record.version for record in versions.copies()] == [4, 3, 2, 1]
    assert versions.surplus([], bases=4, bytes_max=5 * size) == [DeleteVersion(asked(1).path)]
    assert len(versions.surplus([], bases=4, bytes_max=0)) == 2, "all but the newest"
    assert [record.version for record in versions.copies()] == [4]


def test_a_restart_deletes_few_copies() -> None:
    versions = published()
    records = [versions.publish(asked(version)) for version in range(20)]
    recovered = PublishedVersions(records, PublishSeq(20))
    assert len(recovered.surplus([], bases=0, bytes_max=0)) == RECOVERED_COPIES_MAX - 1
    assert recovered.newest == records[-1]
