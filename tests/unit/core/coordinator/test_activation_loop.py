"""Which of the present workers get leases."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.capacity.activation import Decision
from echo2d.core.capacity.demand import CapacityPlanner
from echo2d.core.capacity.estimators import WorkerRate
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.cluster.events import Note, PeerDisconnected, RemovalPlanned
from echo2d.core.cluster.membership import HEARTBEATS_MISSED_MAX, SLOTS_MAX
from echo2d.core.coordinator.activation_loop import SOON_S
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Heartbeat,
    LeaseFailed,
    LeaseGranted,
    Leaving,
    RefitDone,
)
from echo2d.core.rules.prices import NamedPrice, Price
from echo2d.core.rules.run import ActivationTable
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import RULES, World, rules, train, version_key

AUTO = replace(
    RULES,
    activation=ActivationTable(mode="auto", learner_usd_per_h=0.1),
    prices=(NamedPrice("a", Price(0.1)), NamedPrice("*", Price(1.0))),
)
T_TRAIN_S, T_BCAST_S = 10.0, 1.0


def give_all_slots(world: World) -> None:
    """These workers write nothing: what follows from that is another test's."""
    deliveries = world.state._scheduler.deliveries

    def review(*, now: float) -> set[PeerId]:
        deliveries.review_at = now + 1e6
        for work in deliveries._workers.values():
            work.allowed, work.rank = SLOTS_MAX, 0
        return set(deliveries._workers)

    deliveries.review = review  # type: ignore[method-assign]
    deliveries.review_at = world.now


def settled(names: str = "abc", mode: Literal["all", "auto"] = "auto") -> World:
    """T_train and T_bcast are known; each worker makes more than is needed."""
    world = World(replace(AUTO, activation=replace(AUTO.activation, mode=mode)))
    world.connect("seed", kind="seed")
    for name in names:
        world.connect(name)
    train(world, 3)
    world.drain()
    measurements = world.state._statistics.measurements
    for _ in range(8):
        measurements.t_train.add(T_TRAIN_S)
        measurements.t_bcast.add(T_BCAST_S)
    give_all_slots(world)
    for work in measurements._work.values():
        work.rate = WorkerRate(1.0, 2, T_TRAIN_S, made=1e4, leased_s=1e4)
    for name in names:
        world.refit(world.peers[name])
    world.drain()
    for _ in range(14):
        for name in ("seed", *names):
            world.say(world.peers[name], Heartbeat(0))
        world.pass_time(2.0)
        for name in ("seed", *names):
            world.say(world.peers[name], Heartbeat(0))
        world.pass_time(3.0)
    return world


def active(world: World) -> list[str]:
    workers = world.state.status(now=world.now).workers
    return [worker.name for worker in workers if worker.active and worker.state == "joined"]


def two_trained() -> World:
    """Two workers that have refitted to each version of three train steps."""
    world = World()
    world.connect("seed", kind="seed")
    for name in "ab":
        world.connect(name)
    train(world, 3)
    world.drain()
    return world


def test_workers_report_how_long_they_stopped_for_a_version() -> None:
    world = World(rules(mode="exclusive"))
    world.connect("seed", kind="seed")
    for name in "ab":
        world.connect(name)
    train(world, 3)
    world.drain()
    statistics = world.state._statistics
    statistics.still_s.clear()
    world.now += 6.0
    for name, held_s in (("a", 4.0), ("b", 1e9)):
        peer = world.peers[name]
        statistics.measurements.holds(peer.peer, 4, 4, now=world.now)
        assert peer.ready is not None
        peer.serving = peer.ready
        world.say(
            peer,
            RefitDone(
                peer.serving.version, peer.serving.digest, 0.1, memory_ok=True, held_s=held_s
            ),
        )
    assert list(statistics.still_s) == [pytest.approx(5.0)]
    assert statistics.measurements.still.samples


