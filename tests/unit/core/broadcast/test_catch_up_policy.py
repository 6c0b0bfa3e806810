"""Deltas: the base of the next one, the forms for peers that need another base, and that no reported digest is believed
before it is acknowledged.
"""

import pytest

from echo2d.core.base.ids import Epoch, PublishSeq, Version
from echo2d.core.broadcast.catch_up_policy import HELPERS_MAX, DeltaRoute, choose_route
from echo2d.core.cluster.events import Note, VersionPublished
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    DeltasKept,
    ForgetForm,
    PlanEdges,
    RefitDone,
)
from echo2d.core.status.schema import VersionBytes
from echo2d.core.weights.form import FormFacts
from echo2d.core.weights.kept_deltas import KeptDelta
from tests.support.catch_up import bases, newcomer, orders, running, served, taken_order
from tests.support.coordinator_world import (
    form_of,
    messages,
    publish_step,
    version_digest,
    version_key,
)
from tests.support.publishing import broadcast


def test_a_version_is_sent_as_a_delta_from_the_version_that_workers_have() -> None:
    world = running("a", "b", steps=2)
    assert bases(world) == [None, "versions/1-0", "versions/1-1"]
    assert FormFacts.decode(orders(world)[-1].facts).base_digest == version_key(1).digest
    assert broadcast(world).base_version == 1
    assert world.state.status().version_bytes[2] == VersionBytes(900, 1000)
    assert bases(running("a", steps=2, delta=False)) == [None, None, None]


@pytest.mark.parametrize(("behind", "base"), [(1, 2), (2, 2), (3, None)])
def test_the_base_is_the_newest_version_that_half_of_the_workers_have(
    behind: int, base: int | None
) -> None:
    world = running("a", "b", steps=2)
    for number in range(behind):
        newcomer(world, f"late-{number}")
    world.pending.clear()
    publish_step(world, 3)
    assert orders(world)[-1].version == 3
    assert orders(world)[-1].base_path == (None if base is None else f"versions/1-{base}")


def test_a_version_that_was_not_acknowledged_is_no_base() -> None:
    world = running("a", "b", "c")
    world.slow = {"a", "b"}
    publish_step(world, 2)
    world.work()
    world.pass_time(5.0)  # c has it; the others are not waited for
    for name in ("a", "b"):
        world.say(
            world.peers[name], RefitDone(Version(2), version_digest(2), 0.1, memory_ok=True)
        )  # which does not say that it stands
    publish_step(world, 3)
    assert bases(world)[-2:] == ["versions/1-2", "versions/1-1"], "c takes the other one"


def test_a_newcomer_gets_the_full_form_and_then_deltas() -> None:
    world = running("a", "b", steps=2)
    delta = form_of(world)
    late = newcomer(world, "late")
    order = taken_order(world)
    assert (order.version, order.kind, order.aside) == (2, "full", True)
    assert messages(late, PlanEdges) == [], "what it cannot use"
    world.work()
    assert [part.form for part in messages(late, PlanEdges)] == [order.form, delta]
    assert late.serving == version_key(2)
    helped = [
        name
        for name in ("a", "b")
        if order.form in [part.form for part in messages(world.peers[name], PlanEdges)]
    ]
    assert len(helped) == HELPERS_MAX, "who has the version helps"
    assert messages(world.peers["seed"], ForgetForm)[-1].form == order.form != delta, (
        "nobody takes it any more"
    )
    publish_step(world, 3)
    world.work()
    assert bases(world)[-1] == "versions/1-2"
    assert served(world) == {3}


@pytest.mark.parametrize(("stands", "base"), [(2, "versions/1-2"), (1, "versions/1-1"), (0, None)])
def test_a_peer_that_is_behind_gets_a_delta_from_its_own_version_if_it_is_kept(
    stands: int, base: str | None
) -> None:
    world = running("a", "b", steps=4)
    late = newcomer(world, "late", stands)
    assert taken_order(world).base_path == base
    world.work()
    assert late.serving == version_key(4)


