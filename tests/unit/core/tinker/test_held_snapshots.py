"""Which weights workers hold, and which make room for others."""

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.tinker import held_snapshots as module
from echo2d.core.tinker.draw_queue import BASE, DrawQueue
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.held_snapshots import (
    HELD_MAX,
    LOAD_S_MAX,
    SNAPSHOT_SWITCH_S,
    SPREAD_S_MAX,
    HeldSnapshots,
)
from tests.support.tinker_samplers import ObedientWorkers, sample, sampler


class Weights:
    """Held snapshots, and a queue of samples that are named after their folders."""

    def __init__(self) -> None:
        self.queue, self.prompts = DrawQueue(), DrawQueue()
        self.workers = ObedientWorkers()
        self.held = HeldSnapshots(self.queue, self.prompts, self.workers)
        self.versions = 0

    def ask(
        self,
        folder: str,
        name: str = "",
        caller: str = "ann",
        *,
        now: float = 0.0,
        whole: bool = False,
    ) -> None:
        of = sampler(folder, caller, whole=whole)
        self.queue.put(sample(of, name or folder, now=now))

    def publish(self, folder: str, *, now: float = 0.0) -> list[Version]:
        """Publish it as the next version. Returns the versions that stay beside it."""
        stay = self.held.make_room(folder)
        self.versions += 1
        self.held.published(folder, Version(self.versions), now=now)
        self.held.look(now=now)
        self.held.check()
        return stay

    def begin(self, name: str) -> None:
        begun = self.queue.take(FutureId(name))
        assert begun is not None
        self.held.begun(begun.sampler.folder)

    def hold(self, *folders: str, now: float = 0.0) -> None:
        """Publish these, from which nothing is drawn then."""
        for folder in folders:
            self.ask(folder)
            self.publish(folder, now=now)
            self.queue.take(FutureId(folder))


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_MAX", 1)


def test_several_snapshots_are_held_at_once_and_the_one_unused_for_longest_makes_room() -> None:
    weights = Weights()
    names = [f"f{number}" for number in range(HELD_MAX)]
    weights.hold(*names)
    weights.ask("f0")
    weights.begin("f0")
    weights.held.ended(Version(1))
    weights.ask("new")
    assert weights.held.wanted(now=0.0) == "new"
    assert weights.publish("new") == [1, 3, 4]
    assert [*weights.held.versions] == ["f0", "f2", "f3", "new"]


def test_what_is_drawn_or_waited_for_does_not_make_room_before_its_turn_is_over() -> None:
    weights = Weights()
    names = [f"f{number}" for number in range(HELD_MAX)]
    weights.hold(*names)
    for name in names:
        weights.ask(name)
    weights.begin("f0")
    weights.ask("new", now=1.0)
    at = 1.0 + SNAPSHOT_SWITCH_S
    assert weights.held.wanted(now=at - 0.1) is None
    assert [*weights.held.open_to(now=at - 0.1)] == names
    assert weights.held.wake_at(at - 0.1) == at
    # The one that was published first begins nothing more, and goes when nothing of it is under way.
    assert [*weights.held.open_to(now=at)] == names[1:]
    assert weights.held.wanted(now=at) is None
    weights.held.ended(Version(1))
    assert weights.held.wanted(now=at) == "new"
    assert weights.publish("new", now=at) == [2, 3, 4]


def test_whole_weights_are_held_alone() -> None:
    weights = Weights()
    weights.hold("f1", "f2")
    weights.ask("whole", whole=True)
    weights.ask("f1")
    weights.begin("f1")
    assert weights.held.wanted(now=SNAPSHOT_SWITCH_S) is None
    weights.held.ended(Version(1))
    assert weights.publish("whole") == []
    weights.queue.take(FutureId("whole"))
    weights.ask("f1")
    assert weights.held.wanted(now=0.0) == "f1"
    assert weights.publish("f1") == []
    assert weights.held.versions == {"f1": 4}


def test_a_snapshot_whose_version_no_worker_holds_any_more_is_published_again() -> None:
    weights = Weights()
    weights.hold("f1", "f2")
    weights.ask("f1")
    weights.begin("f1")
    weights.held.lost(Version(1))
    weights.held.ended(Version(1))
    weights.ask("f1")
    assert weights.held.wanted(now=0.0) == "f1"
    assert weights.publish("f1") == [2]


