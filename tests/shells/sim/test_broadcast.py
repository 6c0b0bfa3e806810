"""Whole broadcasts in virtual time: every living peer ends with everything, soon, and the same way each time."""

import time
from dataclasses import replace
from statistics import median
from typing import Literal

import pytest

from echo2d.plan.broadcast.world import BroadcastStuckError, World
from echo2d.plan.kernel.scenario import MBIT, PeerCrash, PeerSpec, Scenario
from tests.support.scenarios import Play, all_troubles, random_scenario, troubled

MIB = 1 << 20
LINK = PeerSpec()
CHAIN = Scenario.equal(8, LINK, wire_bytes=64 * MIB, shape="chain")


def test_a_chain_of_eight_is_near_the_bound_and_the_seed_sends_one_copy(play: Play) -> None:
    outcome = play(CHAIN)
    assert outcome.ratio < 1.1
    assert outcome.seed_copies < 1.01
    assert outcome.duplicates == 0
    assert outcome.t_verify_s == pytest.approx(outcome.predicted_s, rel=0.1)


def test_rotated_chains_do_as_well_as_one(play: Play) -> None:
    outcome = play(replace(CHAIN, chains=3))
    assert outcome.ratio < 1.1
    assert outcome.seed_copies < 1.01


def test_a_star_costs_the_seed_a_copy_per_peer(play: Play) -> None:
    outcome = play(replace(CHAIN, shape="star"))
    assert outcome.seed_copies == pytest.approx(8, rel=0.01)
    assert outcome.t_verify_s == pytest.approx(outcome.predicted_s, rel=0.1)


def test_frames_leave_while_later_segments_are_still_encoded(play: Play) -> None:
    """Encoding takes 8 s and sending 21 s: together they take little more than sending alone."""
    scenario = replace(CHAIN, wire_bytes=256 * MIB, encode_rate=32 * MIB)
    assert play(scenario).t_verify_s < 21.5 + 2 + 1.5


def test_auto_sends_one_copy_over_a_slow_uplink_and_many_over_a_fast_one(play: Play) -> None:
    thin = replace(CHAIN, shape="auto")
    fat = replace(thin, peers=(PeerSpec(uplink=10_000 * MBIT), *thin.peers[1:]))
    assert play(thin).seed_copies < 1.05
    assert play(fat).seed_copies > 6.5


@pytest.mark.parametrize(("within_s", "copies"), [(None, 7.0), (1000.0, 1.0), (14.0, 2.25)])
def test_a_seed_sends_the_copies_that_its_plan_has_time_for(
    play: Play, within_s: float | None, copies: float
) -> None:
    """Its uplink could feed all eight at once: 3 s instead of 17 s. The end game adds a few frames."""
    outcome = play(replace(FAT_SEED, within_s=within_s))
    assert outcome.seed_copies == pytest.approx(copies, rel=0.05)
    assert within_s is None or outcome.t_verify_s < 1.1 * within_s


def test_a_lost_relay_and_newcomers_cost_an_unhurried_seed_a_part_of_a_copy(
    play: Play,
) -> None:
    spare = replace(FAT_SEED, within_s=1000.0)
    assert play(replace(spare, faults=(PeerCrash(5, at_s=5.0),))).seed_copies < 1.3
    late = tuple(replace(spare.peers[1], joins_at_s=at_s) for at_s in (3.0, 6.0))
    assert play(replace(spare, peers=(*spare.peers, *late))).seed_copies < 1.02


def fleet(*mbits: float, **others: object) -> Scenario:
    """A seed and peers with these uplinks, all dialable, RTT 20 ms, downlinks no obstacle."""
    peers = tuple(
        PeerSpec(uplink=mbit * MBIT, downlink=2000 * MBIT, latency_s=0.005) for mbit in mbits
    )
    return Scenario(peers, wire_bytes=100 * MIB, frame_bytes=64 << 10, **others)  # type: ignore[arg-type]


FAT_SEED = fleet(2000, 40, 40, 40, 40, 80, 80, 20, 20)
MIXED = fleet(320, 320, 160, 160, 80, 80, 40, 40)


