"""A world whose gateway is enabled, and calls to it."""

from dataclasses import replace
from typing import Any

from echo2d.core.base.ids import Version
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.control_messages import HeldLease, LeaseGranted
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.rules.tasks import GatewayRules
from echo2d.core.work.calls.call_work import CALLS
from echo2d.core.work.calls.events import CallAsked, CallId
from echo2d.core.work.leases import kind_of
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World
from tests.support.rollouts import world_of

WAIT_S = 20.0
# Under these rules the run itself needs only one slot.
IDLE: dict[str, Any] = {"staleness_max": 0, "group_size": 1, "trajectories_per_step": 1}


def gateway_world(*slots: int, share: float = 1.0, **changes: Any) -> tuple[World, list[FakePeer]]:
    return world_of(*slots, gateway=GatewayRules(share, WAIT_S), **{**IDLE, **changes})


def call(number: int, **changes: Any) -> CallAsked:
    made = CallAsked(
        CallId(number),
        "app",
        pack_tokens([5, 6]),
        1,
        8,
        Sampling(0.7, 0.9),
        (1,),
        3,
        Version(0),
        f"s{number}",
    )
    return replace(made, **changes)


def of_calls(peer: FakePeer) -> list[LeaseGranted]:
    """The leases that the peer was granted for calls of the gateway, in order."""
    return [m for m in peer.inbox if isinstance(m, LeaseGranted) and kind_of(m.group) == CALLS]


def key_of(lease: LeaseGranted) -> HeldLease:
    return HeldLease(lease.lease, lease.attempt)


def held_world(*slots: int, most: int = 3, **changes: Any) -> tuple[World, list[FakePeer]]:
    """Workers that serve version 0 and may hold `most` versions; there are no tasks, only calls."""
    return gateway_world(*slots, versions_held=most, tinker=("model",), tasks=(), **changes)


def hold(world: World, *versions: int) -> list[CoordinatorAction]:
    """Tell the workers to hold these versions. Returns what was sent."""
    actions: list[CoordinatorAction] = [*world.state._parts.holding.hold([*map(Version, versions)])]
    for action in actions:
        world._perform(action)
    return actions


def publish(world: World, version: int, *workers: FakePeer) -> None:
    """Publish this version; these workers load it."""
    world.publish(version)
    world.drain()
    for worker in workers:
        world.refit(worker)


def exactly(number: int, version: int, **changes: Any) -> CallAsked:
    """A call all of whose tokens this version writes."""
    return call(number, min_version=Version(version), max_version=Version(version), **changes)
