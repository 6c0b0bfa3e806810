"""What honest engines look like, and what is flagged."""

import pytest

from echo2d.core.audit.baseline import BASELINE_TRAJECTORIES, Baseline, limits_of
from echo2d.core.audit.evidence import Evidence

TOKENS = 12


def found(k: float = 1e-6, z: float = 0.0, misses: int | None = 0) -> Evidence:
    return Evidence(TOKENS, k, z * 2.0, 4.0, misses)


def test_a_baseline_is_whole_or_there_is_none() -> None:
    baseline = Baseline()
    for number in range(BASELINE_TRAJECTORIES):
        assert baseline.limits is None, number
        baseline.add(found(k=1e-3, z=(-1.0) ** number))
    assert baseline.limits == limits_of([found(k=1e-3, z=(-1.0) ** n) for n in range(200)])
    assert baseline.limits.k == pytest.approx(3e-3)
    assert baseline.limits.flags(found(k=3.1e-3)) == ("logprobs",)
    assert baseline.limits.flags(found(misses=1)) == ("seed",)
    assert baseline.limits.flags(found(misses=None)) == ()


def test_one_missed_seed_of_a_trusted_worker_widens_the_limit() -> None:
    allowed = limits_of([found(misses=0)] * 199 + [found(misses=1)])
    assert allowed.flags(found(misses=3)) == ()
    assert allowed.flags(found(misses=4)) == ("seed",)


def test_z_is_told_in_standard_deviations_of_trusted_ones() -> None:
    allowed = limits_of([found(z=0.5), found(z=1.5)] * 100)
    assert allowed.z(found(z=1.0)) == pytest.approx(0.0)
    assert allowed.z(found(z=2.0)) == pytest.approx(2.0, rel=0.01)