def test_all_unequal_uplinks_are_used(play: Play) -> None:
    """Chains would go at the pace of the slowest; a frame is bound to a stripe when that one has its turn."""
    outcome = play(MIXED)
    assert outcome.ratio < 1.08
    assert outcome.t_verify_s == pytest.approx(outcome.predicted_s, rel=0.05)


def test_one_slow_uplink_among_fast_ones_delays_nothing(play: Play) -> None:
    outcome = play(fleet(100, 100, 100, 100, 5, 100, 100, 100))
    assert outcome.ratio < 1.06
    assert outcome.seed_copies < 1.02


def test_a_fast_seed_sends_directly_what_its_peers_cannot_pass_on(play: Play) -> None:
    outcome = play(fleet(2000, *(10, 20, 40) * 4))
    assert outcome.ratio < 1.1
    assert outcome.seed_copies > 8


@pytest.mark.parametrize(("silent", "more_s"), [(False, 2.0), (True, 4.0)])
def test_a_mixed_fleet_finishes_soon_although_its_fastest_relay_dies(
    play: Play, *, silent: bool, more_s: float
) -> None:
    """Of the 680 Mbit/s of uplink that are left, each of six peers gets its part."""
    left_s = 100 * MIB / ((320 + 160 + 160 + 80 + 80 + 40 + 40) * MBIT / 6)
    outcome = play(replace(MIXED, faults=(PeerCrash(1, 2.5, silent=silent),)))
    assert set(outcome.arrived_s) == set(range(2, 8))
    assert outcome.t_verify_s < left_s + more_s


def test_a_mixed_fleet_finishes_soon_although_half_of_it_cannot_be_dialled(play: Play) -> None:
    hidden = tuple(
        replace(spec, reachable=number % 2 == 0) for number, spec in enumerate(MIXED.peers)
    )
    assert play(replace(MIXED, peers=hidden)).ratio < 1.25


@pytest.mark.parametrize("chains", [1, 3])
def test_a_relay_that_dies_in_the_middle_of_a_chain_costs_less_than_a_second(
    play: Play, chains: int
) -> None:
    outcome = play(replace(CHAIN, chains=chains, faults=(PeerCrash(4, 3.0),)))
    assert set(outcome.arrived_s) == {1, 2, 3, 5, 6, 7, 8}
    assert outcome.t_verify_s < play(replace(CHAIN, chains=chains)).t_verify_s + 1
    assert outcome.seed_copies < 1.01


@pytest.mark.parametrize("chains", [1, 3])
def test_a_relay_that_falls_silent_is_found_by_its_children(play: Play, chains: int) -> None:
    """Long before the coordinator misses it: stalled after 1 s, decided within another."""
    outcome = play(replace(CHAIN, chains=chains, faults=(PeerCrash(4, 3.0, silent=True),)))
    assert outcome.t_verify_s < play(CHAIN).t_verify_s + 2.5
    assert outcome.generations <= 2
    assert outcome.seed_copies < 1.1


def test_a_relay_that_comes_back_reuses_its_disk(play: Play) -> None:
    outcome = play(replace(CHAIN, faults=(PeerCrash(4, 5.0, back_s=30.0),)))
    assert outcome.arrived_s[4] < 30.0 + 2  # the whole form would take 5.4 s
    assert outcome.duplicates == 0


def test_a_seed_that_comes_back_sends_the_frames_that_no_peer_has(play: Play) -> None:
    outcome = play(replace(CHAIN, faults=(PeerCrash(0, 3.0, back_s=4.0),)))
    assert outcome.seed_copies < 1.1
    assert outcome.t_verify_s < play(CHAIN).t_verify_s + 2


@pytest.mark.parametrize("shape", ["chain", "auto"])
@pytest.mark.parametrize("culprit", [1, 4])
def test_a_relay_that_corrupts_frames_delays_little_and_no_honest_peer_is_quarantined(
    play: Play, shape: Literal["chain", "auto"], culprit: int
) -> None:
    peers = [replace(LINK, corrupts_every=20 if number == culprit else 0) for number in range(9)]
    outcome = play(replace(CHAIN, peers=tuple(peers), shape=shape, chains=3))
    assert len(outcome.arrived_s) == 8
    assert outcome.ratio < 1.2
    assert set(outcome.quarantined) <= {culprit}


