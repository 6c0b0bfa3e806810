"""Bytes that peers received and passed on, by what their receivers report."""

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.traffic import FORM_COPIES_MAX, PeerTraffic, Traffic
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.protocol.control_messages import LinkSample, TransferReport
from tests.support.coordinator_world import World, rules, train

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_bytes_count_at_both_ends_of_a_link() -> None:
    traffic = Traffic()
    links = [LinkSample(B, 10, 1.0), LinkSample(C, 5, 1.0), LinkSample(B, -3, 1.0)]
    assert traffic.count(A, links, left=100) == 15
    assert traffic.peers == {
        A: PeerTraffic(received=15),
        B: PeerTraffic(sent=10),
        C: PeerTraffic(sent=5),
    }


def test_no_more_than_is_left_is_counted() -> None:
    traffic = Traffic()
    assert traffic.count(A, [LinkSample(B, 10, 1.0), LinkSample(C, 5, 1.0)], left=12) == 12
    assert traffic.count(A, [LinkSample(B, 10, 1.0)], left=0) == 0
    assert (traffic.peers[B].sent, traffic.peers[C].sent) == (10, 2)


def test_traffic_of_so_many_peers_is_kept() -> None:
    traffic = Traffic()
    for number in range(PEERS_MAX + 10):
        traffic.count(PeerId(str(number)), [LinkSample(A, 1, 1.0)], left=1)
        traffic.check()


def test_what_a_liar_reports_counts_up_to_a_few_copies_of_the_form() -> None:
    world = World(rules())
    world.connect("seed", kind="seed")
    liar = world.connect("a")
    train(world, 1)
    transmission = world.state._publishing.spreading
    assert transmission is not None
    report = TransferReport(transmission.form, 1, (LinkSample(B, 1 << 40, 1.0),), 0)
    for _ in range(3):
        world.say(liar, report)
    (worker,) = world.state.status(now=world.now).workers
    assert worker.received_bytes == FORM_COPIES_MAX * transmission.expected_bytes