def test_no_worker_stood_still_for_longer_than_since_the_version_before() -> None:
    """A version that somebody fetches alone has no time of its own."""
    world = World(rules(mode="exclusive"))
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, 3)
    world.drain()
    statistics, liar = (
        world.state._statistics,
        next(peer for peer in world.state._members if peer.name == "a"),
    )
    statistics.measurements.holds(liar.peer, 4, 4, now=world.now)
    assert liar.engine.refitted_at is not None
    world.state._publishing.came_s = lambda peer, *, now: now  # type: ignore[method-assign]
    world.now, peer = liar.engine.refitted_at + 7.0, world.peers["a"]
    assert peer.ready is not None
    world.say(
        peer, RefitDone(peer.ready.version, peer.ready.digest, 0.1, memory_ok=True, held_s=1e9)
    )
    assert statistics.still_s[-1] == pytest.approx(7.0)


def test_computing_kv_caches_again_is_charged_and_does_not_make_a_worker_look_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reported recompute is bounded as a pause is: by the time since the version before, and by
    three times what is usual.
    """
    world = two_trained()
    statistics = world.state._statistics
    measurements = statistics.measurements
    for _ in range(8):
        measurements.recompute.add(2.0)
    forgiven: list[float] = []
    monkeypatch.setattr(
        Measurements, "forgive", lambda _, worker, seconds, *, now: forgiven.append(seconds)
    )
    world.now += 50.0
    for name, recompute_s in (("a", 3.0), ("b", 1e9)):
        peer = world.peers[name]
        assert peer.ready is not None
        peer.serving = peer.ready
        done = RefitDone(
            peer.ready.version, peer.ready.digest, 0.0, memory_ok=True, recomputed_tokens=700,
            recompute_s=recompute_s,
        )  # fmt: skip
        world.say(peer, done)
    before = next(peer.engine.refitted_at for peer in world.state._members if peer.name == "b")
    assert before == world.now
    assert statistics.tokens_recomputed == 1400
    assert list(statistics.recompute_s)[-2:] == [3.0, pytest.approx(50.0, abs=10.0)]
    usual = measurements.recompute.estimate
    assert usual is not None
    assert 3.0 in forgiven
    assert any(seconds == pytest.approx(3.0 * usual.value) for seconds in forgiven)
    assert max(forgiven) < 50.0
    status = world.state.status(now=world.now)
    assert [worker.recomputed_tokens for worker in status.workers] == [700, 700]
    assert [worker.recompute_s for worker in status.workers] == [3.0, 1e9], "as they said"
    assert status.provision.estimates.recompute_s is not None


def test_a_worker_that_goes_back_and_forth_between_versions_is_forgiven_once() -> None:
    world = World()
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, 3)
    world.drain()
    statistics, peer = world.state._statistics, world.peers["a"]
    known = next(each for each in world.state._members if each.name == "a")
    newest, before = peer.ready, list(known.engine.acknowledged)[-2]
    assert newest is not None
    paused = len(statistics.refit_pause_s)
    for turn in range(6):
        world.now += 5.0
        served = before if turn % 2 else newest
        world.say(peer, RefitDone(served.version, served.digest, 5.0, memory_ok=True))
    assert len(statistics.refit_pause_s) - paused <= 1


def test_all_workers_work_without_a_target() -> None:
    world = World()
    for name in "ab":
        world.connect(name)
    world.open_session()
    assert active(world) == ["a", "b"]
    assert world.state.status().provision.activation == "all"


def test_the_cheapest_worker_stays_active_and_workers_on_standby_get_no_leases() -> None:
    world = settled()
    assert active(world) == ["a"]
    assert (world.state.status().provision.shortfall or 0.0) < 0
    for name in "abc":
        world.peers[name].inbox.clear()
    world.pass_time(20.0)  # all that they held falls silent, and goes to somebody else
    for name in ("seed", "a", "b", "c"):
        world.say(world.peers[name], Heartbeat(0))
    world.pass_time(40.0)
    granted = {
        name: sum(isinstance(each, LeaseGranted) for each in world.peers[name].inbox)
        for name in "abc"
    }
    assert granted["b"] == granted["c"] == 0


def test_a_lost_worker_is_replaced_at_once() -> None:
    world = settled()
    world.say(world.peers["a"], Goodbye("over"))
    assert len(active(world)) == 1
    assert active(world) != ["a"]


def test_many_newcomers_at_once_cause_one_review(monkeypatch: pytest.MonkeyPatch) -> None:
    world = settled()
    looks, review = list[float](), CapacityPlanner.review

    def counted(self: CapacityPlanner, *arguments: Any, now: float) -> Decision:
        looks.append(now)
        return review(self, *arguments, now=now)

    monkeypatch.setattr(CapacityPlanner, "review", counted)
    begin = world.now
    for number in range(50):
        world.now += 0.001
        world.connect(f"new{number}")
    world.pass_time(SOON_S)
    assert len(looks) == 2
    assert looks[1] - begin < 2 * SOON_S


def test_a_coordinator_that_was_suspended_finds_no_worker_slow() -> None:
    """What they held was done within a trajectory's time; then nobody gave them more."""
    world = settled()
    [worker] = [peer for name, peer in world.peers.items() if name == active(world)[0]]
    measurements = world.state._statistics.measurements
    for _ in range(8):
        measurements.t_gen.add(2.0)
    measurements.holds(worker.peer, 4, 4, now=world.now)
    before = measurements.mu(worker.peer, 4, None)
    world.now += 500.0  # nothing is heard of anybody meanwhile, and then of all at once
    for peer in world.peers.values():
        world.say(peer, Heartbeat(0))
    world.pass_time(0.0)
    assert measurements.mu(worker.peer, 4, None) == pytest.approx(before, rel=0.1)


