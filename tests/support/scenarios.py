"""Random scenarios, and a runner whose failures name the seed that reproduces them."""

import random
from dataclasses import replace

from echo2d.plan.broadcast.world import BroadcastOutcome, World
from echo2d.plan.kernel.scenario import MBIT, PeerCrash, PeerSpec, Scenario


def random_scenario(rng_seed: int) -> Scenario:
    """Up to nine peers on mixed links, some lossy, unreachable, late or dying; at most 24 MB."""
    rng = random.Random(rng_seed)
    count = rng.randint(1, 9)
    faults = tuple(random_fault(rng, peer) for peer in range(count + 1) if rng.random() < 0.3)
    return Scenario(
        peers=(PeerSpec(), *(random_peer(rng) for _ in range(count))),
        wire_bytes=rng.randint(1, 24_000_000),
        frame_bytes=rng.choice([64 << 10, 256 << 10, 1 << 20]),
        shape=rng.choice(["auto", "star", "chain"]),
        chains=rng.randint(1, 4),
        faults=faults,
        encode_rate=rng.choice([None, 5e6, 50e6]),
        limit_s=300.0,
        rng_seed=rng_seed,
    )


def troubled(scenario: Scenario) -> Scenario:
    """The same with a peer that spoils frames, or with some that join late, or both."""
    rng = random.Random(scenario.rng_seed + 1_000_000)
    peers = list(scenario.peers)
    if scenario.rng_seed % 3 != 1:
        culprit = rng.randrange(1, len(peers))
        peers[culprit] = replace(peers[culprit], corrupts_every=rng.choice([2, 5, 20]))
    if scenario.rng_seed % 3 != 0:
        late = [
            replace(rng.choice(scenario.peers[1:]), joins_at_s=rng.uniform(3, 40))
            for _ in range(rng.randint(1, 3))
        ]
        peers += late
    return replace(scenario, peers=tuple(peers))


def all_troubles(rng_seed: int) -> Scenario:
    """Loss, NAT and churn, a relay that spoils frames, one that dies, and one that falls silent, all at once."""
    rng = random.Random(rng_seed)
    count = rng.randint(8, 12)
    spoils, dies, falls_silent = rng.sample(range(1, count + 1), 3)
    hidden = set(rng.sample(range(1, count + 1), count // 2))
    peers = tuple(
        PeerSpec(
            uplink=rng.choice([40, 80, 100, 160]) * MBIT,
            downlink=1000 * MBIT,
            latency_s=rng.uniform(0.005, 0.04),
            loss=0.001,
            reachable=number not in hidden,
            corrupts_every=20 if number == spoils else 0,
        )
        for number in range(1, count + 1)
    )
    return Scenario(
        peers=(PeerSpec(uplink=100 * MBIT), *peers),
        wire_bytes=64 << 20,
        frame_bytes=128 << 10,
        faults=(
            PeerCrash(dies, rng.uniform(0.5, 5.0)),
            PeerCrash(falls_silent, rng.uniform(0.5, 5.0), silent=True),
        ),
        churn=0.5,
        limit_s=60.0,
        rng_seed=rng_seed,
    )


def random_peer(rng: random.Random) -> PeerSpec:
    return PeerSpec(
        uplink=rng.choice([20, 100, 500]) * MBIT,
        downlink=rng.choice([50, 100, 1000]) * MBIT,
        latency_s=rng.uniform(0.001, 0.1),
        loss=rng.choice([0.0, 0.0, 0.001]),
        reachable=rng.random() < 0.8,
        joins_at_s=rng.choice([0.0, 0.0, 0.0, rng.uniform(0.1, 4.0)]),
    )


def random_fault(rng: random.Random, peer: int) -> PeerCrash:
    at_s = rng.uniform(0.0, 4.0)
    back = peer == 0 or rng.random() < 0.6
    return PeerCrash(
        peer,
        at_s,
        at_s + rng.uniform(0.05, 8.0) if back else None,
        silent=peer > 0 and rng.random() < 0.3,
    )


class Play:
    """Runs a scenario; an error names its rng_seed."""

    def __call__(self, scenario: Scenario, *, check_every: int = 1000) -> BroadcastOutcome:
        try:
            return World(scenario, check_every=check_every).run()
        except BaseException as error:
            error.add_note(f"rng_seed={scenario.rng_seed}")
            raise
