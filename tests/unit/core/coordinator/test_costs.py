import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import PeerRevoked
from echo2d.core.cluster.membership import HEARTBEATS_MISSED_MAX, PEERS_MAX
from echo2d.core.coordinator.costs import RATE_MAX, Costs, Traffic
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.rules.prices import NamedPrice, Price
from tests.support.coordinator_world import World, rules, train

A, B = PeerId("a"), PeerId("b")


def test_a_worker_costs_its_price_while_it_is_here() -> None:
    costs = Costs(4)
    costs.here(A, Price(2.0), now=0.0)
    costs.here(A, Price(4.0), now=1800.0)  # a new hello, at another price
    costs.here(B, Price(1.0), now=1800.0)
    costs.gone(A, now=3600.0)
    costs.gone(PeerId("nobody"), now=3600.0)
    assert costs.of(A).at(9e9) == pytest.approx(1.0 + 2.0)
    assert costs.of(PeerId("nobody")).at(1.0) == 0.0
    found = costs.status(7, now=5400.0)
    assert (found.workers_usd_per_h, found.workers_usd, found.steps) == (1.0, 4.0, 3)
    assert found.usd_per_step == pytest.approx(4.0 / 3)
    # A learner that resumed at an earlier step has committed none.
    assert costs.status(2, now=5400.0).usd_per_step is None
    costs.check()


def test_the_cost_of_forgotten_workers_still_counts() -> None:
    costs = Costs(0)
    for number in range(PEERS_MAX + 3):
        costs.here(PeerId(str(number)), Price(1.0), now=0.0)
        costs.gone(PeerId(str(number)), now=3600.0)
    assert costs.status(1, now=3600.0).workers_usd == pytest.approx(PEERS_MAX + 3)
    costs.check()


PRICED = Price(0.0, usd_per_gb_down=0.5, usd_per_gb_up=2.0)
GB = 1_000_000_000


def test_a_worker_also_costs_what_it_receives_and_passes_on() -> None:
    costs = Costs(0)
    costs.here(A, PRICED, now=0.0)
    costs.began(A, "first start", Traffic(), now=0.0)
    costs.moved(A, Traffic(3 * GB, GB), now=10.0)
    costs.moved(A, Traffic(4 * GB, GB), now=20.0)
    assert costs.of(A).traffic == Traffic(4 * GB, GB)
    assert costs.of(A).at(30.0) == pytest.approx(4 * 0.5 + 2.0)
    # Its link was lost for a while, and what it moved meanwhile is in its next hello.
    costs.here(A, PRICED, now=30.0)
    costs.began(A, "first start", Traffic(5 * GB, GB), now=30.0)
    # Then it was started again.
    costs.here(A, PRICED, now=40.0)
    costs.began(A, "second start", Traffic(), now=40.0)
    costs.moved(A, Traffic(0, GB), now=50.0)
    assert costs.of(A).traffic == Traffic(5 * GB, 2 * GB)
    assert costs.status(1, now=60.0).usd_per_step == pytest.approx(5 * 0.5 + 2 * 2.0)


def test_a_coordinator_that_starts_counts_from_the_first_hello() -> None:
    costs = Costs(0)
    costs.here(A, PRICED, now=0.0)
    costs.began(A, "long ago", Traffic(90 * GB, 90 * GB), now=0.0)
    costs.moved(A, Traffic(91 * GB, 90 * GB), now=10.0)
    assert costs.of(A).traffic == Traffic(GB, 0)


def test_bytes_that_were_paid_keep_their_price() -> None:
    costs = Costs(0)
    costs.here(A, PRICED, now=0.0)
    costs.moved(A, Traffic(GB, 0), now=10.0)
    costs.here(A, Price(), now=10.0)  # it says hello under another name
    costs.moved(A, Traffic(2 * GB, 0), now=20.0)
    assert costs.of(A).at(20.0) == pytest.approx(0.5)


def test_no_rate_above_that_of_a_fast_link_is_believed() -> None:
    costs = Costs(0)
    costs.here(A, PRICED, now=0.0)
    costs.moved(A, Traffic(1 << 60, 0), now=2.0)
    assert costs.of(A).traffic == Traffic(int(2 * RATE_MAX), 0)
    costs.moved(A, Traffic(0, 0), now=3.0)
    assert costs.of(A).traffic == Traffic(int(2 * RATE_MAX), 0)
    costs.moved(B, Traffic(GB, 0), now=3.0)
    assert costs.of(B).traffic == Traffic(), "it has never said hello"


def test_peers_report_their_moved_bytes_in_heartbeats() -> None:
    world = World(rules(prices=(NamedPrice("a", Price(usd_per_gb_down=1.0)),)))
    world.connect("seed", kind="seed")
    worker, relay = world.connect("a"), world.connect("r", kind="relay")
    world.pass_time(1.0)
    world.say(worker, Heartbeat(0, None, 2 * GB, GB))
    world.say(relay, Heartbeat(0, None, GB, 3 * GB))
    found = world.state.status(now=world.now)
    (row,), (relay_row,) = found.workers, found.relays
    assert (row.received_bytes, row.sent_bytes) == (2 * GB, GB)
    assert row.cost_usd == pytest.approx(2.0)
    assert (relay_row.received_bytes, relay_row.sent_bytes) == (GB, 3 * GB)
    assert found.costs.workers_usd == pytest.approx(2.0)


def test_a_silent_worker_costs_nothing_until_its_next_message() -> None:
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
