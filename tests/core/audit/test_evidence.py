"""What is known of each token, summed up."""

import numpy as np
import pytest

from echo2d.core.audit.evidence import TOLERANCE, evidence, outside

ONES = np.ones(4)


def test_the_sums_of_four_tokens() -> None:
    found = evidence(
        -ONES,
        np.array([-1.0, -1.5, -0.5, -1.0]),
        surprises=2 * ONES,
        entropies=ONES,
        variances=4 * ONES,
        outside=np.array([0.0, TOLERANCE, 1.01 * TOLERANCE, 1.0]),
    )
    assert (found.tokens, found.k, found.misses) == (4, 0.25, 2)
    assert (found.excess, found.variance, found.z) == (4.0, 16.0, 1.0)


def test_without_replay_nothing_is_missed_and_without_variance_there_is_no_z() -> None:
    found = evidence(-ONES, -ONES, surprises=ONES, entropies=ONES, variances=0 * ONES, outside=None)
    assert (found.misses, found.z) == (None, 0.0)


def test_how_far_a_number_lies_outside() -> None:
    numbers, lows, highs = np.array([0.1, 0.5, 0.9]), 0.4 * np.ones(3), 0.6 * np.ones(3)
    assert outside(numbers, lows, highs).tolist() == pytest.approx([0.3, 0.0, 0.3])
