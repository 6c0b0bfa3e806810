"""Catch-ups: what ends them, and what is tried instead; through the whole machine."""

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.broadcast.catch_up_policy import FULL_LAG_MAX, FULLS_MAX
from echo2d.core.broadcast.publishing import ENCODE_FAILURES_MAX, ENCODE_RETRY_S
from echo2d.core.cluster.events import CopyLost, DeleteVersion
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    DeltasKept,
    EncodeFailed,
    ForgetForm,
    Goodbye,
    Heartbeat,
    VersionVerified,
)
from echo2d.core.weights.kept_deltas import KeptDelta
from tests.support.catch_up import bases, newcomer, orders, running, served, taken_order
from tests.support.coordinator_world import (
    form_of,
    messages,
    publish_step,
    rules,
    version_digest,
    version_key,
)


def test_a_catch_up_goes_on_while_newer_versions_spread() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"late"}
    late = newcomer(world, "late")
    full = taken_order(world)
    for step in (3, 4, 5, 6, 7):
        publish_step(world, step)
        world.work()
    assert world.newest_version == 7
    assert not any(
        message.form == full.form for message in messages(world.peers["seed"], ForgetForm)
    )
    assert DeleteVersion(full.path) not in world.done
    world.say(late, VersionVerified(full.form, Version(2), version_digest(2)))
    assert (taken_order(world).version, taken_order(world).base_path) == (7, full.path)
    assert messages(world.peers["seed"], ForgetForm)[-1].form == full.form


def test_a_peer_that_lacks_some_of_the_base_takes_the_full_form() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"a"}
    publish_step(world, 3)
    world.work()
    world.slow = set()
    world.say(
        world.peers["a"], ApplyFailed(form_of(world), "1 chunks are damaged", lacks_base=True)
    )
    assert (taken_order(world).version, taken_order(world).kind) == (3, "full")
    world.work()
    assert world.peers["a"].serving == version_key(3)


def test_the_full_form_replaces_a_delta_that_cannot_be_made() -> None:
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
    assert served(world) == {2}


def test_a_damaged_base_is_neither_tried_again_nor_kept() -> None:
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


def test_a_lost_copy_is_no_longer_used_as_a_base() -> None:
    world = running("a", "b", steps=2)
    base = orders(world)[-1].path
    world.handle(CopyLost(base))
    assert DeleteVersion(base) in world.done, "the rest of it"
    publish_step(world, 3)
    assert (orders(world)[-1].version, orders(world)[-1].kind) == (3, "full")
    world.work()
    assert served(world) == {3}
    world.handle(CopyLost("versions/unknown"))
    assert world.actions == []


def test_a_peer_that_leaves_the_spreading_form_has_no_place_in_it() -> None:
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
def test_a_peer_without_progress_does_not_keep_a_catch_up_open(how: str, newest: int) -> None:
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
        peer.reach.quarantined = True
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


def test_a_peer_that_fails_takes_a_newer_version_if_there_is_one() -> None:
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
    world = running(
        "a", "b", steps=2, disk_bytes_max=5500
    )  # the newest, its base, the next, its upload, one more
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
    world.state._publishing._catch_ups._rules = rules(disk_bytes_max=4500)
    publish_step(world, 5)
    world.drain()
    assert DeleteVersion(full.path) in world.done
    assert (taken_order(world).version, taken_order(world).kind) == (4, "full")
    assert messages(late, ForgetForm)[-1].form == full.form
    texts = [fault.text for fault in world.state.status().faults]
    assert "version 2 is not sent on: run.disk_bytes_max has no room for its copies" in texts


def test_workers_that_never_finish_do_not_keep_newcomers_waiting_for_ever() -> None:
    world = running("a", "b", "c", "d", steps=1)
    for step in range(2, 2 + FULLS_MAX):
        publish_step(world, step)
        world.work()
        world.slow |= {f"slow {step}"}
        newcomer(world, f"slow {step}")
    publish_step(world, 2 + FULLS_MAX)
    world.work()
    late = newcomer(world, "late")
    world.work()
    assert world.peers["late"].serving is None, "FULLS_MAX older full forms are under way"
    for step in range(3 + FULLS_MAX, 3 + FULL_LAG_MAX):
        publish_step(world, step)
        world.work()
    assert world.peers["late"].serving is None
    publish_step(world, 3 + FULL_LAG_MAX)
    world.work()
    assert late.serving == version_key(3 + FULL_LAG_MAX)
    texts = [fault.text for fault in world.state.status().faults]
    assert "version 2 is not sent on: it is 8 publishes old, and other peers wait" in texts


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
    assert served(world) == {2}


def test_a_catch_up_whose_form_cannot_be_made_ends() -> None:
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


def test_a_restarted_coordinator_continues_with_the_chosen_form() -> None:
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


def test_a_restarted_seed_gets_all_its_orders_again() -> None:
    world = running("a", "b", steps=2)
    world.slow = {"late"}
    newcomer(world, "late")
    world.drain()
    main, full = orders(world)[-2:]
    world.connect("seed", kind="seed", slots=0, boot_id="next")
    assert orders(world)[-2:] == [full, main], "it begins with the last"


def test_a_peer_that_cannot_be_given_a_composed_delta_takes_the_full_form() -> None:
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
