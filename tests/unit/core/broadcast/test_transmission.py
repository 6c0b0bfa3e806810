"""One version's form, roots and plan."""

import pytest

from echo2d.core.base.ids import Digest, Epoch, PeerId, PlanId, PublishSeq, SegmentId, SessionId
from echo2d.core.broadcast.transmission import REPAIRS_MAX, TOLD_MAX, Transmission
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.peer import Peer, PeerReach
from echo2d.core.protocol.control_messages import Address, FormEncoded, PeerKind, SegmentEncoded
from echo2d.core.topology.edges import edge_secret
from echo2d.core.weights.form import FormFacts
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import PeerFault
from tests.support.coordinator_world import RULES, rules, version_digest, version_key

KEY = version_key(3)
RECORD = VersionPublished(PublishSeq(5), Epoch(1), KEY.version, KEY.digest, "v/3", 1000)


def peer(name: str, kind: PeerKind = "worker") -> Peer:
    return Peer(
        PeerId(name),
        name,
        kind,
        "boot",
        4,
        SessionId(1),
        0.0,
        reach=PeerReach(Address("h", 1), True),
    )


SEED = peer("seed", "seed")


def transmission() -> Transmission:
    return Transmission.start(
        RECORD, RULES, lambda one, other: edge_secret(bytes(32), one, other), now=0.0
    )


def segment(each: Transmission, number: int, fill: int = 1) -> SegmentEncoded:
    return SegmentEncoded(each.form, SegmentId(number), Digest(bytes([fill + number]) * 32))


def ended(each: Transmission, segments: int, salt: int = 0) -> FormEncoded:
    return FormEncoded(each.form, version_digest(3, salt), segments, 900, 1000, 0.1)


def test_the_order_to_encode_carries_the_facts_of_the_form() -> None:
    each = transmission()
    order = each.order()
    facts = FormFacts.decode(order.facts)
    assert (order.form, order.path, order.base_path) == (facts.form, "v/3", None)
    assert (facts.version, facts.publish_seq, facts.kind) == (3, 5, "full")


def test_roots_follow_the_segments_and_convince_a_receiver() -> None:
    each = transmission()
    roots = [root for number in range(3) for root in each.segment_encoded(segment(each, number))]
    roots += each.form_encoded(ended(each, 3))
    each.check()
    index = FormIndex(roots[0])
    index.accept_root(roots[-1])
    page = each.page(SegmentId(1))
    index.accept_page(page.start, page.digests)
    assert [index.table_digest(SegmentId(number)) for number in range(3)] == list(
        each.writer.segments
    )
    assert index.totals == each.totals
    assert each.page(SegmentId(9)).digests == ()


def test_a_seed_that_starts_again_may_repeat_but_not_change() -> None:
    each = transmission()
    each.segment_encoded(segment(each, 0))
    assert each.segment_encoded(segment(each, 0)) == []
    assert not each.has_changed(segment(each, 0))
    assert not each.has_changed(segment(each, 1))
    assert each.has_changed(segment(each, 0, fill=9))
    with pytest.raises(PeerFault, match="order"):
        each.segment_encoded(segment(each, 2))
    each.form_encoded(ended(each, 1))
    assert each.form_encoded(ended(each, 1)) == []
    with pytest.raises(PeerFault, match="order"):
        each.segment_encoded(segment(each, 1))


def test_a_form_of_other_bytes_or_length_is_not_believed() -> None:
    each = transmission()
    with pytest.raises(PeerFault, match="ends after"):
        each.form_encoded(ended(each, 0))
    each.segment_encoded(segment(each, 0))
    with pytest.raises(PeerFault, match="not of the snapshot"):
        each.form_encoded(ended(each, 1, salt=1))
    with pytest.raises(PeerFault, match="ends after"):
        each.form_encoded(ended(each, 2))
    assert each.totals is None


@pytest.mark.parametrize("shape", ["star", "chain", "auto"])
def test_every_peer_gets_a_place(shape: str) -> None:
    each = transmission()
    edges = each.make_plan(
        PlanId(7), rules(shape=shape, chains=2), SEED, [peer("a"), peer("b"), peer("c")]
    )
    assert set(edges) == {"seed", "a", "b", "c"}
    assert all((part.plan, part.form) == (7, each.form) for part in edges.values())
    each.check()


def test_many_peers_get_the_plan_in_batches_and_relays_get_it_first() -> None:
    each = transmission()
    names = [f"p{number:03}" for number in range(3 * TOLD_MAX)]
    first = each.make_plan(
        PlanId(7), rules(shape="chain", chains=1), SEED, [peer(name) for name in names]
    )
    assert list(first) == sorted(["seed", *names[: TOLD_MAX - 1]])
    gone = PeerId(names[-2])
    mended = each.remove(gone)
    assert mended
    each.check()
    told = [told for _ in range(4) for told in each.tell()]
    assert sorted([*first, *mended, *told]) == sorted({"seed", *names} - {gone})
    assert each.tell() == {}
    each.check()


def test_a_good_plan_keeps_its_trees_for_the_next_version() -> None:
    last = transmission()
    last.make_plan(PlanId(7), rules(shape="chain"), SEED, [peer(name) for name in "abc"])
    each = transmission()
    edges = each.make_plan(
        PlanId(8), rules(shape="chain"), SEED, [peer(name) for name in "cba"], last.plan
    )
    assert last.plan is not None
    assert each.plan is not None
    assert each.plan.stripes == last.plan.stripes
    assert {part.plan for part in edges.values()} == {PlanId(8)}
    each.check()


def test_a_new_plan_has_the_same_links_if_all_peers_relay() -> None:
    last, each = transmission(), transmission()
    last.make_plan(PlanId(7), rules(shape="auto"), SEED, [peer(name) for name in "abc"])
    each.make_plan(PlanId(8), rules(shape="auto"), SEED, [peer(name) for name in "cba"], last.plan)
    for name in ("seed", "a", "b", "c"):
        assert each.neighbours(PeerId(name)) == last.neighbours(PeerId(name))


def test_a_plan_takes_in_newcomers_losses_and_returning_peers() -> None:
    each = transmission()
    assert each.admit(peer("a"), renewed=True) == {}  # no plan yet: the first root makes it
    each.make_plan(PlanId(7), RULES, SEED, [peer("a"), peer("b")])
    assert "c" in each.admit(peer("c"), renewed=True)
    each.check()
    assert set(each.admit(peer("c"), renewed=False)) == {"c"}  # its own edges again
    lost = each.remove(PeerId("a"))
    assert set(lost) <= {"seed", "b", "c"}
    assert lost
    assert each.remove(PeerId("a")) == {}
    assert each.remove(PeerId("seed")) == {}
    each.check()
    again = each.admit(
        peer("b"), renewed=True
    )  # it may be dialled elsewhere now: its neighbours hear of it
    neighbours = {edge.peer for edge in again[PeerId("b")].peers}
    assert neighbours <= set(again)
    each.check()


def test_a_bad_relay_becomes_a_leaf_a_bounded_number_of_times() -> None:
    each = transmission()
    each.make_plan(PlanId(7), RULES, SEED, [peer("a"), peer("b"), peer("c")])
    assert each.plan is not None
    first = each.plan.stripes[0].tree.children(PeerId("seed"))[0]
    edges = each.make_leaf(first)
    assert edges[first].stripes[0].children == ()
    assert each.make_leaf(PeerId("seed")) == each.make_leaf(PeerId("nobody")) == {}
    for _ in range(2 * REPAIRS_MAX):
        each.make_leaf(PeerId("a"))
    assert each.repairs == REPAIRS_MAX
    each.check()
