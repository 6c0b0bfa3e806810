"""Peers of a plan for tests, with names and, by default, links of 10 MB/s without delay."""

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.plan import Job, PeerFacts, Plan

MB = 10**6
JOB = Job(FormId("f" * 32), 1000 * MB, MB)
ONE = PlanId(1)


def facts(
    name: str,
    uplink: float | None = 10 * MB,
    downlink: float | None = 10 * MB,
    *,
    open_: bool = True,
    receive_only: bool = False,
    latency_s: float | None = 0.0,
) -> PeerFacts:
    address = Address(name, 1) if open_ else None
    return PeerFacts(PeerId(name), uplink, downlink, address, receive_only, latency_s)


SEED = facts("seed")
ABCD = [facts(name) for name in "abcd"]


def order(plan: Plan, stripe: int = 0) -> str:
    """The peers of a stripe by their depth."""
    depths = plan.stripes[stripe].tree.depths()
    peers: list[PeerId] = sorted(depths.keys() - {plan.root}, key=lambda peer: depths[peer])
    return "".join(peers)
