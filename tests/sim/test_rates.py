"""Version after version by measured rates alone: they come to be the truth, and nothing becomes slower by it."""

import pytest

from echo2d.core.topology.uplink_rates import Rates
from echo2d.sim.broadcast.world import BroadcastOutcome, World
from echo2d.sim.kernel.scenario import MBIT, PeerSpec, Scenario

MIB = 1 << 20
VERSIONS = 6
SLACK = 1.13  # for pacing, and plans that differ a little from version to version
SLOWER = 1.09  # than the first one, by which the others are planned, for the same reasons


def fleet(*mbits: float, rtt_s: float = 0.02, mib: int = 100) -> Scenario:
    peers = tuple(
        PeerSpec(mbit * MBIT, downlink=2000 * MBIT, latency_s=rtt_s / 4) for mbit in mbits
    )
    return Scenario(peers, wire_bytes=mib * MIB, frame_bytes=64 << 10)


EQUAL = fleet(*[100] * 9, rtt_s=0.05, mib=64)
MIXED = fleet(320, 320, 160, 160, 80, 80, 40, 40)
ONE_SLOW = fleet(100, 100, 100, 100, 5, 100, 100, 100)
FAST_SEED = fleet(2000, *(10, 20, 40) * 4)


def spread_versions(scenario: Scenario, rates: Rates) -> list[BroadcastOutcome]:
    outcomes = []
    for _ in range(VERSIONS):
        outcomes.append(World(scenario, rates=rates).run())
        rates.check()
    return outcomes


@pytest.mark.parametrize(
    ("scenario", "first"), [(EQUAL, 1.1), (MIXED, 3.0), (ONE_SLOW, 1.8), (FAST_SEED, 1.8)]
)
def test_versions_take_little_more_than_by_a_planner_that_knows_every_rate(
    scenario: Scenario, first: float
) -> None:
    """first: of a version of whose peers nothing is known, in the planner's times. Pacing makes the others longer."""
    rates = Rates()
    ideal_s = World(scenario).run().t_verify_s
    times = [outcome.t_verify_s for outcome in spread_versions(scenario, rates)]
    assert times[0] < first * ideal_s
    assert max(times[1:]) < SLACK * ideal_s
    assert max(times[1:]) < SLOWER * times[0]
    for node in World(scenario)._nodes:
        known = rates.uplink(node.peer)
        assert known is None or known < 1.4 * node.spec.uplink
        assert known is None or rates.pace(node.peer) is None or known > 0.9 * node.spec.uplink


def test_a_chain_below_a_slow_link_is_not_taken_for_slow() -> None:
    """The seed has 20 Mbit/s, then a faster one: the relays, starved before, are not paced down to that."""
    rates = Rates()
    spread_versions(fleet(20, *[100] * 4, mib=32), rates)
    assert [rates.pace(node.peer) for node in World(EQUAL)._nodes[1:5]] == [None] * 4
    ideal_s = World(fleet(100, *[100] * 4, mib=32)).run().t_verify_s
    for _ in range(12):
        outcome = World(fleet(100, *[100] * 4, mib=32), rates=rates).run()
    assert outcome.t_verify_s < 1.1 * ideal_s
