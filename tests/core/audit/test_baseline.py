"""What honest engines look like, and what is flagged."""

from dataclasses import replace

import pytest

from echo2d.core.audit.baseline import (
    BASELINE_TRAJECTORIES,
    GROSS,
    K_MIN,
    MISSES_MIN,
    RATIO_MAX,
    Baseline,
    limits_of,
)
from echo2d.core.protocol.evidence import Evidence

TOKENS = 12


def found(k: float = 1e-6, misses: int | None = 0) -> Evidence:
    return Evidence(TOKENS, k, 0.0, 4.0, 0.0, 0.0, misses)


def test_a_baseline_is_whole_or_there_is_none() -> None:
    baseline = Baseline()
    for number in range(BASELINE_TRAJECTORIES):
        assert baseline.limits is None, number
        assert baseline.learnt == number / BASELINE_TRAJECTORIES
        baseline.add(found(k=0.05))
    assert baseline.limits == limits_of([found(k=0.05) for _ in range(200)])
    assert baseline.learnt == 1.0
    assert baseline.limits.k == pytest.approx(0.15)
    assert baseline.limits.flags(found(k=0.16)) == ("logprobs",)
    assert baseline.limits.flags(found(misses=1)) == ("seed",)
    assert baseline.limits.flags(found(misses=None)) == ()


def test_trusted_workers_that_agree_exactly_leave_room_for_bfloat16() -> None:
    allowed = limits_of([found(k=1e-7)] * 200)
    assert (allowed.k, allowed.misses) == (K_MIN, MISSES_MIN)


def test_one_missed_seed_of_a_trusted_worker_widens_the_limit() -> None:
    allowed = limits_of([found(misses=0)] * 199 + [found(misses=1)])
    assert allowed.flags(found(misses=3)) == ()
    assert allowed.flags(found(misses=4)) == ("seed",)


def test_a_broken_answer_of_a_trusted_worker_does_not_blind_the_audit() -> None:
    allowed = limits_of([found()] * 199 + [found(k=9.0, misses=TOKENS)])
    assert (allowed.k, allowed.misses) == (GROSS.k, GROSS.misses)


def test_an_answer_that_was_hardly_drawn_is_flagged_where_no_seed_is_replayed() -> None:
    allowed = limits_of([found()] * 200)
    odd = replace(found(misses=None), hot=RATIO_MAX + 0.1)
    assert allowed.flags(odd) == ("draw",)
    assert allowed.flags(replace(odd, misses=0)) == ()
    assert allowed.flags(replace(odd, hot=RATIO_MAX - 0.1)) == ()
