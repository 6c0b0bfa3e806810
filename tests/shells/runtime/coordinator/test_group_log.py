"""One id leads from a lease to a train step in the coordinator's log."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from echo2d.core.base.ids import GroupId, LeaseId, PeerId, SessionId
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.control_messages import SampleFinished
from echo2d.runtime.coordinator.group_log import GroupLog
from tests.support.coordinator_world import World, rules, train


class Told(World):
    """A world whose coordinator tells its story."""

    def __init__(self, *arguments: Any) -> None:
        self.story = GroupLog(self.worker)
        super().__init__(*arguments)

    def worker(self, session: SessionId) -> PeerId | None:
        return next((peer.peer for peer in self.peers.values() if peer.session == session), None)

    def _perform(self, action: CoordinatorAction) -> None:
        self.story.tell(action)
        super()._perform(action)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """What was logged that a `grep -w` finds."""
    caplog.set_level(logging.DEBUG)
    return lambda word: [text for text in caplog.messages if re.search(rf"\b{word}\b", text)]


def running(**changes: Any) -> Told:
    world = Told(rules(**changes))
    world.connect("seed", kind="seed")
    world.connect("a")
    return world


def test_the_log_follows_a_group_from_its_lease_to_its_train_step(
    lines: Callable[[str], list[str]],
) -> None:
    train(running(), 1)
    story = lines("group=0")
    assert [line.split()[0] for line in story if "sample=1" not in line] == [
        "admitted", "leased", "accepted", "scored", "buffered", "frozen",
    ]  # fmt: skip
    assert re.fullmatch(
        r"leased group=0 lease=[0-9a-f]+\.0 attempt=0 worker=a samples=0,1", story[1]
    )
    frozen = re.fullmatch(r"frozen step=1 digest=([0-9a-f]{12}) group=0 group=1", story[-1])
    assert frozen is not None
    assert lines("committed") == [f"committed step=1 epoch=1 digest={frozen[1]} t_train_s=1.0"]


def test_the_log_says_why_a_group_is_dropped(lines: Callable[[str], list[str]]) -> None:
    world = running()
    world.reward = lambda cursor, sample: None
    world.open_session()
    world.publish(0)
    for _ in range(20):
        if world.pending:
            world.deliver()
        world.step_workers()
    story = lines("group=0")
    assert story[-2:] == [
        "reward group=0 sample 0 of group 0: crashed",
        "dropped group=0 reward: crashed",
    ]


def test_a_refused_result_names_the_group_of_its_lease(lines: Callable[[str], list[str]]) -> None:
    world = running()
    world.open_session()
    world.publish(0)
    world.drain()
    peer = world.peers["a"]
    world.refit(peer)
    world.drain()
    key = next(iter(peer.leases))
    world.say(peer, SampleFinished(key.lease, key.attempt, 0, b"", b"", (), "stop"))
    assert lines("refused")[0].startswith(f"refused group={peer.leases[key].group} lease=")
    world.say(peer, SampleFinished(LeaseId(7), 0, 0, b"", b"", (), "stop"))
    assert lines("refused")[1] == "refused lease=0.7 attempt=0 sample=0 worker=a no such lease"


def test_the_number_of_remembered_groups_is_limited(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[str], list[str]]
) -> None:
    monkeypatch.setattr("echo2d.runtime.coordinator.group_log.LOGGED_LEASES_MAX", 2)
    world = running()
    train(world, 3)
    assert len(world.story._groups) == 2
    assert max(world.story._groups.values()) > GroupId(4)
