"""Looks at a run in a fraction of a millisecond: the facts of the dashboard that change all the time.

Making a whole `Status` of some hundred workers every two seconds would take too long. The time that
a glance takes does not depend on the number of workers, apart from how far each of them is with the
spreading version (`SpreadView`), which takes two look-ups per peer.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.coordinator.parts import CoordinatorParts
from echo2d.core.topology.plan import Plan
from echo2d.core.work.leases import TRAINING


@dataclass(frozen=True, slots=True)
class SpreadView:
    """How far the peers of a plan are, in the order of `TreeView.peers`."""

    version: int
    plan: str  # names the plan and its generation
    wire_bytes: int  # estimated until the form is whole
    whole: bool
    received: tuple[int, ...]
    # One character per peer: "v" has verified the version, "x" failed to apply it, "." neither.
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """See the module docstring; the names are those of `Status`."""

    committed_step: int
    open_step: int
    newest_version: int | None
    groups_buffered: int
    groups_in_flight: int
    leases: int
    tokens_under_way: int
    tokens_accepted: int
    trajectories_trained: int
    trajectories_dropped: int
    bubble_ratio: float | None
    spread: SpreadView | None


@dataclass(frozen=True, slots=True)
class TreeView:
    """One tree of a plan."""

    plan: str
    shape: str
    predicted_s: float
    stripe: int
    # The share of the frames that each tree of the plan carries; this tree is number `stripe`.
    weights: tuple[float, ...]
    peers: tuple[PeerId, ...]  # the root first
    # The parent of every peer but the root, as an index into `peers`.
    parents: tuple[int, ...]
    uplinks: tuple[float | None, ...]  # bytes/s of the peers


def make_glance(parts: CoordinatorParts) -> Glance:
    newest, spreading = parts.versions.newest, parts.publishing.spreading
    return Glance(
        committed_step=parts.staleness.committed,
        open_step=parts.staleness.open_step,
        newest_version=None if newest is None else newest.version,
        groups_buffered=parts.staleness.buffered,
        groups_in_flight=parts.groups.in_flight,
        leases=parts.scheduler.leases.count(TRAINING),
        tokens_under_way=parts.scheduler.leases.tokens_under_way,
        tokens_accepted=parts.statistics.tokens_accepted,
        trajectories_trained=parts.statistics.trajectories_trained,
        trajectories_dropped=parts.statistics.trajectories_dropped,
        bubble_ratio=parts.statistics.learner.bubble_ratio,
        spread=None if spreading is None else _spread(spreading),
    )


def make_tree(spreading: Transmission, stripe: int) -> TreeView | None:
    """The tree of this stripe, or of the first if the plan has fewer; None: there is no plan yet."""
    plan = spreading.plan
    if plan is None:
        return None
    stripe = stripe if stripe < len(plan.stripes) else 0
    places = {facts.peer: place for place, facts in enumerate(plan.peers)}
    parents = plan.stripes[stripe].tree.parents
    return TreeView(
        _name(plan),
        plan.shape,
        plan.predicted_s,
        stripe,
        tuple(each.weight for each in plan.stripes),
        tuple(places),
        tuple(places[parents[peer]] for peer in places if peer != plan.root),
        tuple(facts.uplink for facts in plan.peers),
    )


def _spread(spreading: Transmission) -> SpreadView | None:
    plan, totals, received = spreading.plan, spreading.totals, spreading.received
    if plan is None:
        return None
    peers = [facts.peer for facts in plan.peers]
    return SpreadView(
        spreading.record.version,
        _name(plan),
        spreading.expected_bytes if totals is None else totals.wire_bytes,
        totals is not None,
        tuple(received[peer][0] if peer in received else 0 for peer in peers),
        "".join(
            "v" if peer in spreading.verified else "x" if peer in spreading.failed else "."
            for peer in peers
        ),
    )


def _name(plan: Plan) -> str:
    return f"{plan.plan_id}.{plan.generation}"
