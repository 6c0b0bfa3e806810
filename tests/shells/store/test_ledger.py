import asyncio
import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.core.audit.events import LimitsLearnt
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Epoch, GroupId, LeaseId, PeerId, PublishSeq, Version
from echo2d.core.broadcast.events import FormChosen, RatesMeasured
from echo2d.core.cluster.earned import EarnedKept, WorkerEarned
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.coordinator.events import (
    CheckpointKept,
    CoordinatorRecord,
    EpochOpened,
    Recovered,
)
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.protocol.trajectory import (
    Attachment,
    AuthoredSpan,
    GivenTokens,
    Partial,
    Source,
    TrajectoryRecord,
    pack_tokens,
)
from echo2d.core.topology.uplink_rates import PeerRate
from echo2d.core.work.events import (
    AcceptedResult,
    BatchCommitted,
    BatchFrozen,
    EpisodeForgotten,
    GroupDropped,
    LeaseGiven,
    PromptGivenBack,
    PromptTaken,
    RecoveredTurn,
    RowJudged,
    SampleKept,
    SampleLeftOut,
    SampleRewarded,
    TurnAnswered,
    TurnKept,
)
from echo2d.errors import OperatorFault, StoreFault
from echo2d.runtime.run_dir import ledger_thread
from echo2d.runtime.run_dir.ledger_thread import LedgerThread
from echo2d.store.ledger import TRIM_GROUPS_MAX, Ledger, read_earned
from tests.support.column_engine import columns_of
from tests.support.ledger_rows import change_rows

TABLES = ("groups", "samples", "batches")
A, B = Digest(b"a" * 32), Digest(b"b" * 32)


def group(number: int, cursor: int | None = None) -> PromptTaken:
    return PromptTaken(GroupId(number), number if cursor is None else cursor, pack_tokens([number]))


def sample(
    number: int, index: int, *, tokens: bytes = b"\1\0\0\0", fingerprint: bytes = b""
) -> SampleKept:
    kept = TrajectoryRecord(
        index,
        tokens,
        bytes(len(tokens)),
        (AuthoredSpan(0, 1, Version(3), A, PeerId("w" * 32)),),
        "stop",
    )
    return SampleKept(GroupId(number), LeaseId(0), 0, kept, fingerprint)


def published(seq: int, version: int, digest: Digest, epoch: int = 1) -> VersionPublished:
    return VersionPublished(
        PublishSeq(seq), Epoch(epoch), Version(version), digest, f"versions/{seq}", 10
    )


def reopened(path: Path, *records: CoordinatorRecord) -> Recovered:
    with Ledger.open(path) as ledger:
        ledger.append(records)
    with Ledger.open(path) as ledger:
        return ledger.recover()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_an_empty_ledger_recovers_as_an_empty_run(path: Path) -> None:
    assert reopened(path) == Recovered.nothing()


