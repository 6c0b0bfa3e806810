"""The place of each sample of a group."""

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.trajectory import TrajectoryRecord, pack_tokens
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.leases import Lease, LeaseTable
from echo2d.core.work.training.group_table import GroupTable, OpenGroup
from echo2d.core.work.training.prompts import DrawnPrompt
from tests.support.coordinator_world import version_key

ONE, TWO = PeerId("one"), PeerId("two")


class Book:
    """A table with one group of three samples."""

    def __init__(self) -> None:
        self.leases = LeaseTable(1, silence_s=15.0)
        self.table = GroupTable(lambda task: 3, self.leases)
        self.group = OpenGroup(
            GroupId(4),
            DrawnPrompt(2, pack_tokens([1])),
            TaskRules(
                max_new_tokens=1024,
            ),
            {0, 1, 2},
        )
        self.table.add(self.group)
        self.table.check()

    def grant(self, worker: PeerId, *samples: int) -> Lease:
        lease = self.table.grant(self.group, worker, version_key(0), samples, now=0.0)
        self.table.check()
        return lease

    def end(self, lease: Lease) -> OpenGroup:
        self.leases.end(lease)
        group = self.table.ended(lease)
        self.table.check()
        return group

    def keep(self, sample: int) -> Lease | None:
        ended = self.table.keep(self.group, TrajectoryRecord(sample, b"", b"", (), "stop"))
        self.table.check()
        return ended


def test_a_sample_moves_from_waiting_over_a_lease_to_kept() -> None:
    book = Book()
    lease = book.grant(ONE, 0, 1)
    assert book.group.waiting == {2}
    assert book.keep(0) is None
    assert book.keep(1) is lease
    assert [record.sample for record in book.group.unscored()] == [0, 1]
    assert book.group.stored().cursor == 2


def test_any_worker_may_attempt_the_samples_of_an_ended_lease() -> None:
    book = Book()
    first = book.grant(ONE, 0, 1, 2)
    book.keep(1)
    assert book.end(first) is book.group
    again = book.grant(TWO, 0, 2)
    assert (again.key.lease, again.key.attempt) == (first.key.lease, 1)
    for key, worker in ((first.key, ONE), (again.key, TWO)):
        assert book.table.owner(worker, key, 0) is book.group
    assert book.table.owner(ONE, again.key, 0) is None
    assert book.table.owner(TWO, again.key, 1) is None


def test_a_lease_ends_when_late_results_of_all_its_samples_arrive() -> None:
    book = Book()
    first = book.grant(ONE, 0, 1, 2)
    book.end(first)
    second = book.grant(TWO, 0, 1, 2)
    assert [book.keep(sample) for sample in range(3)] == [None, None, second]
    assert len(book.leases) == 0


def test_a_useless_result_returns_its_sample_once() -> None:
    book = Book()
    lease = book.grant(ONE, 0, 1, 2)
    book.table.put_back(book.group, lease.key, 1)
    book.table.check()
    assert book.group.waiting == {1}
    other = book.grant(TWO, 1)
    assert other.key.lease != lease.key.lease  # the first one still runs
    book.table.put_back(book.group, lease.key, 1)  # it is the other one's now
    book.table.check()
    assert book.group.waiting == set()


def test_a_removed_group_ends_its_leases() -> None:
    book = Book()
    lease = book.grant(ONE, 0)
    assert book.table.remove(book.group) == [lease]
    assert book.table.owner(ONE, lease.key, 0) is None
    assert len(book.table) == 0