def test_the_next_version_waits_a_while_until_all_workers_have_the_one_before() -> None:
    weights = Weights()
    weights.hold("f1", now=10.0)
    weights.ask("f2", now=10.0)
    weights.workers.partly = {1}
    assert weights.held.wanted(now=11.0) is None
    assert weights.held.wake_at(11.0) == 10.0 + SPREAD_S_MAX
    weights.workers.partly = set()
    assert weights.held.wanted(now=11.0) == "f2"
    weights.workers.partly = {1}
    assert weights.held.wanted(now=10.0 + SPREAD_S_MAX) == "f2"


def test_nothing_is_drawn_or_published_before_a_version_that_is_on_its_way_has_come() -> None:
    weights = Weights()
    weights.workers.under_way = {1}
    weights.ask("whole", whole=True)
    weights.publish("whole")
    weights.ask("f2")
    for now in (100.0, 1000.0):
        assert weights.held.wanted(now=now) is None
        assert weights.held.open_to(now=now) == {}
    # It takes turns from when it has come.
    weights.workers.under_way = set()
    assert weights.held.open_to(now=1001.0) == {"whole": 1}
    assert weights.held.wanted(now=1002.0) is None
    assert weights.held.wanted(now=1001.0 + SNAPSHOT_SWITCH_S) == "f2"


def test_a_version_that_workers_cannot_load_makes_room_after_a_while() -> None:
    weights = Weights()
    weights.workers.late = {1}
    weights.ask("whole", whole=True)
    weights.publish("whole")
    weights.ask("f2")
    over = LOAD_S_MAX + SNAPSHOT_SWITCH_S
    assert weights.held.wanted(now=over - 1.0) is None
    assert weights.held.wanted(now=over) == "f2"


def test_a_version_that_no_worker_can_hold_any_more_is_forgotten() -> None:
    weights = Weights()
    weights.hold("f1", "f2")
    weights.workers.gone = {1}
    weights.ask("f1")
    assert weights.held.wanted(now=0.0) == "f1"
    assert weights.publish("f1") == [2]


def test_no_more_are_held_than_workers_have_room_for() -> None:
    weights = Weights()
    weights.workers.room = 2
    weights.hold("f1", "f2")
    weights.ask("f3")
    assert weights.publish("f3") == [2]


def test_a_caller_that_cancels_amid_its_turn_has_had_it() -> None:
    weights = Weights()
    weights.ask("f1", now=0.0)
    weights.ask("f2", caller="bob", now=1.0)
    assert weights.held.wanted(now=2.0) == "f1"
    weights.held.make_room("f1")
    weights.queue.take(FutureId("f1"))
    weights.ask("f3", now=0.0)
    assert weights.held.wanted(now=2.0) == "f2"


@pytest.mark.usefixtures("one_at_a_time")
def test_the_only_snapshot_stays_while_something_is_drawn_from_it() -> None:
    weights = Weights()
    weights.hold("f1")
    weights.ask("f1")
    weights.ask(BASE, "b")
    weights.begin("f1")
    assert weights.held.wanted(now=100.0) is None
    weights.held.ended(Version(1))
    assert weights.held.wanted(now=1.0) == BASE


@pytest.mark.usefixtures("one_at_a_time")
def test_of_several_snapshots_the_one_that_was_waited_for_longest_comes_next() -> None:
    weights = Weights()
    weights.ask("f3", now=2.0)
    weights.ask("f2", now=1.0)
    assert weights.held.wanted(now=3.0) == "f2"


@pytest.mark.usefixtures("one_at_a_time")
def test_callers_take_turns_with_their_snapshots() -> None:
    weights = Weights()
    for number, (folder, caller) in enumerate((("f1", "ann"), ("f2", "ann"), ("f3", "bob"))):
        weights.ask(folder, caller=caller, now=float(number))
    turns = []
    while (wanted := weights.held.wanted(now=9.0)) is not None:
        turns.append(wanted)
        weights.publish(wanted, now=9.0)
        weights.begin(wanted)
        weights.held.ended(Version(weights.versions))
    assert turns == ["f1", "f3", "f2"]


def test_the_next_one_makes_room_when_another_snapshot_has_waited_for_a_turn() -> None:
    weights = Weights()
    weights.hold(*[f"f{number}" for number in range(HELD_MAX)])
    for number in range(HELD_MAX):
        weights.ask(f"f{number}")
    weights.ask("new")
    weights.ask("newer", now=1.0)
    assert weights.held.wanted(now=SNAPSHOT_SWITCH_S) == "new"
    weights.publish("new", now=SNAPSHOT_SWITCH_S)
    # f0 waits again, and has waited for longest.
    assert [*weights.held.open_to(now=SNAPSHOT_SWITCH_S)] == ["f2", "f3", "new"]
    assert weights.held.wanted(now=SNAPSHOT_SWITCH_S) == "f0"