def test_a_lease_that_crosses_a_notice_counts_against_no_worker() -> None:
    world = World()
    world.connect("seed", kind="seed")
    for name in "ab":
        world.connect(name)
    world.open_session()
    world.publish(0)
    world.ask_batch(1)
    while world.pending or any(world.refit(peer) for peer in world.peers.values()):
        world.drain()
    leaver = next(peer for peer in world.peers.values() if peer.leases)
    world.say(leaver, Leaving("spot notice"))
    for key in list(leaver.leases):
        leaver.forget(key)
        world.say(leaver, LeaseFailed(key.lease, key.attempt, "draining"))
    status = world.state.status(now=world.now)
    assert not status.faults
    assert [worker.leases for worker in status.workers if worker.name == leaver.name] == [0]
    world.work()
    world.state.check()


def test_a_worker_that_loads_nothing_does_not_shorten_the_measured_broadcast() -> None:
    world = World(AUTO)
    world.connect("seed", kind="seed")
    world.slow.add("broken")
    for name in ("a", "broken"):
        world.connect(name)
    train(world, 5)
    world.drain()
    world.work()
    assert world.state._statistics.measurements.t_bcast.estimate is not None


def test_a_worker_with_a_broken_link_takes_no_other_workers_place() -> None:
    world = settled()
    [works] = active(world)
    cheaper, other = sorted(set("abc") - {works})
    world.handle(PeerDisconnected(world.peers[cheaper].session, "reset"))
    world.say(world.peers[works], Leaving("spot notice"))
    assert active(world) == [other]
    world.connect(cheaper)
    world.state.check()


def test_an_impossible_pause_does_not_count() -> None:
    """No longer than since it served the version before; said again of the same one, it is no pause at all."""
    world = settled()
    train(world, 1)
    liar = world.peers["b"]
    assert liar.serving is not None
    key, pauses = version_key(liar.serving.version + 1), world.state._statistics.measurements.pause
    refitted_at = next(peer.engine.refitted_at for peer in world.state._members if peer.name == "b")
    assert refitted_at is not None
    before = pauses.samples
    for _ in range(5):
        world.say(liar, RefitDone(key.version, key.digest, 1e12, memory_ok=True))
    assert pauses.samples == before + 1
    assert pauses._newest[-1] == world.now - refitted_at


