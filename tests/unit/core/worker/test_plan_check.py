"""Parts of plans that cannot be followed."""

import math
from dataclasses import replace

import pytest

from echo2d.core.base.ids import FormId, Generation, PeerId, PlanId, StripeId
from echo2d.core.protocol.control_messages import Address, EdgePeer, PlanEdges, StripeEdge
from echo2d.core.topology.plan import STRIPES_MAX
from echo2d.core.worker.plan_check import edges_fault

ME, UP, DOWN = PeerId("me"), PeerId("up"), PeerId("down")
PARENT = EdgePeer(UP, Address("10.0.0.1", 4000), dial=True, secret=bytes(32))
CHILD = EdgePeer(DOWN, None, dial=False, secret=bytes(32))
PLACE = StripeEdge(StripeId(0), UP, (DOWN,))
GOOD = PlanEdges(FormId("f"), PlanId(1), Generation(0), (PLACE,), (PARENT, CHILD))


def test_a_good_one() -> None:
    assert edges_fault(GOOD, ME) == ""
    assert edges_fault(replace(GOOD, sources=(UP,)), ME) == ""
    assert edges_fault(replace(GOOD, stripes=(), peers=()), ME) == ""
    assert edges_fault(replace(GOOD, stripes=(replace(PLACE, spare=1.0),)), ME) == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(GOOD, stripes=(PLACE, PLACE)), "the same"),
        (
            replace(
                GOOD,
                stripes=tuple(replace(PLACE, stripe=StripeId(n)) for n in range(STRIPES_MAX + 1)),
            ),
            "too many",
        ),
        (replace(GOOD, peers=(PARENT, PARENT, CHILD)), "linked with"),
        (replace(GOOD, peers=(PARENT, CHILD, replace(CHILD, peer=ME))), "linked with"),
        (replace(GOOD, peers=(PARENT, replace(CHILD, secret=b"short"))), "linked with"),
        (replace(GOOD, peers=(PARENT, replace(CHILD, dial=True))), "linked with"),
        (
            replace(GOOD, peers=(replace(PARENT, address=Address("169.254.169.254", 80)), CHILD)),
            "linked with",
        ),
        (
            replace(GOOD, peers=(replace(PARENT, address=Address("10.0.0.1", 1 << 40)), CHILD)),
            "linked with",
        ),
        (replace(GOOD, stripes=(PLACE, StripeEdge(StripeId(1), None, ()))), "begins here"),
        (replace(GOOD, peers=(PARENT,)), "impossible"),
        (replace(GOOD, sources=(PeerId("far"),)), "no peer of it"),
        (replace(GOOD, stripes=(replace(PLACE, parent=DOWN),)), "impossible"),
        *(
            (replace(GOOD, stripes=(replace(PLACE, spare=share),)), "impossible")
            for share in (-0.1, 1.1, math.nan, math.inf)
        ),
    ],
)
def test_a_bad_one(wrong: PlanEdges, says: str) -> None:
    assert says in edges_fault(wrong, ME)