@pytest.mark.parametrize("relay", range(1, 9))
@pytest.mark.parametrize("shape", ["chain", "auto"])
def test_equal_peers_finish_soon_although_a_relay_in_the_middle_dies(
    play: Play, relay: int, shape: Literal["chain", "auto"]
) -> None:
    """The bound of those who are left is the same: B/u."""
    dies = replace(CHAIN, shape=shape, faults=(PeerCrash(relay, 2.7),))
    assert play(dies).ratio < 1.2
    silent = play(replace(dies, faults=(PeerCrash(relay, 2.7, silent=True),)))
    assert silent.t_verify_s < silent.bound_s + 3


def test_packet_loss_delays_frames_but_all_arrive(play: Play) -> None:
    lossy = Scenario.equal(8, replace(LINK, loss=0.001), wire_bytes=64 * MIB, shape="chain")
    assert play(lossy).ratio < 1.5


def test_a_slow_peer_delays_no_other_peer_in_a_star(play: Play) -> None:
    """I6: the seed's uplink has room for all; one peer's downlink is a hundredth of the others'."""
    peers = (PeerSpec(uplink=1000 * MBIT), *(LINK,) * 4, replace(LINK, downlink=1 * MBIT))
    arrived = play(Scenario(peers, wire_bytes=8 * MIB, shape="star")).arrived_s
    assert max(arrived[number] for number in range(1, 5)) < 1.2
    assert arrived[5] > 60


def test_a_slow_uplink_is_a_leaf_in_a_chain(play: Play) -> None:
    peers = (LINK, LINK, replace(LINK, uplink=5 * MBIT), LINK, LINK)
    outcome = play(Scenario(peers, wire_bytes=32 * MIB, shape="chain"))
    assert outcome.t_verify_s < 1.2 * 32 * MIB / LINK.uplink


def test_a_newcomer_gets_the_spreading_form_without_delaying_it(play: Play) -> None:
    newcomer = replace(LINK, joins_at_s=3.0)
    outcome = play(replace(CHAIN, peers=(*CHAIN.peers, newcomer)))
    assert outcome.arrived_s[9] < 3.0 + 5.4 + 1.5
    assert outcome.t_verify_s < 1.1 * outcome.bound_s
    assert outcome.seed_copies < 1.01


@pytest.mark.parametrize("shape", ["chain", "star", "auto"])
@pytest.mark.parametrize(
    ("mbits", "count", "ratio"), [(100, 1, 1.05), (100, 2, 1.05), (1000, 1, 1.4), (1000, 2, 1.2)]
)
def test_a_late_peer_fetches_from_all_peers_at_once(
    play: Play, shape: Literal["chain", "star", "auto"], mbits: float, count: int, ratio: float
) -> None:
    """As fast as its downlink takes it, or eight uplinks give it to all newcomers; the seed sends nothing more."""
    spread = replace(CHAIN, shape=shape)
    newcomers = (replace(LINK, downlink=mbits * MBIT, joins_at_s=60.0),) * count
    outcome = play(replace(spread, peers=(*spread.peers, *newcomers)))
    bound_s = spread.wire_bytes / min(mbits * MBIT, 8 * LINK.uplink / count)
    assert max(outcome.arrived_s[9 + number] for number in range(count)) < 60.0 + ratio * bound_s
    # Without newcomers the last answers of the end game are still on their way when the last peer has all.
    assert outcome.seed_copies < play(spread).seed_copies + 0.01
    assert outcome.duplicates <= play(spread).duplicates + 3


def test_slow_sources_delay_no_peer(play: Play) -> None:
    """The end game takes from them what they would send last."""
    peers = (
        PeerSpec(uplink=320 * MBIT),
        *(PeerSpec(uplink=mbits * MBIT) for mbits in (100, 100, 100, 100, 2, 2, 2, 2)),
    )
    outcome = play(Scenario((*peers, replace(LINK, joins_at_s=60.0)), wire_bytes=64 * MIB))
    assert outcome.arrived_s[9] < 60.0 + 1.06 * 64 * MIB / LINK.downlink


