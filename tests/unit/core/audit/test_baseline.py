"""The baseline of honest engines, and the answers that are flagged."""

import math
from dataclasses import replace

import pytest

from echo2d.core.audit.baseline import (
    BASELINE_TRAJECTORIES,
    GROSS,
    K_MIN,
    MISSES_MIN,
    RARE,
    RATIO_MAX,
    SHORT_TOKENS,
    Baseline,
    chance_of,
    limits_of,
)
from echo2d.core.protocol.evidence import TOLERANCES, Evidence

TOKENS = 12
ROOM = 1 + SHORT_TOKENS / TOKENS


def found(k: float = 1e-6, misses: int | None = 0, tokens: int = TOKENS) -> Evidence:
    """misses: within any tolerance."""
    return Evidence(
        tokens, k, 0.0, 4.0, 0.0, 0.0, None if misses is None else (misses,) * len(TOLERANCES)
    )


def test_an_incomplete_baseline_is_not_used() -> None:
    baseline = Baseline()
    for number in range(BASELINE_TRAJECTORIES):
        assert baseline.limits is None, number
        assert baseline.learnt == number / BASELINE_TRAJECTORIES
        baseline.add(found(k=0.05))
    assert baseline.limits == limits_of([found(k=0.05) for _ in range(200)])
    assert baseline.learnt == 1.0
    assert baseline.limits.k == pytest.approx(0.15 / ROOM)
    assert baseline.limits.flags(found(k=0.149)) == ()
    assert baseline.limits.flags(found(k=0.151)) == ("logprobs",)
    assert baseline.limits.flags(found(misses=1)) == ("seed",)
    assert baseline.limits.flags(found(misses=None)) == ()


def test_the_limits_of_exactly_agreeing_trusted_workers_leave_room_for_bfloat16() -> None:
    allowed = limits_of([found(k=1e-7)] * 200)
    assert allowed.k == K_MIN
    assert allowed.misses == pytest.approx(1.5 * 2 / 2400), "two may have been overlooked"
    much = limits_of([found(k=1e-7, tokens=1000)] * 200)
    assert much.misses == MISSES_MIN


def test_the_tolerance_is_the_narrowest_with_which_trusted_workers_agree() -> None:
    """As SmolLM2 in bfloat16: within the narrowest, 1.6 % of the tokens miss, then 0.12 %."""
    honest = replace(found(), misses=(0, 0, 0))
    trusted = [honest] * 162 + [replace(honest, misses=(1, 0, 0))] * 35
    allowed = limits_of([*trusted, *[replace(honest, misses=(1, 1, 0))] * 3])
    assert allowed.tolerance == 1
    assert allowed.misses == pytest.approx(1.5 * 5 / 2400)
    assert allowed.flags(replace(honest, misses=(9, 0, 0))) == ()
    assert allowed.flags(replace(honest, misses=(9, 1, 0))) == ()
    assert allowed.flags(replace(honest, misses=(9, 2, 0))) == ("seed",)
    assert limits_of([honest] * 200).tolerance == 0
    assert limits_of([found(misses=1)] * 200).tolerance == len(TOLERANCES) - 1


def test_short_answers_have_wider_limits() -> None:
    """SmolLM2 in bfloat16 against float32: 99.9 % of the answers have a smaller K, by their tokens."""
    allowed = limits_of([found()] * 200)
    for tokens, k in ((1, 0.255), (2, 0.165), (3, 0.173), (8, 0.089), (20, 0.064), (60, 0.053)):
        assert allowed.flags(found(tokens=tokens, k=k)) == (), tokens
    assert allowed.flags(found(tokens=1, k=0.41)) == ("logprobs",)
    assert allowed.flags(found(tokens=400, k=0.09)) == ("logprobs",)


def test_a_broken_answer_of_a_trusted_worker_does_not_blind_the_audit() -> None:
    allowed = limits_of([found()] * 199 + [found(k=9.0, misses=TOKENS)])
    assert allowed.k == GROSS.k
    assert allowed.misses == pytest.approx(1.5 * (TOKENS + 2) / 2400)
    all_broken = limits_of([found(k=9.0, misses=TOKENS)] * 200)
    assert (all_broken.k, all_broken.misses) == (GROSS.k, GROSS.misses)


@pytest.mark.parametrize("share", [0.002, 0.05, 0.5])
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_the_chance_of_misses_is_that_of_a_binomial_distribution(tokens: int, share: float) -> None:
    for misses in range(tokens + 1):
        tail = sum(
            math.comb(tokens, n) * share**n * (1 - share) ** (tokens - n)
            for n in range(misses, tokens + 1)
        )
        expected = 1.0 if misses <= tokens * share else tail
        assert chance_of(misses, tokens, share) == pytest.approx(expected)


def test_the_chance_of_misses_is_right_in_a_long_answer() -> None:
    tokens, share = 32_768, 0.1
    mean, deviation = tokens * share, math.sqrt(tokens * share * (1 - share))
    assert chance_of(int(mean + 3 * deviation), tokens, share) == pytest.approx(1.4e-3, rel=0.15)
    assert chance_of(tokens, tokens, share) == 0.0 < RARE


def test_an_unlikely_answer_is_flagged_if_no_seed_is_replayed() -> None:
    allowed = limits_of([found()] * 200)
    odd = replace(found(misses=None), hot=RATIO_MAX + 0.1)
    assert allowed.flags(odd) == ("draw",)
    assert allowed.flags(replace(odd, misses=(0,) * len(TOLERANCES))) == ()
    assert allowed.flags(replace(odd, hot=RATIO_MAX - 0.1)) == ()
