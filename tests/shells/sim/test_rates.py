"""Credits need no rate: the first version takes as long as later ones, and the rates converge to the true ones."""

import pytest

from echo2d.core.topology.uplink_rates import Rates
from echo2d.plan.broadcast.world import BroadcastOutcome, World
from echo2d.plan.kernel.scenario import MBIT, PeerSpec, Scenario

MIB = 1 << 20
VERSIONS = 4


def fleet(*mbits: float, rtt_s: float = 0.02, mib: int = 100) -> Scenario:
    """The seed's uplink first."""
    peers = tuple(
        PeerSpec(mbit * MBIT, downlink=2000 * MBIT, latency_s=rtt_s / 4) for mbit in mbits
    )
    return Scenario(peers, wire_bytes=mib * MIB, frame_bytes=64 << 10)


EQUAL = fleet(*[100] * 9, rtt_s=0.05, mib=64)
MIXED = fleet(320, 320, 160, 160, 80, 80, 40, 40)
ONE_SLOW = fleet(100, 100, 100, 100, 5, 100, 100, 100)
FAST_SEED = fleet(2000, *(10, 20, 40) * 4)
# Uplinks of volunteers, and three fleets drawn at random.
VOLUNTEERS = fleet(200, 250, 120, 90, 60, 60, 25, 10, mib=96)
DRAWN = (
    fleet(320, 57, 33, 163, 25, 112, 65, 24),
    fleet(320, 102, 23, 81, 25, 27, 78, 286),
    fleet(320, 30, 41, 151, 423, 128, 72, 463),
)


def spread_versions(scenario: Scenario, rates: Rates) -> list[BroadcastOutcome]:
    outcomes = []
    for _ in range(VERSIONS):
        outcomes.append(World(scenario, rates=rates).run())
        rates.check()
    return outcomes


@pytest.mark.parametrize(
    ("scenario", "ratio"),
    [
        (EQUAL, 1.06),
        (MIXED, 1.05),
        (VOLUNTEERS, 1.05),
        *((drawn, 1.07) for drawn in DRAWN),
        (ONE_SLOW, 1.04),
        (FAST_SEED, 1.1),
    ],
)
def test_the_first_version_is_near_the_bound_though_no_rate_is_known(
    scenario: Scenario, ratio: float
) -> None:
    outcome = World(scenario, rates=Rates()).run()
    assert outcome.t_verify_s < ratio * World(scenario).run().bound_s


@pytest.mark.parametrize("scenario", [EQUAL, MIXED, ONE_SLOW, FAST_SEED])
def test_later_versions_take_no_longer_and_the_rates_converge_to_the_true_ones(
    scenario: Scenario,
) -> None:
    rates = Rates()
    times = [outcome.t_verify_s for outcome in spread_versions(scenario, rates)]
    assert max(times) < 1.03 * min(times)
    for node in World(scenario)._nodes:
        known = rates.uplink(node.peer)
        assert known is not None
        assert 0.75 * node.spec.uplink < known < 1.25 * node.spec.uplink
