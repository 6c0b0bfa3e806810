"""A world in which a version is being published, for tests of the messages about it."""

from typing import Any

from echo2d.core.base.ids import FormId
from echo2d.core.cluster.events import PeerSaid
from echo2d.core.protocol.control_messages import (
    FormEncoded,
    SegmentEncoded,
)
from echo2d.core.status.schema import BroadcastStatus
from tests.support.coordinator_world import World, form_of, rules


def published(*workers: str, kind: str = "chain", **changes: Any) -> World:
    """A world in which version 0 is being encoded, and nothing of it has arrived yet. changes: of the rules."""
    world = World(rules(shape=kind, **changes))
    world.connect("seed", kind="seed", slots=0)
    for name in workers:
        world.connect(name)
    world.drain()
    world.open_session()
    world.publish(0)
    world.pending = [event for event in world.pending if isinstance(event, PeerSaid)]
    return world


def broadcast(world: World) -> BroadcastStatus:
    found = world.state.status().broadcast
    assert found is not None
    return found


def publish_again(world: World) -> FormId:
    """Publish version 0 of a new epoch. Returns the form that spread before it."""
    form = form_of(world)
    world.open_session()
    world.publish(0)
    return form


def deliver_seed(world: World) -> None:
    """Deliver the seed's reports, but nothing that follows from them."""
    for event in list(world.pending):
        if isinstance(event, PeerSaid) and isinstance(event.message, SegmentEncoded | FormEncoded):
            world.pending.remove(event)
            world.handle(event)
