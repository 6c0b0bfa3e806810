"""A whole run with groups of 8: how long its learner waits."""

import pytest

from echo2d.core.capacity.model import mu_min
from echo2d_lab.bench.coordinator import bubble

ENOUGH, TOO_FEW = 1.1, 0.7


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ratio", [ENOUGH, TOO_FEW])
def test_groups_of_8_wait_as_long_as_the_formula_says(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real programs but for engines and learner, for 36 train steps of a second."""
    monkeypatch.setattr(bubble, "PERIODS", 8)
    found = bubble.measure("background", 8, ratio * bubble.PER_STEP / bubble.T_TRAIN_S)
    needed = mu_min(found.demand)
    assert needed is not None
    expected = max(0.0, 1.0 - found.mu_pool / needed)
    print(f"mu_pool / mu_min {found.mu_pool / needed:.3f}: bubble {found.bubble:.4f}")  # noqa: T201
    assert found.bubble == pytest.approx(expected, abs=0.05 if expected else 0.02)
