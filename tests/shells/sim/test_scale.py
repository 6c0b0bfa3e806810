"""Large swarms on mixed lines, whose peers leave without a message while others join."""

import pytest

from echo2d.plan.broadcast.world import CHECK_EVERY_LONG
from echo2d.plan.kernel.scenario_file import load_scenario
from tests.support.paths import REPO
from tests.support.scenarios import Play

MIXED = REPO / "scenarios" / "mixed.toml"


@pytest.mark.parametrize(
    ("size", "ratio_max"), [("80MB", 1.35), pytest.param("400MB", 1.35, marks=pytest.mark.nightly)]
)
def test_sixty_four_peers_with_any_uplinks_get_every_frame(
    play: Play, size: str, ratio_max: float
) -> None:
    """Five times the churn of the file, so that somebody does leave: found by those below, within a second or two."""
    outcome = play(load_scenario(MIXED, bytes=size, churn=0.05), check_every=CHECK_EVERY_LONG)
    assert outcome.verified_peers == 64
    assert outcome.ratio < ratio_max
    assert outcome.seed_copies < 7


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("peers", "size"), [(256, "1GiB"), (1000, "80MB"), (1000, "1GiB")])
def test_hundreds_of_peers_get_every_frame(play: Play, peers: int, size: str) -> None:
    """By the churn of the file, which is a handful of peers in each."""
    outcome = play(load_scenario(MIXED, peers=peers, bytes=size), check_every=10 * CHECK_EVERY_LONG)
    assert outcome.verified_peers == peers
    assert outcome.ratio < 1.5
    assert outcome.seed_copies < 8