def test_no_other_user_reads_the_ledgers_files(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append([EpochOpened(Epoch(1), 0)])
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    assert {file.name[len(path.name) :] for file in files} >= {"", "-wal", ".lock"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    ledger.close()


def test_groups_are_recovered_whole_with_unscored_rewards_as_nan(path: Path) -> None:
    found = reopened(
        path, group(4, 9), sample(4, 1), sample(4, 0), SampleRewarded(GroupId(4), 0, 0.1)
    )
    (stored,) = found.groups
    assert (stored.cursor, stored.record.prompt) == (9, pack_tokens([4]))
    assert [kept.sample for kept in stored.record.trajectories] == [0, 1]
    assert stored.record.trajectories[0].reward == 0.1
    assert math.isnan(stored.record.trajectories[1].reward)
    assert stored.record.trajectories[0].spans == (
        AuthoredSpan(0, 1, Version(3), A, PeerId("w" * 32)),
    )
    assert (found.next_cursor(""), found.next_group) == (10, 5)


def test_leases_are_recovered_in_the_order_of_their_grants(path: Path) -> None:
    base = Partial(b"\5\0\0\0", b"\0\0\0\0", (AuthoredSpan(0, 1, Version(3), A, PeerId("w" * 32)),))
    first = LeaseGiven(
        GroupId(4), LeaseId((1 << 63) - 1), 0, PeerId("w"), (1, 0), VersionKey(Version(3), A)
    )
    second = LeaseGiven(
        GroupId(5), LeaseId(2), 7, PeerId("v"), (1,), VersionKey(Version(4), B), base
    )
    found = reopened(path, group(4), group(5), first, second, replace(first, attempt=1))
    assert found.given == (first, second, replace(first, attempt=1))
    found = reopened(path, sample(5, 1, fingerprint=b"f"), GroupDropped(GroupId(4), "aged out"))
    assert found.given == (second,)
    assert found.answered == (AcceptedResult(HeldLease(LeaseId(0), 0), 1, b"f"),)


def turn(number: int, given: int = 0) -> TurnKept:
    """Turn `number` of sample 1 of group 4: one token, behind each answer of the environment another one."""
    spans = tuple(
        AuthoredSpan(2 * at, 2 * at + 1, Version(3), A, PeerId("w" * 32)) for at in range(number)
    )
    ranges = tuple(GivenTokens(2 * at + 1, 2 * at + 2) for at in range(number - 1))
    tokens = b"\5\0\0\0" * (2 * number - 1)
    partial = Partial(tokens, bytes(len(tokens)), spans, ranges)
    return TurnKept(GroupId(4), 1, number, LeaseId(number), 0, partial, "stop", b"f%d" % number)


def test_the_last_turn_of_an_episode_is_recovered_until_the_episode_ends(path: Path) -> None:
    one, two = turn(1), turn(2)
    answered = TurnAnswered(GroupId(4), 1, 1, b"\6\0\0\0", b"state 1")
    assert reopened(path, group(4), one).turns == (RecoveredTurn(one, None, None),)
    assert reopened(path, answered).turns == (RecoveredTurn(one, answered, None),)
    found = reopened(path, two)
    assert found.turns == (RecoveredTurn(two, None, b"state 1"),)
    known = [AcceptedResult(HeldLease(each.lease, 0), 1, each.fingerprint) for each in (one, two)]
    assert list(found.answered) == known
    kept = TrajectoryRecord(
        1, two.partial.tokens, two.partial.logprobs, two.partial.spans, "stop", given=two.partial.given, turns=2
    )  # fmt: skip
    ended = reopened(path, SampleKept(GroupId(4), two.lease, 0, kept, two.fingerprint))
    assert ended.turns == ()
    (stored,) = ended.groups
    assert stored.record.trajectories[0].given == two.partial.given
    assert ended.answered[0] == known[0]


def test_a_forgotten_episode_begins_with_its_first_turn(path: Path) -> None:
    one = turn(1)
    assert reopened(path, group(4), one, EpisodeForgotten(GroupId(4), 1)).turns == ()
    again = replace(one, lease=LeaseId(9))
    assert reopened(path, again).turns == (RecoveredTurn(again, None, None),)
    assert reopened(path, SampleLeftOut(GroupId(4), 1)).turns == ()


def test_a_sample_that_was_never_kept_can_be_left_out(path: Path) -> None:
    found = reopened(path, group(4), sample(4, 0), SampleLeftOut(GroupId(4), 1))
    (stored,) = found.groups
    assert ([kept.sample for kept in stored.record.trajectories], stored.record.left_out) == (
        [0],
        (1,),
    )


def test_counters_survive_the_groups_they_counted(path: Path) -> None:
    found = reopened(path, group(4), sample(4, 0), GroupDropped(GroupId(4), "aged out"))
    assert found.groups == ()
    assert (found.next_cursor(""), found.next_group) == (5, 5)


def test_a_prompt_given_back_is_known_until_it_is_taken_again(path: Path) -> None:
    back = GroupDropped(GroupId(4), "stale", again=True)
    found = reopened(path, group(4, 9), group(5, 7), back, GroupDropped(GroupId(5), "filtered"))
    assert found.given_back == (PromptGivenBack("", 9),)
    assert reopened(path, group(6, 9)).given_back == ()


def test_knowledge_about_rows_is_recovered_in_the_order_of_the_judgements(path: Path) -> None:
    a, b = (RowJudged(Source("t", row), 1, 1, 0.0, Version(3)) for row in "ab")
    again = RowJudged(Source("t", "a"), 2, 0, 1 / 3, Version(4))
    assert reopened(path, a, b, again).rows == (b, again)
    assert reopened(path, replace(b, groups=0)).rows == (again,)


def test_a_revoked_version_is_left_out_until_it_is_published_again(path: Path) -> None:
    found = reopened(
        path, published(1, 0, A), published(2, 1, B), VersionRevoked(Epoch(2), Version(1), B)
    )
    assert found.published == (published(1, 0, A),)
    assert found.publish_seq == 2
    found = reopened(path, published(3, 1, B, epoch=2))
    assert found.published == (published(1, 0, A), published(3, 1, B, epoch=2))


def test_a_refrozen_batch_replaces_the_first_and_the_newest_commit_wins(path: Path) -> None:
    first, second = (
        BatchFrozen(1, A, (GroupId(1), GroupId(2)), 0),
        BatchFrozen(1, B, (GroupId(1), GroupId(3)), 1),
    )
    commits = [BatchCommitted(1, Epoch(2), B, 0.5), BatchCommitted(1, Epoch(1), A, 0.25)]
    found = reopened(path, first, second, *commits)
    assert found.frozen == (second,)
    assert found.committed == (commits[0],)


def test_the_newest_rate_of_a_peer_counts_and_comes_last(path: Path) -> None:
    a, b, faster = (
        PeerRate(PeerId(name), rate, held_up=rate > 1)
        for name, rate in (("a", 1.0), ("b", 2.0), ("a", 3.0))
    )
    assert reopened(path, RatesMeasured((a, b))).rates == (a, b)
    assert reopened(path, RatesMeasured((faster,))).rates == (b, faster)


def test_earnings_of_workers_can_be_read_while_the_ledger_is_open(path: Path) -> None:
    assert read_earned(path.with_name("none")) == ()
    a, b, more = (WorkerEarned(PeerId(name), n, n, n) for name, n in (("a", 1), ("b", 2), ("a", 3)))
    assert reopened(path, EarnedKept((a, b))).earned == (a, b)
    assert reopened(path, EarnedKept((more,))).earned == (b, more)
    with Ledger.open(path):
        assert read_earned(path) == (b, more)
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE earned SET trained = 9 WHERE worker = 'a'")
        database.commit()
    with pytest.raises(OperatorFault, match="row worker='a' of earned"):
        read_earned(path)
    assert reopened(path).earned == (b,)


def test_the_limits_of_an_audit_are_recovered_by_engine_class(path: Path) -> None:
    first, other = (
        LimitsLearnt("torch", 0.1, 0.002, 1, 0.05),
        LimitsLearnt("sglang", 0.2, 0.003, 0, 0.1),
    )
    assert reopened(path, first, other).limits == (other, first)
    newer = LimitsLearnt("torch", 0.3, 0.001, 2, 0.2)
    assert reopened(path, newer).limits == (other, newer)


@pytest.mark.parametrize("column", ["k", "misses", "tolerance"])
def test_impossible_limits_of_an_audit_are_refused(path: Path, column: str) -> None:
    reopened(path, LimitsLearnt("torch", 0.1, 0.002, 1, 0.05))
    change_rows(path, f"UPDATE limits SET {column} = 7")
    with Ledger.open(path) as ledger, pytest.raises(OperatorFault, match="expected limits"):
        ledger.recover()


def test_the_last_chosen_form_counts(path: Path) -> None:
    delta, full = FormChosen(PublishSeq(2), A, 65536), FormChosen(PublishSeq(2), None, 262144)
    assert reopened(path, published(1, 0, A), published(2, 1, B), delta).form == delta
    assert reopened(path, full).form == full


def test_a_checkpoint_deletes_what_it_covers(path: Path) -> None:
    batches = [BatchFrozen(step, A, (GroupId(step),), 0) for step in (1, 2)]
    commits = [BatchCommitted(step, Epoch(1), A, 0.5) for step in (1, 2)]
    opened = EpochOpened(Epoch(1), 0)
    found = reopened(path, opened, group(1), sample(1, 0), group(2), group(3), *batches, *commits)
    assert [stored.record.group for stored in found.groups] == [1, 2, 3]
    found = reopened(path, CheckpointKept(1, Epoch(1)))
    assert [stored.record.group for stored in found.groups] == [2, 3]
    assert (found.frozen, found.committed, found.checkpoint) == ((batches[1],), (commits[1],), 1)
    assert (found.epoch, found.resume_step) == (1, 0)


def test_groups_that_a_checkpoint_covers_are_deleted_a_few_at_a_time(path: Path) -> None:
    groups = range(2 * TRIM_GROUPS_MAX + 1)
    with Ledger.open(path) as ledger:
        ledger.append(
            [record for number in groups for record in (group(number), sample(number, 0))]
        )
        ledger.append(
            [BatchFrozen(1, A, tuple(map(GroupId, groups[1:])), 0), CheckpointKept(1, Epoch(1))]
        )
        assert [ledger.trim() for _ in range(4)] == [True, True, False, False]
        assert [
            ledger._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES
        ] == [1, 1, 0]
        assert [stored.record.group for stored in ledger.recover().groups] == [0]


def test_a_restart_does_not_recover_groups_that_were_still_to_be_deleted(path: Path) -> None:
    groups = range(3 * TRIM_GROUPS_MAX)
    frozen = BatchFrozen(1, A, tuple(map(GroupId, groups)), 0)
    found = reopened(path, *map(group, groups), frozen, CheckpointKept(1, Epoch(1)))
    assert (found.groups, found.frozen, found.checkpoint) == ((), (), 1)


async def test_the_write_ahead_log_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_thread, "WAL_PAGES_MAX", 64)
    thread, log = LedgerThread(path), path.with_name(path.name + "-wal")
    await thread.open()
    for number in range(200):  # 4 MB
        await thread.append([group(number), sample(number, 0, tokens=bytes(20_000))])
        if number % 20 == 0:  # 0.4 MB; `keep_small` does so by the clock
            await thread.make_small()
    size = (await asyncio.to_thread(log.stat)).st_size
    await thread.close()
    assert size < 2_000_000
    again = LedgerThread(path)
    assert len((await again.open()).groups) == 200
    await again.close()


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.append([group(1)])
        with pytest.raises(StoreFault, match="UNIQUE"):
            ledger.append([group(2), group(1)])
        ledger.append([group(3)])
        assert [stored.record.group for stored in ledger.recover().groups] == [1, 3]


def test_a_full_disk_is_reported_and_nothing_is_half_written(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.append([group(1)])
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreFault, match="full"):
            ledger.append([group(2), sample(2, 0, tokens=bytes(1 << 16))])
        assert [stored.record.group for stored in ledger.recover().groups] == [1]


def test_a_second_coordinator_is_refused(path: Path) -> None:
    with Ledger.open(path), pytest.raises(OperatorFault, match="in use"):
        Ledger.open(path)


def test_a_file_that_is_no_ledger_is_refused(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(OperatorFault, match="cannot open ledger"):
        Ledger.open(path)


def test_a_ledger_of_another_format_is_refused(path: Path) -> None:
    Ledger.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(OperatorFault, match="format 99"):
        Ledger.open(path)


CONTENT = b"a picture"
PICTURE = Attachment("picture", digest_of(CONTENT), len(CONTENT))


def with_picture(number: int) -> PromptTaken:
    return replace(group(number), source=Source("math", "r", (PICTURE,)))


def contents(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM attachments").fetchone()
        return int(count)


def test_columns_and_attachments_are_recovered(path: Path) -> None:
    source = Source("math", "r", (PICTURE,))
    kept = sample(4, 0, tokens=pack_tokens([7]))
    kept = replace(
        kept, trajectory=replace(kept.trajectory, columns=columns_of([7]), source=source)
    )
    with Ledger.open(path) as ledger:
        ledger.attach([CONTENT])
        ledger.append([with_picture(4), kept])
    (stored,) = reopened(path).groups
    assert stored.source == source
    assert stored.record.trajectories == (kept.trajectory,)
    with Ledger.open(path) as ledger:
        ledger.recover()
        assert ledger.attachment(PICTURE.digest) == CONTENT
        assert ledger.attachment(A) is None


def test_an_attachment_is_kept_as_long_as_a_record_names_it(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for number in (1, 2):
            ledger.attach([CONTENT])
            ledger.append([with_picture(number)])
        assert contents(path) == 1, "it is kept once"
        ledger.append([GroupDropped(GroupId(1), "stale")])
        assert ledger.attachment(PICTURE.digest) == CONTENT
        ledger.append([GroupDropped(GroupId(2), "stale")])
        assert ledger.attachment(PICTURE.digest) is None


def test_an_attachment_is_kept_for_a_prompt_without_a_group(path: Path) -> None:
    """One that is drawn, or whose group was dropped for no fault of the prompt."""
    with Ledger.open(path) as ledger:
        ledger.attach([CONTENT])
        ledger.append([with_picture(1)])
        ledger.attach([CONTENT])
        ledger.append([GroupDropped(GroupId(1), "stale")])
        assert ledger.attachment(PICTURE.digest) == CONTENT
        ledger.append([with_picture(2)])
        ledger.append([GroupDropped(GroupId(2), "stale", again=True)])
        assert ledger.attachment(PICTURE.digest) == CONTENT
        ledger.append([with_picture(3), GroupDropped(GroupId(3), "stale")])
        assert ledger.attachment(PICTURE.digest) is None
        ledger.attach([CONTENT])
    # After a restart it is drawn again.
    assert contents(path) == 1
    reopened(path)
    assert contents(path) == 0


def test_attachments_are_deleted_with_the_groups_of_a_checkpoint(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.attach([CONTENT])
        ledger.append([
            with_picture(1), BatchFrozen(1, A, (GroupId(1),), 0), CheckpointKept(1, Epoch(1)),
        ])  # fmt: skip
        assert ledger.attachment(PICTURE.digest) == CONTENT
        while ledger.trim():
            pass
        assert ledger.attachment(PICTURE.digest) is None


def test_a_record_names_only_attachments_that_are_kept(path: Path) -> None:
    with Ledger.open(path) as ledger, pytest.raises(StoreFault, match="FOREIGN KEY"):
        ledger.append([with_picture(1)])


def test_columns_that_do_not_fit_their_tokens_count_as_damage(path: Path) -> None:
    kept = sample(4, 0)
    kept = replace(kept, trajectory=replace(kept.trajectory, columns=columns_of([7, 8])))
    with pytest.raises(OperatorFault, match="column experts: expected 12 bytes for 1 tokens"):
        reopened(path, group(4), kept)
