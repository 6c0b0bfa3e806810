"""The pace of each of several links: nothing is lost, and nobody who sends gets less than was planned."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.pacing import share_out

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
PLANNED = {A: 6.0, B: 3.0, C: 1.0}


@pytest.mark.parametrize(
    ("sending", "paces"),
    [
        ((A, B, C), {A: 6.0, B: 3.0, C: 1.0}),
        ((B, C), {A: 6.0, B: 7.5, C: 2.5}),
        ((C,), {A: 6.0, B: 3.0, C: 10.0}),
        ((), PLANNED),
    ],
)
def test_those_that_send_share_all_of_it(
    sending: tuple[PeerId, ...], paces: dict[PeerId, float]
) -> None:
    assert share_out(PLANNED, sending) == pytest.approx(paces)


def test_without_a_plan_there_is_nothing_to_share() -> None:
    assert share_out({}, ()) == {}
