"""Cases of workers: which workers are audited, which wait, and after how many audits one is convicted."""

import random
from collections.abc import Callable

import pytest

from echo2d.core.audit.baseline import GROSS, Baseline, HonestLimits
from echo2d.core.audit.case import CLEARED, Cases
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.evidence import TOLERANCES, Evidence
from echo2d.core.rules.audit import AuditRules

WORKER = PeerId("w")
TOKENS = 12
Draw = Callable[[random.Random], Evidence]


def found(k: float = 1e-6, z: float = 0.0, misses: int | None = 0) -> Evidence:
    """z: how far off its mean surprise lies, in standard deviations."""
    cold, hot = (0.4 * (sign * z - 0.2) for sign in (-1, 1))
    missed = None if misses is None else (misses,) * len(TOLERANCES)
    return Evidence(TOKENS, k, z * 2.0, 4.0, cold, hot, missed)


def honest(rng: random.Random) -> Evidence:
    """As measured: bfloat16 against float32, one answer in a thousand with a missed seed."""
    return found(rng.lognormvariate(-6, 0.5), rng.gauss(0.03, 0.9), int(rng.random() < 0.001))


def limits(draw: Draw = honest) -> HonestLimits:
    rng, baseline = random.Random(1), Baseline()
    while baseline.limits is None:
        baseline.add(draw(rng))
    return baseline.limits


def liar(k: float, seed: float | None, shift: float) -> Draw:
    """Flags and shifts of the audit's table: shares of trajectories that each measure flags.

    Of the answers that miss a seed, half miss two.
    """
    return lambda rng: found(
        2.0 if rng.random() < k else 1e-3,
        rng.gauss(shift, 1.0),
        None if seed is None else (rng.random() < seed) * rng.choice((1, 2)),
    )


def convicted_after(draw: Draw, most: int, rng_seed: int) -> int | None:
    rng, cases, allowed = (
        random.Random(rng_seed),
        Cases(
            AuditRules(
                trusted=("t",),
            )
        ),
        limits(),
    )
    for count in range(1, most + 1):
        if cases.judge(WORKER, draw(rng), allowed)[1]:
            return count
    cases.check()
    return None


@pytest.mark.parametrize(
    ("draw", "median_max"),
    [
        (liar(1.0, 1.0, 19), 5),
        (liar(0.0, 1.0, 19), 8),
        (liar(0.92, 0.6, 1.6), 6),
        (liar(0.23, 0.13, 0.1), 40),
        (liar(0.36, 0.18, 0.17), 30),
        (liar(0.0, 0.23, -0.51), 60),
        (liar(0.0, 0.24, -0.49), 60),
        (liar(0.0, None, -0.5), 260),
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


def test_a_newcomer_is_clear_after_its_first_clean_answers() -> None:
    cases, allowed = (
        Cases(
            AuditRules(
                newcomer=3,
                trusted=("t",),
            )
        ),
        limits(),
    )
    assert cases.of(WORKER).standing == "new"
    for _ in range(3):
        assert cases.of(WORKER).left > 0
        assert cases.judge(WORKER, found(), allowed) == ((), "")
    assert cases.of(WORKER).standing == "clear"


def test_every_answer_after_a_flag_is_audited_until_a_hundred_are_clean() -> None:
    cases, allowed = (
        Cases(
            AuditRules(
                newcomer=0,
                trusted=("t",),
            )
        ),
        limits(),
    )
    assert cases.judge(WORKER, found(k=9.0), allowed) == (("logprobs",), "")
    for left in range(CLEARED, 0, -1):
        assert (cases.of(WORKER).left, cases.of(WORKER).standing) == (left, "flagged")
        cases.judge(WORKER, found(), allowed)
    assert cases.of(WORKER).standing == "clear"


def test_a_convicted_worker_stays_convicted_until_it_is_forgotten() -> None:
    cases, allowed = (
        Cases(
            AuditRules(
                trusted=("t",),
            )
        ),
        limits(),
    )
    verdicts = [cases.judge(WORKER, found(k=9.0), allowed)[1] for _ in range(7)]
    assert verdicts.count("") == 6, verdicts
    assert "5 of 5 audited: logprobs" in verdicts[4]
    assert cases.of(WORKER).standing == "convicted"
    cases.forget(WORKER)
    assert cases.get(WORKER) is None
    verdicts = [cases.judge(WORKER, found(misses=12), allowed)[1] for _ in range(4)]
    assert "48 of 48 tokens are not those of their seeds" in verdicts[3]


def test_a_worker_is_only_suspected_without_a_baseline() -> None:
    cases = Cases(
        AuditRules(
            trusted=("t",),
        )
    )
    reasons = [cases.suspect(WORKER, found(k=9.0, misses=12), GROSS) for _ in range(50)]
    assert set(reasons) == {("logprobs", "seed")}
    case = cases.of(WORKER)
    assert (case.audited, case.flagged, case.verdict) == (50, 50, "")
    cases.check()