def test_a_peer_that_is_further_behind_gets_a_composition_of_kept_deltas() -> None:
    world = running("a", "b", steps=6)
    kept = [
        KeptDelta(version_digest(step), version_digest(step + 1), 10 + step) for step in range(1, 6)
    ]
    world.say(world.peers["seed"], DeltasKept(tuple(kept)))
    late = newcomer(world, "late", 1)
    order = taken_order(world)
    assert (order.kind, order.base_path) == ("composed", None), (
        "of version 1 there is no copy any more"
    )
    assert order.via == tuple(version_digest(step) for step in range(2, 6))
    facts = FormFacts.decode(order.facts)
    assert (facts.kind, facts.base_digest, facts.form) == (
        "composed",
        version_digest(1),
        order.form,
    )
    notes = [
        action.text
        for action in world.actions
        if isinstance(action, Note) and action.kind == "catch_up"
    ]
    assert notes == [
        "version 6 goes to late as a delta from version 1, composed of 5, at most 0.0 MB"
    ]
    world.work()
    assert late.serving == version_key(6)


def record(version: int) -> VersionPublished:
    key = version_key(version)
    return VersionPublished(
        PublishSeq(version), Epoch(1), key.version, key.digest, f"versions/{version}", 1000
    )


def kept(*steps: tuple[int, int, int]) -> list[KeptDelta]:
    return [
        KeptDelta(version_digest(base), version_digest(made), size) for base, made, size in steps
    ]


CHAIN = kept((1, 2, 10), (2, 3, 20), (3, 4, 30))


@pytest.mark.parametrize(
    ("stands", "copies", "deltas", "way"),
    [
        (None, [4, 3], CHAIN, DeltaRoute(700)),  # it has nothing
        (3, [4, 3], [], DeltaRoute(700, record(3))),  # from a copy, however much that may take
        (3, [4, 3], CHAIN, DeltaRoute(30, record(3))),  # never more than composed
        (1, [4, 3], CHAIN, DeltaRoute(60, record(1), (version_digest(2), version_digest(3)))),
        (3, [4], CHAIN, DeltaRoute(30, record(3), ())),  # one that is kept, as it was
        (1, [4, 3], CHAIN[1:], DeltaRoute(700)),  # a link is missing
        (1, [4, 3], kept((1, 2, 400), (2, 4, 400)), DeltaRoute(700)),  # in full it takes less
        (1, [4, 3, 1], kept((1, 2, 400), (2, 4, 400)), DeltaRoute(700, record(1))),
        (1, [4], [*CHAIN, *kept((1, 3, 25))], DeltaRoute(55, record(1), (version_digest(3),))),
    ],
)
def test_the_form_with_the_fewest_bytes_is_chosen(
    stands: int | None, copies: list[int], deltas: list[KeptDelta], way: DeltaRoute
) -> None:
    base = None if stands is None else record(stands)
    kept_copies = [record(version) for version in copies]
    assert choose_route(record(4), base, copies=kept_copies, deltas=deltas, full_bytes=700) == way


def test_no_peer_gets_a_form_of_an_older_publish_than_it_knows() -> None:
    """A worker refuses the root of such a form and says nothing: it would wait for ever."""
    world = running("a", "b", "c", steps=2)
    world.slow = {"late"}
    newcomer(world, "late")  # the full form of version 2 is under way, for long
    publish_step(world, 3)
    world.work()
    world.slow = {"late", "a"}
    publish_step(world, 4)
    world.work()
    spreading, policy = world.state._publishing.spreading, world.state._publishing._catch_ups
    world.say(world.peers["a"], ApplyFailed(form_of(world), "1 chunk is damaged", lacks_base=True))
    taken = policy.takes(world.peers["a"].peer)
    assert taken is not None
    assert spreading is not None
    assert taken.record == spreading.record


def test_peers_that_are_behind_share_the_forms_under_way() -> None:
    world = running("a", "b", "c", "d", "e", steps=4)
    for number, stands in enumerate([1, 1, 2, 0, None, None]):
        newcomer(world, f"late-{number}", stands)
    assert [order.base_path for order in orders(world) if order.aside] == [
        "versions/1-1",
        "versions/1-2",
        None,
    ]
    world.work()
    assert served(world) == {4}
