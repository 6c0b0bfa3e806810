"""Who of the workers that are here gets leases."""

from dataclasses import replace

from echo2d.core.coordinator_io import RemovalPlanned
from echo2d.core.ids import PeerId
from echo2d.core.membership import HEARTBEATS_MISSED_MAX
from echo2d.core.messages import Goodbye, Heartbeat, LeaseGranted, Leaving
from echo2d.core.prices import NamedPrice, Price
from tests.coordinator_world import RULES, World, train

AUTO = replace(RULES, activation="auto", prices=(NamedPrice("a", Price(0.1)), NamedPrice("*", Price(1.0))))
T_TRAIN_S, T_BCAST_S = 10.0, 1.0


def settled(names: str = "abc") -> World:
    """T_train and T_bcast are known; each worker makes more than is needed, and is said to."""
    world = World(AUTO)
    world.connect("seed", kind="seed")
    for name in names:
        world.connect(name)
    train(world, 3)
    world.drain()
    measures = world.state._figures.measures
    for _ in range(8):
        measures.t_train.add(T_TRAIN_S)
        measures.t_bcast.add(T_BCAST_S)
    measures.settle(T_TRAIN_S, dict.fromkeys(measures._work, 1.0), now=world.now)
    for work in measures._work.values():
        assert work.rate is not None
        work.rate.made = work.rate.leased_s = 1e4
    for name in names:
        world.refit(world.peers[name])
    world.drain()
    for _ in range(12):
        for name in ("seed", *names):
            world.say(world.peers[name], Heartbeat(0))
        world.pass_time(2.0)
        for name in ("seed", *names):
            world.say(world.peers[name], Heartbeat(0))
        world.pass_time(3.0)
    return world


def active(world: World) -> list[str]:
    workers = world.state.status(now=world.now)["workers"]
    return [worker["name"] for worker in workers if worker["active"] and worker["state"] == "joined"]


def test_without_a_wish_everybody_works() -> None:
    world = World()
    for name in "ab":
        world.connect(name)
    world.open_session()
    assert active(world) == ["a", "b"]
    assert world.state.status()["provision"]["activation"] == "all"


def test_the_cheapest_stays_and_who_stands_by_gets_no_leases() -> None:
    world = settled()
    assert active(world) == ["a"]
    assert world.state.shortfall is not None
    assert world.state.shortfall < 0
    for name in "abc":
        world.peers[name].inbox.clear()
    world.pass_time(20.0)  # all that they held falls silent, and goes to somebody else
    for name in ("seed", "a", "b", "c"):
        world.say(world.peers[name], Heartbeat(0))
    world.pass_time(40.0)
    granted = {name: sum(isinstance(each, LeaseGranted) for each in world.peers[name].inbox) for name in "abc"}
    assert granted["b"] == granted["c"] == 0


def test_a_lost_one_is_replaced_at_once() -> None:
    world = settled()
    world.say(world.peers["a"], Goodbye("over"))
    assert len(active(world)) == 1
    assert active(world) != ["a"]


def test_whose_box_is_given_back_finishes_and_gets_nothing_new() -> None:
    world = settled()
    world.ask_batch(4)
    world.drain()
    peer = world.peers["a"]
    assert peer.leases
    world.handle(RemovalPlanned(peer.peer, "its time ends"))
    assert world.handle(RemovalPlanned(peer.peer, "its time ends")) == []
    assert len(active(world)) == 1
    assert active(world) != ["a"]
    peer.inbox.clear()
    world.work()
    (row,) = (worker for worker in world.state.status(now=world.now)["workers"] if worker["name"] == "a")
    assert (row["leaving"], row["leased"], row["accepted"] > 0) == (True, 0, True)
    assert not any(isinstance(each, LeaseGranted) for each in peer.inbox)
    world.state.check()
    world.handle(RemovalPlanned(PeerId("nobody"), "x"))


def test_silence_is_a_loss() -> None:
    world = settled()
    for _ in range(HEARTBEATS_MISSED_MAX + 1):
        world.pass_time(2.0)
        for name in ("seed", "b", "c"):
            world.say(world.peers[name], Heartbeat(0))
    assert len(active(world)) == 1
    assert active(world) != ["a"]


def test_one_that_will_be_taken_away_is_replaced_at_once() -> None:
    world = settled()
    world.say(world.peers["a"], Leaving("spot notice"))
    assert len(active(world)) == 1
    assert active(world) != ["a"]
    world.state.check()
