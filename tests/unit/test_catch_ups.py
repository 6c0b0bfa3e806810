"""Deltas: the base of the next one, who takes another form and which, and that no digest is believed unheard."""

from typing import Any

import pytest

from echo2d.core.catch_ups import HELPERS_MAX, Way, choose_way
from echo2d.core.coordinator_io import DeleteVersion, Note, VersionPublished
from echo2d.core.delta_chain import KeptDelta
from echo2d.core.forms import FormFacts
from echo2d.core.ids import Epoch, PublishSeq, Version
from echo2d.core.messages import (
    ApplyFailed,
    DeltasKept,
    EncodeFailed,
    EncodeVersion,
    ForgetForm,
    Goodbye,
    Heartbeat,
    PlanEdges,
    RefitDone,
    VersionVerified,
)
from echo2d.core.publishing import ENCODE_FAILURES_MAX, ENCODE_RETRY_S
from tests.coordinator_world import (
    Peer,
    World,
    form_of,
    messages,
    publish_step,
    rules,
    train,
    version_digest,
    version_key,
)


def running(*workers: str, steps: int = 1, **changes: Any) -> World:
    """They serve version `steps`, each version after the first having come as a delta."""
    world = World(rules(**changes))
    world.connect("seed", kind="seed", slots=0)
    for name in workers:
        world.connect(name)
    train(world, steps)
    world.work()
    assert all(world.peers[name].stands == version_key(steps) for name in workers)
    return world


def orders(world: World) -> list[EncodeVersion]:
    return messages(world.peers["seed"], EncodeVersion)


def bases(world: World) -> list[str | None]:
    return [order.base_path for order in orders(world)]


def newcomer(world: World, name: str, stands: int | None = None) -> Peer:
    """One that comes with this version in its slot."""
    key = None if stands is None else version_key(stands)
    world.peers[name] = Peer(name, "worker", 4, world.peers["seed"].session, stands=key)
    return world.connect(name)


def test_a_version_is_a_delta_from_what_the_workers_have() -> None:
    world = running("a", "b", steps=2)
    assert bases(world) == [None, "versions/1-0", "versions/1-1"]
    assert FormFacts.decode(orders(world)[-1].facts).base_digest == version_key(1).digest
    assert world.state.status()["broadcast"]["base_version"] == 1
    assert world.state.status()["version_bytes"]["2"] == {"wire_bytes": 900, "full_bytes": 1000}
    assert bases(running("a", steps=2, delta=False)) == [None, None, None]


@pytest.mark.parametrize(("behind", "base"), [(1, 2), (2, 2), (3, None)])
def test_the_base_is_the_newest_version_that_half_of_the_workers_have(behind: int, base: int | None) -> None:
    world = running("a", "b", steps=2)
    for number in range(behind):
        newcomer(world, f"late-{number}")
    world.pending.clear()
    publish_step(world, 3)
    assert orders(world)[-1].version == 3
    assert orders(world)[-1].base_path == (None if base is None else f"versions/1-{base}")


def test_what_was_not_acknowledged_is_no_base() -> None:
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


def test_a_newcomer_takes_the_full_form_and_then_deltas() -> None:
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
        name for name in ("a", "b") if order.form in [part.form for part in messages(world.peers[name], PlanEdges)]
    ]
    assert len(helped) == HELPERS_MAX, "who has the version helps"
    assert messages(world.peers["seed"], ForgetForm)[-1].form == order.form != delta, "nobody takes it any more"
    publish_step(world, 3)
    world.work()
    assert bases(world)[-1] == "versions/1-2"
    assert {worker["serving"]["version"] for worker in world.state.status()["workers"]} == {3}


@pytest.mark.parametrize(("stands", "base"), [(2, "versions/1-2"), (1, "versions/1-1"), (0, None)])
def test_who_is_behind_takes_a_delta_from_its_own_version_if_that_is_kept(stands: int, base: str | None) -> None:
    world = running("a", "b", steps=4)
    late = newcomer(world, "late", stands)
    assert taken_order(world).base_path == base
    world.work()
    assert late.serving == version_key(4)


