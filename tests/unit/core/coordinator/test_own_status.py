"""The status for the owner of a token: only the owner's boxes, and nothing that helps to lie."""

import json
from dataclasses import replace

from echo2d.core.base.ids import PeerId
from echo2d.core.coordinator.own_status import own_status
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.status.json_form import plain, read_own_status
from echo2d.core.status.schema import EarnedStatus, OwnStatus, Status
from tests.support.coordinator_world import World, train


def run() -> tuple[World, Status]:
    """A learner, the seed, a relay peer, and workers a and b that serve version 0."""
    world = World()
    world.connect("seed", kind="seed")
    world.connect("r", kind="relay")
    for name in ("a", "b"):
        world.connect(name)
    train(world, 2)
    world.drain()
    world.refit(world.peers["a"])
    world.drain()
    return world, world.state.status(now=world.now)


def own(world: World, status: Status, *names: str, convicted: tuple[str, ...] = ()) -> OwnStatus:
    peers = [world.peers[name].peer for name in names]
    guilty = [world.peers[name].peer for name in convicted]
    return own_status(status, peers, guilty, world.state.earned(peers))


def test_an_owner_sees_what_the_operator_sees_of_the_same_box() -> None:
    world, status = run()
    (row,) = own(world, status, "a").peers
    (worker,) = (each for each in status.workers if each.name == "a")
    for field in (
        "id",
        "serving",
        "lag",
        "slots",
        "running",
        "accepted",
        "trained",
        "mu",
        "active",
    ):
        assert getattr(row, field) == getattr(worker, field)
    earned = own(world, status, "a").earned
    assert (earned.accepted_trajectories, earned.trained_trajectories) == (
        row.accepted,
        row.trained,
    )
    assert row.trained > 0


def test_the_status_of_an_owner_shows_nothing_of_other_boxes() -> None:
    world, status = run()
    found = own(world, status, "a")
    text = json.dumps(plain(found))
    for other in ("b", "r", "seed"):
        assert f'"{world.peers[other].peer}"' not in text
    assert [row.name for row in found.peers] == ["a"]
    assert own(world, status).peers == ()


def test_a_relay_peer_has_a_row_too() -> None:
    world, status = run()
    (row,) = own(world, status, "r").peers
    assert (row.kind, row.slots, row.serving, row.attention) == ("relay", 0, None, ())


def test_a_box_that_never_came_or_is_convicted_is_named() -> None:
    world, status = run()
    stranger = PeerId("f" * 32)
    found = own_status(
        status,
        [stranger, world.peers["a"].peer],
        [stranger, world.peers["b"].peer],
        EarnedStatus(),
    )
    assert (found.absent, found.convicted) == ((stranger,), (stranger,))
    assert [row.convicted for row in own(world, status, "a", convicted=("a",)).peers] == [True]


def test_findings_of_an_audit_are_shown_only_to_the_operator() -> None:
    world, status = run()
    workers = tuple(
        replace(
            worker, learner_k=9.0, standing="suspected", audited=80, flagged=6, verdict="5 of 5"
        )
        for worker in status.workers
    )
    (row,) = own(world, replace(status, workers=workers), "a").peers
    assert row.attention == ()
    assert not {"standing", "verdict", "audited", "flagged", "learner_k"} & plain(row).keys()


def test_the_status_of_an_owner_has_the_alerts_about_its_boxes() -> None:
    world, _ = run()
    world.now += 9.0
    for name in ("seed", "r", "b"):
        world.say(world.peers[name], Heartbeat(0))
    status = world.state.status(now=world.now)
    (row,) = own(world, status, "a").peers
    (words,) = row.attention
    assert words.startswith("silent for 9 s: its ")
    (other,) = own(world, status, "b").peers
    assert other.attention == ()


def test_the_status_of_an_owner_round_trips_through_json() -> None:
    world, status = run()
    found = own(world, status, "a", "b", "r", convicted=("b",))
    assert read_own_status(json.loads(json.dumps(plain(found)))) == found