def test_a_spot_notice_is_recorded_once() -> None:
    world = settled()
    notes = [world.say(world.peers["a"], Leaving("spot notice")) for _ in range(3)]
    assert [
        sum(isinstance(action, Note) and action.kind == "leaving" for action in each)
        for each in notes
    ] == [
        1,
        0,
        0,
    ]


def test_the_next_worker_is_active_at_once_after_all_have_left() -> None:
    world = settled()
    for name in "abc":
        world.say(world.peers[name], Leaving("the whole zone"))
    assert active(world) == []
    world.peers["d"] = FakePeer("d", "worker", 4, SessionId(0), serving=world.peers["a"].serving)
    world.connect("d")
    world.pass_time(SOON_S)
    assert active(world) == ["d"]
    world.state.check()


def test_all_workers_work_after_a_restart_until_the_demand_is_known_again() -> None:
    world = settled()
    assert len(active(world)) == 1
    world.crash()
    world.pass_time(SOON_S)
    assert active(world) == ["a", "b", "c"]
    assert world.state.status().provision.shortfall is None
    world.state.check()


def test_a_worker_whose_box_is_given_back_finishes_its_leases_and_gets_no_more() -> None:
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
    (row,) = (worker for worker in world.state.status(now=world.now).workers if worker.name == "a")
    assert (row.leaving, row.leased, row.accepted > 0) == (True, 0, True)
    assert not any(isinstance(each, LeaseGranted) for each in peer.inbox)
    world.state.check()
    world.handle(RemovalPlanned(PeerId("nobody"), "x"))


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_a_worker_that_leaves_does_not_count_as_available(mode: Literal["all", "auto"]) -> None:
    world = settled(mode=mode)
    before = world.state.status(now=world.now).provision
    world.say(world.peers["c"], Leaving("spot notice"))
    after = world.state.status(now=world.now).provision
    assert after.mu_available == pytest.approx(before.mu_available * 2 / 3, rel=0.01)
    assert after.mu_pool == pytest.approx(
        before.mu_pool * (1 if mode == "auto" else 2 / 3), rel=0.01
    )
    assert after.mu_target is not None
    assert after.shortfall == pytest.approx(after.mu_target - after.mu_available)


def test_a_silent_worker_counts_as_lost() -> None:
    world = settled()
    for _ in range(HEARTBEATS_MISSED_MAX + 1):
        world.pass_time(2.0)
        for name in ("seed", "b", "c"):
            world.say(world.peers[name], Heartbeat(0))
    assert len(active(world)) == 1
    assert active(world) != ["a"]


def test_a_worker_with_a_notice_is_replaced_at_once() -> None:
    world = settled()
    world.say(world.peers["a"], Leaving("spot notice"))
    assert len(active(world)) == 1
    assert active(world) != ["a"]
    world.state.check()


def test_of_two_equally_fast_workers_the_one_that_loses_more_to_refits_makes_less() -> None:
    world = two_trained()
    loop, price = world.state._activation_loop, Price(usd_per_h=1.0)
    one, other = (each for each in world.state._members if each.name in "ab")
    demand = loop._capacity_planner.demand(loop.calls.publish_every)
    assert demand is not None
    one.engine.lost_s, other.engine.lost_s = demand.lost_s, 0.5 * demand.period_s
    for peer in (one, other):
        peer.slots = 4
    mus = [loop._mu(peer, price) for peer in (one, other)]
    known = [loop.parts.statistics.measurements.mu(each.peer, 4, None) for each in (one, other)]
    assert mus[0] == pytest.approx(known[0]), "it loses what the pool loses"
    left = 0.5 * demand.period_s / (demand.period_s - demand.lost_s)
    assert mus[1] == pytest.approx(left * known[1])