def test_who_is_further_behind_takes_deltas_that_are_kept_composed() -> None:
    world = running("a", "b", steps=6)
    kept = [KeptDelta(version_digest(step), version_digest(step + 1), 10 + step) for step in range(1, 6)]
    world.say(world.peers["seed"], DeltasKept(tuple(kept)))
    late = newcomer(world, "late", 1)
    order = taken_order(world)
    assert (order.kind, order.base_path) == ("composed", None), "of version 1 there is no copy any more"
    assert order.via == tuple(version_digest(step) for step in range(2, 6))
    facts = FormFacts.decode(order.facts)
    assert (facts.kind, facts.base_digest, facts.form) == ("composed", version_digest(1), order.form)
    notes = [action.text for action in world.actions if isinstance(action, Note) and action.kind == "catch_up"]
    assert notes == ["version 6 goes to late as a delta from version 1, composed of 5, at most 0.0 MB"]
    world.work()
    assert late.serving == version_key(6)


def test_who_cannot_be_given_a_composed_delta_takes_the_full_form() -> None:
    world = running("a", "b", steps=6)
    seed = world.peers["seed"]
    world.say(seed, DeltasKept((KeptDelta(version_digest(1), version_digest(6), 100),)))
    late = newcomer(world, "late", 1)
    world.pending.clear()
    world.say(seed, EncodeFailed(taken_order(world).form, "a delta is damaged", lacks_base=True))
    assert taken_order(world).kind == "full"
    world.work()
    assert late.serving == version_key(6)
    world.say(world.peers["a"], DeltasKept(()))
    assert world.peers["a"].closed, "only the seed says so"


def record(version: int) -> VersionPublished:
    key = version_key(version)
    return VersionPublished(PublishSeq(version), Epoch(1), key.version, key.digest, f"versions/{version}", 1000)


def kept(*steps: tuple[int, int, int]) -> list[KeptDelta]:
    return [KeptDelta(version_digest(base), version_digest(made), size) for base, made, size in steps]


CHAIN = kept((1, 2, 10), (2, 3, 20), (3, 4, 30))


@pytest.mark.parametrize(
    ("stands", "copies", "deltas", "way"),
    [
        (None, [4, 3], CHAIN, Way(700)),  # it has nothing
        (3, [4, 3], [], Way(700, record(3))),  # from a copy, however much that may take
        (3, [4, 3], CHAIN, Way(30, record(3))),  # never more than composed
        (1, [4, 3], CHAIN, Way(60, record(1), (version_digest(2), version_digest(3)))),
        (3, [4], CHAIN, Way(30, record(3), ())),  # one that is kept, as it was
        (1, [4, 3], CHAIN[1:], Way(700)),  # a link is missing
        (1, [4, 3], kept((1, 2, 400), (2, 4, 400)), Way(700)),  # in full it takes less
        (1, [4, 3, 1], kept((1, 2, 400), (2, 4, 400)), Way(700, record(1))),
        (1, [4], [*CHAIN, *kept((1, 3, 25))], Way(55, record(1), (version_digest(3),))),
    ],
)
def test_what_takes_the_fewest_bytes(stands: int | None, copies: list[int], deltas: list[KeptDelta], way: Way) -> None:
    base = None if stands is None else record(stands)
    kept_copies = [record(version) for version in copies]
    assert choose_way(record(4), base, copies=kept_copies, deltas=deltas, full_bytes=700) == way


def test_nobody_is_given_a_form_of_an_older_publish_than_it_has_heard_of() -> None:
    """A worker refuses the root of such a form and says nothing: it would wait for ever."""
    world = running("a", "b", "c", steps=2)
    world.slow = {"late"}
    newcomer(world, "late")  # the full form of version 2 is under way, for long
    publish_step(world, 3)
    world.work()
    world.slow = {"late", "a"}
    publish_step(world, 4)
    world.work()
    spreading, catch_ups = world.state._publishing.spreading, world.state._publishing._catching_up
    world.say(world.peers["a"], ApplyFailed(form_of(world), "1 chunk is damaged", lacks_base=True))
    taken = catch_ups.takes(world.peers["a"].peer)
    assert taken is not None
    assert spreading is not None
    assert taken.record == spreading.record


def test_others_that_are_behind_share_the_forms_under_way() -> None:
    world = running("a", "b", "c", "d", "e", steps=4)
    for number, stands in enumerate([1, 1, 2, 0, None, None]):
        newcomer(world, f"late-{number}", stands)
    assert [order.base_path for order in orders(world) if order.aside] == ["versions/1-1", "versions/1-2", None]
    world.work()
    assert {worker["serving"]["version"] for worker in world.state.status()["workers"]} == {4}


