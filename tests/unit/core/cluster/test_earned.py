"""What workers have earned: exactly the durable trajectories, also after a crash of the coordinator."""

from collections import Counter

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.earned import Earned, WorkerEarned
from echo2d.core.cluster.events import PeerSaid
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.work.events import SampleKept
from tests.support.coordinator_world import Kept, train

A, B = PeerId("a" * 32), PeerId("b" * 32)


def test_earned_bytes_become_durable_with_the_next_trajectory() -> None:
    earned = Earned([WorkerEarned(A, 5, 4, 100)])
    earned.sent(A, 10)
    earned.sent(B, 0)
    due = [earned.due]
    earned.accepted(B)
    earned.trained([B, A, A])
    due.append(earned.due)
    kept = earned.to_keep().record.workers
    assert kept == (WorkerEarned(A, 5, 6, 110), WorkerEarned(B, 1, 1))
    assert [*due, earned.due] == [False, True, False]
    assert Earned(kept).of(A) == WorkerEarned(A, 5, 6, 110)
    assert earned.of(PeerId("c" * 32)) == WorkerEarned(PeerId("c" * 32))


def test_a_crash_forgets_nothing_that_is_durable() -> None:
    world = Kept()
    world.connect("seed", kind="seed")
    for name in ("a", "b"):
        world.connect(name)
    train(world, 2)
    peer = world.peers["a"]
    assert peer.session is not None
    world.handle(PeerSaid(peer.session, Heartbeat(0, None, 0, 1000)))
    world.ask_batch(3)
    world.work()
    world.crash()
    train(world, 2, start=2)
    accepted = Counter(
        each.trajectory.worker for each in world.records if isinstance(each, SampleKept)
    )
    trained = Counter(
        each.worker
        for batch in world.trained.values()
        for group in batch.groups
        for each in group.trajectories
    )
    assert len(world.trained) == 4
    for name in ("a", "b"):
        worker = world.peers[name].peer
        found = world.state.earned([worker])
        assert found.accepted_trajectories == accepted[worker] > 0
        assert found.trained_trajectories == trained[worker] > 0
    both = world.state.earned([peer.peer for peer in world.peers.values()])
    assert both.trained_trajectories == sum(trained.values())
    assert both.sent_bytes == 1000