def test_a_peer_that_comes_back_late_fetches_only_what_it_misses(play: Play) -> None:
    scenario = replace(CHAIN, faults=(PeerCrash(4, 2.7, back_s=30.0),))
    outcome = play(scenario)
    assert outcome.arrived_s[4] < 30.0 + 0.55 * 5.4 + 0.3
    assert outcome.duplicates == 0
    assert outcome.seed_copies < 1.01


def test_peers_that_cannot_be_dialled_are_served_too(play: Play) -> None:
    peers = (LINK, *(LINK, replace(LINK, reachable=False)) * 3, replace(LINK, reachable=False))
    outcome = play(Scenario(peers, wire_bytes=16 * MIB, shape="chain", chains=2))
    assert set(outcome.arrived_s) == set(range(1, 8))


@pytest.mark.parametrize("rng_seed", range(30))
def test_every_peer_holds_every_frame_after_a_random_schedule(play: Play, rng_seed: int) -> None:
    play(random_scenario(rng_seed), check_every=100)


@pytest.mark.parametrize("rng_seed", range(30))
def test_neither_corrupt_frames_nor_late_peers_keep_others_waiting(
    play: Play, rng_seed: int
) -> None:
    scenario = troubled(random_scenario(rng_seed))
    outcome = play(scenario, check_every=100)
    assert all(scenario.peers[number].corrupts_every for number in outcome.quarantined)


def all_troubles_at_once(play: Play, rng_seed: int) -> float:
    """T_verify over the bound of those who are left. Everybody good has everything, or `play` fails."""
    scenario = all_troubles(rng_seed)
    outcome = play(scenario, check_every=100)
    assert all(scenario.peers[number].corrupts_every for number in outcome.quarantined)
    gone = {fault.peer for fault in scenario.faults}
    left = [peer.uplink for number, peer in enumerate(scenario.peers) if number not in gone]
    rate = min(left[0], sum(left) / (len(left) - 1))
    return outcome.t_verify_s * rate / scenario.wire_bytes


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2, 3))]
)
def test_a_broadcast_completes_with_all_faults_at_once(play: Play, block: int) -> None:
    ratios = [all_troubles_at_once(play, rng_seed) for rng_seed in range(5 * block, 5 * block + 5)]
    assert median(ratios) <= 1.8


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_broadcasts_with_drawn_faults_complete(
    play: Play, block: int, soak_from: int
) -> None:
    first = soak_from + 100 * block
    ratios = [all_troubles_at_once(play, rng_seed) for rng_seed in range(first, first + 100)]
    assert median(ratios) <= 1.8


def test_a_peer_may_request_a_frame_that_arrived_another_way(play: Play) -> None:
    """Found at random: wants whose frames came by a stripe stayed in the other end's queue until it overflowed."""
    play(random_scenario(3543), check_every=100)


@pytest.mark.parametrize("rng_seed", [3, 13])
def test_the_same_scenario_leaves_the_same_trace(rng_seed: int) -> None:
    scenario = random_scenario(rng_seed)
    assert World(scenario).run() == World(scenario).run()
    other = World(replace(scenario, wire_bytes=scenario.wire_bytes + 1)).run()
    assert other.trace != World(scenario).run().trace


def test_a_world_that_cannot_settle_names_its_seed() -> None:
    with pytest.raises(BroadcastStuckError, match="rng_seed=7"):
        World(replace(CHAIN, limit_s=1.0, rng_seed=7)).run()


@pytest.mark.parametrize(
    ("frame_bytes", "ratio_max", "seconds"), [(MIB, 1.08, 10), (256 << 10, 1.04, 30)]
)
def test_fifty_peers_get_a_gigabyte_near_the_bound(
    play: Play, frame_bytes: int, ratio_max: float, seconds: float
) -> None:
    """Up to 200,000 hops; takes about 0.5 s and 2 s of a processor."""
    fifty = Scenario.equal(50, LINK, wire_bytes=10**9, frame_bytes=frame_bytes, shape="chain")
    before = time.process_time()
    outcome = play(fifty, check_every=20_000)
    assert time.process_time() - before < seconds
    assert outcome.ratio < ratio_max
    assert outcome.seed_copies < 1.01