def test_a_catch_up_goes_on_while_newer_versions_spread() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"late"}
    late = newcomer(world, "late")
    full = taken_order(world)
    for step in (3, 4, 5, 6, 7):
        publish_step(world, step)
        world.work()
    assert world.state.status()["newest_version"]["version"] == 7
    assert not any(message.form == full.form for message in messages(world.peers["seed"], ForgetForm))
    assert DeleteVersion(full.path) not in world.done
    world.say(late, VersionVerified(full.form, Version(2), version_digest(2)))
    assert (taken_order(world).version, taken_order(world).base_path) == (7, full.path)
    assert messages(world.peers["seed"], ForgetForm)[-1].form == full.form


def test_who_lacks_some_of_the_base_takes_the_full_form() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"a"}
    publish_step(world, 3)
    world.work()
    world.slow = set()
    world.say(world.peers["a"], ApplyFailed(form_of(world), "1 chunks are damaged", lacks_base=True))
    assert (taken_order(world).version, taken_order(world).kind) == (3, "full")
    world.work()
    assert world.peers["a"].serving == version_key(3)


def test_a_delta_that_cannot_be_made_is_followed_by_the_full_form() -> None:
    world = running("a", "b")
    publish_step(world, 2)
    delta, seed = orders(world)[-1], world.peers["seed"]
    assert delta.base_path is not None
    world.pending.clear()
    world.say(seed, EncodeFailed(delta.form, "disk full"))
    assert orders(world)[-1] == delta
    world.pass_time(ENCODE_RETRY_S)
    assert orders(world)[-2:] == [delta, delta], "the disk may be less full by now"
    world.pending.clear()
    world.say(seed, EncodeFailed(delta.form, "disk full"))
    assert messages(seed, ForgetForm)[-1].form == delta.form
    assert (orders(world)[-1].version, orders(world)[-1].kind) == (2, "full")
    world.work()
    assert {worker["serving"]["version"] for worker in world.state.status()["workers"]} == {2}


def test_a_damaged_base_is_not_tried_again_and_not_kept() -> None:
    world = running("a", "b", steps=3)
    publish_step(world, 4)
    delta, seed = orders(world)[-1], world.peers["seed"]
    assert delta.base_path is not None
    world.pending.clear()
    world.say(seed, EncodeFailed(delta.form, "it is not what was published", lacks_base=True))
    assert (orders(world)[-1].version, orders(world)[-1].kind) == (4, "full")
    assert DeleteVersion(delta.base_path) in world.done
    world.pending.clear()
    newcomer(world, "late", 3)
    assert [order for order in orders(world) if order.aside] == [], "the full form is for all"


def test_who_leaves_the_spreading_form_has_no_place_in_it() -> None:
    """It would miss the roots of what is still being encoded, and with it all below it."""
    world = running("a", "b", "c", steps=2)
    publish_step(world, 3)
    world.deliver()  # the first segment: there is a plan
    main, a = world.state._publishing.spreading, world.peers["a"]
    assert main is not None
    assert main.has_place(a.peer)
    assert main.totals is None
    world.say(a, ApplyFailed(main.form, "1 chunk is damaged", lacks_base=True))
    assert not main.has_place(a.peer)
    assert messages(a, ForgetForm)[-1].form == main.form
    world.work()
    assert a.serving == version_key(3)
    assert main.has_place(a.peer), "it passes on what it has"


@pytest.mark.parametrize(("how", "newest"), [("fails", 3), ("is quarantined", 8), ("goes", 2)])
def test_who_does_not_get_on_with_a_catch_up_does_not_hold_it(how: str, newest: int) -> None:
    world = running("a", "b", steps=2)
    world.slow = {"late"}
    late = newcomer(world, "late")
    world.drain()
    full = taken_order(world)
    peer = world.state._members.get(late.peer)
    assert peer is not None
    if how == "fails":
        world.say(late, ApplyFailed(full.form, "disk full"))
    assert orders(world)[-1] == full, "while it is of the newest version there is nothing better"
    publish_step(world, 3)
    if how == "is quarantined":
        peer.quarantined = True
    elif how == "goes":
        world.say(late, Goodbye("done"))
    world.work()
    assert full.form in [message.form for message in messages(world.peers["seed"], ForgetForm)]
    publish_step(world, 4)
    for step in (5, 6, 7, 8):
        publish_step(world, step)
    world.work()
    assert DeleteVersion(full.path) in world.done
    assert taken_order(world).version == newest


