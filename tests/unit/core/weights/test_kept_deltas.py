"""The kept deltas that lead from one snapshot to another."""

import pytest

from echo2d.core.weights.kept_deltas import KeptDelta, shortest_chain
from tests.support.coordinator_world import version_digest


def delta(base: int, made: int, wire_bytes: int = 10) -> KeptDelta:
    return KeptDelta(version_digest(base), version_digest(made), wire_bytes)


@pytest.mark.parametrize(
    ("kept", "made", "places"),
    [
        ([delta(1, 2)], 2, [0]),
        ([delta(2, 3), delta(1, 2)], 3, [1, 0]),
        ([delta(1, 2), delta(3, 4)], 4, None),  # a link is missing
        ([delta(2, 1)], 2, None),  # they lead one way only
        ([], 2, None),
        ([delta(1, 2), delta(2, 3), delta(1, 3, 15)], 3, [2]),  # fewer bytes
        ([delta(1, 2), delta(2, 3), delta(1, 3, 25)], 3, [0, 1]),
        ([delta(1, 2), delta(2, 1), delta(2, 3)], 3, [0, 2]),  # a learner went back
        ([delta(1, 2)], 1, None),  # it stands there already
    ],
)
def test_the_shortest_chain_of_kept_deltas_is_found(
    kept: list[KeptDelta], made: int, places: list[int] | None
) -> None:
    chain = shortest_chain(kept, version_digest(1), version_digest(made))
    assert chain == (None if places is None else tuple(kept[place] for place in places))
