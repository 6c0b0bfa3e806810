"""Learners that go back to an older step; every record is in a real SQLite file, opened again after each crash."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.ids import Digest
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.coordinator.state import CoordinatorState
from echo2d.store.ledger import Ledger
from tests.support.coordinator_world import World, rules, train, version_key

STEPS = 6


class DurableWorld(World):
    """A world whose coordinator recovers from disk; the ledger in memory must agree with it."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self._path = path
        self.disk = Ledger.open(path)
        super().__init__(rules(**changes))
        self.connect("seed", kind="seed", slots=0)
        self.connect("a")

    def _boot(self) -> CoordinatorState:
        self.disk.close()
        self.disk = Ledger.open(self._path)
        recovered = self.disk.recover()
        assert repr(recovered) == repr(
            self.ledger.recover()
        )  # a reward that is NaN is not equal to itself
        self._boots += 1
        return CoordinatorState(
            self.rules, recovered, plan_secret=self._boots.to_bytes(32, "big"), now=self.now
        )

    def _persist(self, record: CoordinatorRecord) -> None:
        super()._persist(record)
        self.disk.append([record])

    def batch(self, step: int) -> Digest:
        request = self.ask_batch(step)
        self.work()
        digest = self.replies[request].digest
        assert digest is not None
        return digest


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DurableWorld]:
    made = DurableWorld(tmp_path / "ledger.sqlite")
    train(made, STEPS)
    made.work()
    yield made
    made.disk.close()


@pytest.mark.parametrize(
    "killed", ["never", "before", "after the session", "after the publish", "in the replay"]
)
@pytest.mark.parametrize("step", [0, 3, STEPS])
def test_the_same_batches_are_trained_again_whenever_the_coordinator_dies(
    world: DurableWorld, step: int, killed: str
) -> None:
    before = {each: frozen.digest for each, frozen in world.ledger.frozen.items()}
    trained = dict(world.step_of)

    def moment(name: str) -> None:
        if killed == name:
            world.crash()

    moment("before")
    assert world.open_session(step).status == 200
    moment("after the session")
    assert world.publish(step, salt=1).status == 200
    moment("after the publish")
    for each in range(step + 1, STEPS + 1):
        assert world.batch(each) == before[each]
        assert world.commit(each, before[each]).status == 200
        assert world.publish(each, salt=1).status == 200
        moment("in the replay")
    digest = world.batch(STEPS + 1)  # and then it goes on
    assert world.commit(STEPS + 1, digest).status == 200
    assert trained.items() <= world.step_of.items()
    assert world.peers["a"].serving in (version_key(STEPS, 1), version_key(STEPS + 1, 1))


@pytest.mark.parametrize("crash", [False, True])
def test_a_revoked_version_stays_revoked(world: DurableWorld, *, crash: bool) -> None:
    world.open_session(3)
    if crash:
        world.crash()
    world.publish(3)
    revoked = {version_key(version) for version in range(4, STEPS + 1)}
    frozen = {group for batch in world.ledger.frozen.values() for group in batch.groups}
    assert world.ledger.revoked == revoked
    assert not any(
        stored.record.uses(revoked)
        for number, stored in world.ledger.groups.items()
        if number not in frozen
    )
    published = {(each.version, each.publish_seq) for each in world.disk.recover().published}
    assert published == {(0, 1), (1, 2), (2, 3), (3, 4), (3, STEPS + 2)}
    world.work()
    assert world.peers["a"].serving == version_key(3)
    digest = world.batch(4)
    world.commit(4, digest)
    world.publish(4)  # the same bytes as in the epoch before: it is published once more
    world.work()
    assert world.peers["a"].serving == version_key(4)
    assert version_key(4) not in world.ledger.revoked


@pytest.mark.parametrize("crash", [False, True])
def test_a_learner_may_go_back_to_the_last_durable_checkpoint(
    world: DurableWorld, *, crash: bool
) -> None:
    world.checkpoint(2)
    if crash:
        world.crash()
    lowest, highest = world.open_session(1).body, world.open_session(STEPS + 9).body
    assert isinstance(lowest, dict)
    assert isinstance(highest, dict)
    assert (lowest["lowest"], highest["highest"]) == (2, STEPS)
    assert world.ledger.epoch == 1
    for step in (2, STEPS, 2):
        assert world.open_session(step).status == 200
        assert world.publish(step).status == 200


def test_a_refusal_in_a_replay_changes_that_batch_alone(world: DurableWorld) -> None:
    before = {each: frozen.digest for each, frozen in world.ledger.frozen.items()}
    world.open_session(2)
    world.publish(2)
    assert world.refuse(3, world.ledger.frozen[3].groups[0]).body == {"replaced": 1}
    world.crash()
    replaced = world.batch(3)
    assert replaced != before[3]
    world.commit(3, replaced)
    assert [world.batch(each) for each in (4, 5)] == [before[4], before[5]]
