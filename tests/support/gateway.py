"""A world whose gateway is enabled, and calls to it."""

from dataclasses import replace
from typing import Any

from echo2d.core.base.ids import Version
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