def test_who_fails_while_a_newer_version_is_there_takes_that() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"late"}
    late = newcomer(world, "late")
    full = taken_order(world)
    publish_step(world, 3)
    world.work()
    assert taken_order(world) == full
    world.say(late, ApplyFailed(full.form, "disk full"))
    assert (taken_order(world).version, taken_order(world).kind) == (3, "full")
    assert messages(late, ForgetForm)[-1].form == full.form


def test_catch_ups_end_when_the_disk_has_no_room_for_their_copies() -> None:
    world = running("a", "b", steps=2, disk_bytes_max=5500)  # the newest, its base, the next, its upload, one more
    world.slow = {"late"}
    late = newcomer(world, "late")
    full = taken_order(world)
    publish_step(world, 3)
    world.work()
    assert taken_order(world) == full, "version 2 is the base of version 3: it takes no more room"
    publish_step(world, 4)
    world.work()
    assert taken_order(world) == full
    world.state._publishing._rules = rules(disk_bytes_max=4500)
    world.state._publishing._catching_up._rules = rules(disk_bytes_max=4500)
    publish_step(world, 5)
    world.drain()
    assert DeleteVersion(full.path) in world.done
    assert (taken_order(world).version, taken_order(world).kind) == (4, "full")
    assert messages(late, ForgetForm)[-1].form == full.form
    texts = [fault["text"] for fault in world.state.status()["faults"]]
    assert "version 2 is not sent on: run.disk_bytes_max has no room for its copies" in texts


def test_the_full_form_of_a_newcomer_is_for_all_when_the_delta_fails() -> None:
    world = running("a", "b", "c")
    publish_step(world, 2)
    delta, seed = orders(world)[-1], world.peers["seed"]
    world.pending.clear()
    newcomer(world, "late")
    full = taken_order(world)
    world.say(seed, EncodeFailed(delta.form, "the base is gone", lacks_base=True))
    assert orders(world)[-1] == full, "it is being made"
    world.work()
    assert {worker["serving"]["version"] for worker in world.state.status()["workers"]} == {2}


def test_catch_ups_that_cannot_be_made_end() -> None:
    world = running("a", "b", steps=4)
    late, seed = newcomer(world, "late", 2), world.peers["seed"]
    world.pending.clear()
    world.say(seed, EncodeFailed(taken_order(world).form, "the base is gone", lacks_base=True))
    assert taken_order(world).kind == "full", "it takes more, but it can be made"
    for _ in range(ENCODE_FAILURES_MAX):
        world.pending.clear()
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
        world.say(seed, EncodeFailed(taken_order(world).form, "disk full"))
        world.pass_time(ENCODE_RETRY_S)
    assert world.stopped is None
    assert late.serving is None
    world.say(late, Heartbeat(0))
    publish_step(world, 5)
    world.work()
    assert late.serving == version_key(5)


def test_a_restart_goes_on_with_the_form_that_was_chosen() -> None:
    world = running("a", "b", steps=3)
    before = orders(world)[-1]
    world.crash()
    assert orders(world)[-1] == before
    world.work()
    world.state.check()
    world.rules = rules(delta=False)
    world.crash()
    assert orders(world)[-1].kind == "full", "the operator does not want deltas any more"
    world.work()
    world.rules = rules()
    world.crash()
    assert orders(world)[-1] == before
    world.work()
    publish_step(world, 4)
    assert bases(world)[-1] == "versions/1-3"


def test_a_seed_that_starts_again_gets_all_its_orders_again() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"late"}
    newcomer(world, "late")
    world.drain()
    main, full = orders(world)[-2:]
    world.connect("seed", kind="seed", slots=0, boot_id="next")
    assert orders(world)[-2:] == [full, main], "it begins with the last"


def taken_order(world: World) -> EncodeVersion:
    """The newest catch-up."""
    return [order for order in orders(world) if order.aside][-1]
