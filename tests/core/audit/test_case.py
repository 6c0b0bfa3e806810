"""Cases of workers: who is audited, who waits, and who is convicted after how many audits."""

import random
from collections.abc import Callable

import pytest

from echo2d.core.audit.baseline import Baseline, HonestLimits
from echo2d.core.audit.case import CLEARED, AuditRules, Cases
from echo2d.core.audit.evidence import Evidence
from echo2d.core.base.ids import PeerId

WORKER = PeerId("w")
TOKENS = 12
Draw = Callable[[random.Random], Evidence]


def found(k: float = 1e-6, z: float = 0.0, misses: int | None = 0) -> Evidence:
    return Evidence(TOKENS, k, z * 2.0, 4.0, misses)


def honest(rng: random.Random) -> Evidence:
    """As measured: bfloat16 against float32, one answer in a thousand with a missed seed."""
    return found(rng.lognormvariate(-6, 0.5), rng.gauss(0.03, 0.9), int(rng.random() < 0.001))


def limits(draw: Draw = honest) -> HonestLimits:
    rng, baseline = random.Random(1), Baseline()
    while baseline.limits is None:
        baseline.add(draw(rng))
    return baseline.limits


def liar(k: float, seed: float, shift: float) -> Draw:
    """Flags and shifts of the audit's table: shares of trajectories that each measure flags."""
    return lambda rng: found(
        1.0 if rng.random() < k else 1e-3, rng.gauss(shift, 1.0), int(rng.random() < seed)
    )


def convicted_after(draw: Draw, most: int, rng_seed: int) -> int | None:
    rng, cases, allowed = random.Random(rng_seed), Cases(AuditRules()), limits()
    for count in range(1, most + 1):
        cases.delivered(WORKER, 0.0)
        if cases.judge(WORKER, draw(rng), allowed):
            return count
    cases.check()
    return None


@pytest.mark.parametrize(
    ("draw", "median_max"),
    [
        (liar(1.0, 1.0, 19), 5),
        (liar(0.0, 1.0, 19), 5),
        (liar(0.92, 0.6, 1.6), 6),
        (liar(0.23, 0.13, 0.1), 40),
        (liar(0.36, 0.18, 0.17), 30),
        (liar(0.0, 0.23, -0.51), 60),
        (liar(0.0, 0.24, -0.49), 60),
        (liar(0.0, 0.0, -0.5), 250),
    ],
    ids=[
        "made up", "made up, true logprobs", "version 0", "three versions old", "int4", "greedy",
        "best of four", "best of four, unseeded",
    ],
)  # fmt: skip
def test_liars_are_convicted(draw: Draw, median_max: int) -> None:
    counts = sorted(convicted_after(draw, 5000, rng_seed) or 5000 for rng_seed in range(21))
    assert counts[10] <= median_max, counts


@pytest.mark.parametrize("rng_seed", range(4))
def test_an_honest_worker_is_never_convicted(rng_seed: int) -> None:
    assert convicted_after(honest, 20_000, rng_seed) is None, f"rng_seed={rng_seed}"


def test_a_newcomer_waits_until_its_first_trajectories_are_clean() -> None:
    cases, allowed = Cases(AuditRules(newcomer=3, share=0.05)), limits()
    for _ in range(3):
        assert cases.waits(WORKER)
        assert cases.delivered(WORKER, 0.99)
        cases.judge(WORKER, found(), allowed)
    assert cases.of(WORKER).standing == "clear"
    assert not cases.waits(WORKER)
    assert not cases.delivered(WORKER, 0.06)
    assert cases.delivered(WORKER, 0.04)


def test_a_flag_has_everything_audited_for_a_while() -> None:
    cases, allowed = Cases(AuditRules(newcomer=0)), limits()
    cases.delivered(WORKER, 0.0)
    cases.judge(WORKER, found(k=9.0), allowed)
    assert (cases.of(WORKER).standing, cases.waits(WORKER)) == ("flagged", True)
    for _ in range(CLEARED):
        assert cases.delivered(WORKER, 0.99)
        cases.judge(WORKER, found(), allowed)
    assert cases.of(WORKER).standing == "clear"


def test_without_a_baseline_nobody_is_convicted() -> None:
    cases = Cases(AuditRules())
    for _ in range(100):
        cases.delivered(WORKER, 0.0)
        assert cases.judge(WORKER, found(k=9.0, misses=TOKENS), None) == ""
    assert cases.of(WORKER).standing == "clear"
