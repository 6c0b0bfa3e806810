import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.traffic import Traffic
from echo2d.core.capacity.prices import NamedPrice, Price
from echo2d.core.cluster.events import PeerRevoked
from echo2d.core.cluster.membership import HEARTBEATS_MISSED_MAX, PEERS_MAX
from echo2d.core.coordinator.costs import Costs
from echo2d.core.protocol.control_messages import Heartbeat, LinkSample
from tests.support.coordinator_world import World, rules, train

A, B = PeerId("a"), PeerId("b")


def test_a_worker_costs_its_price_while_it_is_here() -> None:
    costs = Costs(4, Traffic())
    costs.here(A, Price(2.0), now=0.0)
    costs.here(A, Price(4.0), now=1800.0)  # a new hello, at another price
    costs.here(B, Price(1.0), now=1800.0)
    costs.gone(A, now=3600.0)
    costs.gone(PeerId("nobody"), now=3600.0)
    assert costs.of(A, now=9e9) == pytest.approx(1.0 + 2.0)
    assert costs.of(PeerId("nobody"), now=1.0) == 0.0
    found = costs.status(7, now=5400.0)
    assert (found.workers_usd_per_h, found.workers_usd, found.steps) == (1.0, 4.0, 3)
    assert found.usd_per_step == pytest.approx(4.0 / 3)
    # A learner that resumed at an earlier step has committed none.
    assert costs.status(2, now=5400.0).usd_per_step is None
    costs.check()


def test_what_forgotten_workers_cost_still_counts() -> None:
    costs = Costs(0, Traffic())
    for number in range(PEERS_MAX + 3):
        costs.here(PeerId(str(number)), Price(1.0), now=0.0)
        costs.gone(PeerId(str(number)), now=3600.0)
    assert costs.status(1, now=3600.0).workers_usd == pytest.approx(PEERS_MAX + 3)
    costs.check()


def test_a_worker_also_costs_what_it_receives_and_passes_on() -> None:
    traffic = Traffic()
    costs = Costs(0, traffic)
    for worker in (A, B):
        costs.here(worker, Price(0.0, usd_per_gb_down=0.5, usd_per_gb_up=2.0), now=0.0)
    traffic.count(B, [LinkSample(A, 3_000_000_000, 1.0)], left=4_000_000_000)
    assert costs.of(A, now=9.0) == pytest.approx(6.0)
    assert costs.of(B, now=9.0) == pytest.approx(1.5)
    assert costs.status(1, now=9.0).usd_per_step == pytest.approx(7.5)


def test_a_silent_worker_costs_nothing_until_it_is_heard() -> None:
    world = World(rules(prices=(NamedPrice("a", Price(3600.0)),)))
    world.connect("seed", kind="seed")
    peer = world.connect("a")
    train(world, 1)
    world.drain()
    silent_s = HEARTBEATS_MISSED_MAX * world.rules.heartbeat_s
    begun = world.now
    world.pass_time(silent_s + 5.0)
    usd = world.state.status(now=world.now).costs.workers_usd
    assert usd == pytest.approx(begun + silent_s)
    world.say(peer, Heartbeat(0))
    assert world.state.status(now=world.now + 2.0).costs.workers_usd == pytest.approx(usd + 2.0)
    world.handle(PeerRevoked(peer.peer))
    found = world.state.status(now=world.now + 2.0)
    assert found.costs.workers_usd == pytest.approx(usd)
    assert [worker.cost_usd for worker in found.workers] == [pytest.approx(usd)]
    assert found.costs.usd_per_step == pytest.approx(usd)
