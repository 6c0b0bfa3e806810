from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Note, PeerConnected, PeerDisconnected, Reply
from echo2d.core.coordinator.events import WorkerOrder, WorkerOrdered
from echo2d.core.protocol.control_messages import Drain, Goodbye, LeaseCancelled
from echo2d.core.status.schema import WorkerStatus
from echo2d.core.work.training.group_table import LEASE_FAILURES_MAX
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World


def running() -> World:
    """Workers a and b hold leases."""
    world = World()
    world.connect("seed", kind="seed")
    for name in "ab":
        world.connect(name, slots=2)
    world.open_session()
    world.publish(0)
    world.ask_batch(1)
    while world.pending or any(world.refit(peer) for peer in world.peers.values()):
        world.drain()
    assert all(world.peers[name].open for name in "ab")
    return world


def order(world: World, name: str, what: WorkerOrder, *, hand_over: bool = False) -> Reply:
    peer = PeerId(name)
    return world.call(lambda number: WorkerOrdered(number, peer, what, hand_over))


def row(world: World, name: str) -> WorkerStatus:
    workers = world.state.status(now=world.now).workers
    return next(worker for worker in workers if worker.name == name)


def drains(peer: FakePeer) -> int:
    return sum(isinstance(message, Drain) for message in peer.inbox)


def finish(world: World, peer: FakePeer) -> None:
    """The worker finishes all that it holds."""
    for key, sample in list(peer.open):
        world.say(peer, peer.finish(key, sample))
    world.drain()


def test_a_cordoned_worker_finishes_its_leases_and_gets_no_more() -> None:
    world = running()
    peer, held = world.peers["a"], len(world.peers["a"].open)
    assert order(world, "a", "cordon").body == {"id": "a", "connected": True, "leased": held}
    finish(world, peer)
    assert not peer.open
    assert not row(world, "a").leased
    assert row(world, "a").cordoned
    assert not row(world, "a").active
    assert not drains(peer)
    order(world, "a", "uncordon")
    world.drain()
    assert peer.open


def test_a_cordon_is_effective_from_the_hello_on() -> None:
    world = running()
    world.handle(PeerDisconnected(world.peers["a"].session, "reset"))
    order(world, "a", "cordon")
    peer = world.peers["a"]
    world.handle(PeerConnected(peer.session, peer.peer, peer.hello(), cordoned=True))
    assert row(world, "a").cordoned
    world.handle(PeerConnected(peer.session, peer.peer, peer.hello(), cordoned=False))
    assert not row(world, "a").cordoned


def test_a_drained_worker_is_ordered_to_end_once_it_holds_nothing() -> None:
    world = running()
    peer = world.peers["a"]
    order(world, "a", "drain")
    assert (row(world, "a").draining, drains(peer)) == (True, 0)
    finish(world, peer)
    assert drains(peer) == 1
    # A second order for a worker that goes already tells it again, which changes nothing.
    assert order(world, "a", "drain").status == 200
    world.say(peer, Goodbye("drained"))
    assert row(world, "a").state == "gone"
    assert order(world, "a", "drain").body == {"id": "a", "connected": False, "leased": 0}


def test_a_drain_hands_over_the_workers_samples_at_once() -> None:
    world = running()
    a, b = world.peers["a"], world.peers["b"]
    held = {key for key, _ in a.open}
    order(world, "a", "drain", hand_over=True)
    cancelled = {m.lease for m in a.inbox if isinstance(m, LeaseCancelled)}
    assert cancelled == {key.lease for key in held}
    assert drains(a) == 1
    finish(world, b)
    world.work()
    assert not row(world, "a").leased


def test_any_number_of_handovers_counts_no_failure_of_a_sample() -> None:
    world = running()
    for name in "ab" * (LEASE_FAILURES_MAX + 1):
        order(world, name, "drain", hand_over=True)
        order(world, name, "uncordon")
        world.drain()
    assert "lease" not in world.state.status(now=world.now).groups_dropped


def test_an_uncordon_cancels_a_drain() -> None:
    world = running()
    peer = world.peers["a"]
    order(world, "a", "drain")
    # A cordon does not.
    order(world, "a", "cordon")
    assert row(world, "a").draining
    order(world, "a", "uncordon")
    finish(world, peer)
    assert not drains(peer)
    assert not row(world, "a").cordoned


def test_a_worker_with_a_broken_link_gets_its_order_when_it_returns() -> None:
    world = running()
    peer = world.peers["a"]
    order(world, "a", "drain")
    finish(world, peer)
    world.handle(PeerDisconnected(peer.session, "reset"))
    world.handle(PeerConnected(peer.session, peer.peer, peer.hello(), cordoned=True))
    assert drains(peer) == 2


def test_a_restarted_daemon_of_a_drained_worker_is_idle_and_not_ended_again() -> None:
    world = running()
    peer = world.peers["a"]
    order(world, "a", "drain")
    finish(world, peer)
    world.say(peer, Goodbye("drained"))
    world.handle(PeerConnected(peer.session, peer.peer, peer.hello("anew"), cordoned=True))
    world.work()
    assert (row(world, "a").cordoned, row(world, "a").draining) == (True, False)
    assert (drains(peer), peer.open) == (1, [])


def test_an_order_is_recorded_once_and_also_for_unknown_workers() -> None:
    world = running()
    for notes in (1, 0):
        order(world, "a", "cordon")
        assert sum(isinstance(action, Note) for action in world.actions) == notes
    assert order(world, "nobody", "drain").body == {
        "id": "nobody",
        "connected": False,
        "leased": 0,
    }
    assert order(world, "seed", "drain").body == {"id": "seed", "connected": False, "leased": 0}


def test_a_drained_relay_is_ordered_to_end_at_once() -> None:
    world = running()
    relay = world.connect("relay", kind="relay", slots=0)
    order(world, "relay", "drain")
    assert drains(relay) == 1
