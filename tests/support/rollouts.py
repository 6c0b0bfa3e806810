"""Workers that roll out version 0, and what a test reads from their inboxes and the actions."""

from echo2d.core.cluster.events import Persist
from echo2d.core.protocol.control_messages import LeaseGranted, SampleAnswered
from echo2d.core.rollouts.events import GroupDropped
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, rules

SILENCE_S = 15.0


def world_of(*slots: int, **changes: object) -> tuple[World, list[FakePeer]]:
    """Workers that serve version 0, with groups waiting to be generated."""
    world = World(rules(**changes))
    world.connect("seed", kind="seed", slots=0)
    world.open_session()
    workers = [world.connect(f"w{number}", slots=count) for number, count in enumerate(slots)]
    world.publish(0)
    world.drain()
    for worker in workers:
        world.refit(worker)
    return world, workers


def grants(peer: FakePeer) -> list[LeaseGranted]:
    """The leases that the peer was granted, in order."""
    return [message for message in peer.inbox if isinstance(message, LeaseGranted)]


def answers(peer: FakePeer) -> list[tuple[bool, str]]:
    """Whether each of the peer's results was accepted, and why not."""
    return [(m.accepted, m.reason) for m in peer.inbox if isinstance(m, SampleAnswered)]


def dropped(world: World) -> list[str]:
    """Why groups were dropped in the last event."""
    return [
        a.record.reason for a in world.actions if isinstance(a, Persist) and isinstance(a.record, GroupDropped)
    ]  # fmt: skip
