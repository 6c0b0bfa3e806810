"""Publishes: what an epoch may publish, what is revoked, which copies are deleted."""

import pytest

from echo2d.core.base.ids import Epoch, PublishSeq, RequestId, Version
from echo2d.core.cluster.events import DeleteVersion, Note, PublishAsked, SyncVersion
from echo2d.core.cluster.versions import PUBLISHED_VERSIONS_MAX, PublishedVersions, PublishRefusal
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
def test_a_publish_is_judged_by_its_epoch_order_and_digest(
    ask: PublishAsked, error: str | None
) -> None:
    versions = published(asked(0), asked(2))
    verdict = versions.judge(ask, resume_step=0, committed=3)
    assert (verdict.error if isinstance(verdict, PublishRefusal) else verdict) == error


def test_a_repeated_publish_gets_the_earlier_answer() -> None:
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


def test_other_bytes_under_the_same_number_revoke_the_earlier_version() -> None:
    versions = published(asked(0), asked(2))
    replacing = asked(2, epoch=2, salt=1)
    assert versions.replaced_by(replacing) == [version_key(2)]
    versions.revoke(versions.replaced_by(replacing))
    versions.publish(replacing)
    versions.check()
    assert versions.live(version_key(2)) is None
    assert versions.live(version_key(2, 1)) == versions.newest


def test_a_session_that_resumes_lower_revokes_higher_versions() -> None:
    versions = published(asked(0), asked(1), asked(2))
    assert versions.above(1, before=Epoch(2)) == [version_key(2)]
    assert versions.above(1, before=Epoch(1)) == []


def test_a_version_older_than_a_revoked_publish_is_not_current() -> None:
    versions = published(asked(0), asked(1))
    assert versions.current == versions.newest
    versions.revoke([version_key(1)])
    assert versions.newest is not None
    assert versions.current is None
    assert PublishedVersions([versions.newest], PublishSeq(2)).current is None


def test_all_copies_are_deleted_except_the_newest_and_the_needed_ones() -> None:
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


def test_a_kept_result_is_synced_once() -> None:
    versions = published(*(asked(version) for version in range(1, 5)))
    versions.scored = frozenset({version_key(2)})
    kept = [asked(version).path for version in range(1, 5)]
    assert versions.surplus(kept, bases=0, bytes_max=1 << 40) == [
        SyncVersion(asked(2).path, asked(2).digest)
    ]
    versions.scored = frozenset({version_key(2), version_key(3)})
    assert versions.surplus(kept, bases=0, bytes_max=1 << 40) == [
        SyncVersion(asked(3).path, asked(3).digest)
    ]
    versions.scored = frozenset({version_key(3)})
    assert versions.surplus(kept, bases=0, bytes_max=1 << 40) == []


def keeping(*asks: PublishAsked, keep_every: int) -> PublishedVersions:
    versions = PublishedVersions((), PublishSeq(0), keep_every=keep_every)
    for ask in asks:
        versions.publish(ask)
        versions.surplus([], bases=0, bytes_max=1 << 40)
        versions.check()
    return versions


def there(versions: PublishedVersions) -> list[int]:
    return [record.version for record in reversed(versions.copies())]


def test_the_first_version_of_every_span_is_kept() -> None:
    # Published every 3 steps: none is a multiple of 10.
    versions = keeping(*(asked(version) for version in range(0, 50, 3)), keep_every=10)
    assert there(versions) == [12, 21, 30, 42, 48]
    # The best one stays too, in the place of the one that was the best before.
    versions.scored = frozenset({version_key(48)})
    versions.publish(asked(49))
    versions.surplus([], bases=0, bytes_max=1 << 40)
    assert there(versions) == [12, 21, 30, 42, 48, 49]
    versions.scored = frozenset({version_key(49)})
    versions.surplus([], bases=0, bytes_max=1 << 40)
    assert there(versions) == [12, 21, 30, 42, 49]


def test_kept_results_are_deleted_and_reported_if_the_disk_has_no_room() -> None:
    versions = keeping(*(asked(version) for version in range(1, 9)), keep_every=2)
    assert there(versions) == [2, 4, 6, 8]
    size = asked(0).full_bytes
    # Three of its size for the newest version, the next one and its upload.
    told = versions.surplus([], bases=0, bytes_max=4 * size)
    assert told == [
        DeleteVersion(asked(2).path),
        DeleteVersion(asked(4).path),
        Note("kept", "version 2 is deleted: run.disk_bytes_max has no room for its copy"),
        Note("kept", "version 4 is deleted: run.disk_bytes_max has no room for its copy"),
    ]
    versions.check()
    # No later version of a span takes the place of the one that went.
    versions = keeping(*(asked(version) for version in (1, 2, 4)), keep_every=2)
    versions.surplus([], bases=0, bytes_max=0)
    versions.publish(asked(5))
    versions.publish(asked(6))
    versions.surplus([], bases=0, bytes_max=1 << 40)
    assert there(versions) == [4, 6]


def test_old_versions_are_forgotten_unless_they_have_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echo2d.core.cluster.versions.PUBLISHED_VERSIONS_MAX", 50)
    versions = keeping(*(asked(version) for version in range(90)), keep_every=1)
    versions.surplus([], bases=0, bytes_max=10 * asked(0).full_bytes)
    versions.check()
    assert len(there(versions)) == 8


def test_held_versions_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2d.core.cluster.versions.PUBLISHED_VERSIONS_MAX", 50)
    versions = published(*(asked(version) for version in range(3)))
    versions.held = (version_key(1),)
    for version in range(3, 90):
        versions.publish(asked(version))
        versions.surplus([], bases=0, bytes_max=0)
        versions.check()
    assert versions.live(version_key(1)) is not None
    assert versions.live(version_key(2)) is None
    versions.revoke([version_key(1)])
    assert list(versions.held) == []
    versions.check()


def test_a_version_is_found_by_its_number() -> None:
    versions = published(asked(1), asked(2), asked(2, epoch=2))
    assert versions.numbered(Version(2)) == version_key(2)
    assert versions.numbered(Version(3)) is None
    versions.revoke([version_key(2)])
    assert versions.numbered(Version(2)) is None
    versions.publish(asked(2, epoch=2, salt=1))
    assert versions.numbered(Version(2)) == version_key(2, 1)


def test_a_revoked_result_is_deleted_and_its_span_gets_another() -> None:
    versions = keeping(*(asked(version) for version in (0, 10, 20)), keep_every=10)
    versions.revoke([version_key(20)])
    versions.publish(asked(21, epoch=2))
    versions.publish(asked(22, epoch=2))
    versions.surplus([], bases=0, bytes_max=1 << 40)
    versions.check()
    assert there(versions) == [10, 21, 22]


def test_a_restart_finds_the_results_whose_copies_are_there() -> None:
    versions = PublishedVersions((), PublishSeq(0))
    records = [versions.publish(asked(version)) for version in range(PUBLISHED_VERSIONS_MAX + 30)]
    paths = {record.path for record in records if record.version not in {0, 20, 21, 30}}
    recovered = PublishedVersions(
        records, PublishSeq(len(records)), lost={r.path for r in records} - paths, keep_every=10
    )
    recovered.surplus([], bases=0, bytes_max=1 << 40)
    recovered.check()
    assert there(recovered)[:4] == [10, 22, 31, 40]
    assert recovered.newest == records[-1]
