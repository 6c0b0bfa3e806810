"""The sums of the evidence about tokens."""

from dataclasses import replace

import numpy as np
import pytest

from echo2d.core.protocol.evidence import TOLERANCES, Evidence, evidence

ONES = np.ones(4)
TOKENS = 30


def of_tokens(numbers: np.ndarray, *, replayed: bool = True) -> Evidence:
    """Evidence of the columns of `numbers` [5, n]."""
    return evidence(
        numbers[0],
        numbers[1],
        surprises=numbers[2],
        entropies=numbers[3],
        variances=numbers[4] ** 2,
        colds=numbers[2] - 1,
        hots=numbers[3] - 1,
        distances=3 * numbers[4] if replayed else None,
    )


def test_the_evidence_has_the_sums_of_four_tokens() -> None:
    found = evidence(
        -ONES,
        np.array([-1.0, -1.5, -0.5, -1.0]),
        surprises=2 * ONES,
        entropies=ONES,
        variances=4 * ONES,
        colds=-ONES,
        hots=3 * ONES,
        distances=np.array([0.0, 1.0, 2.0, TOLERANCES[-1] + 0.1]),
    )
    assert (found.tokens, found.k, found.misses) == (4, 0.25, (2, 1, 1))
    assert (found.excess, found.variance, found.z) == (4.0, 16.0, 1.0)
    assert (found.cold, found.hot) == (-4.0, 12.0)


def test_evidence_without_replay_has_no_misses_and_without_variance_no_z() -> None:
    found = evidence(
        -ONES,
        -ONES,
        surprises=ONES,
        entropies=ONES,
        variances=0 * ONES,
        colds=ONES,
        hots=ONES,
        distances=None,
    )
    assert (found.misses, found.z) == (None, 0.0)


@pytest.mark.parametrize("split", [1, 10, TOKENS - 1])
def test_two_pieces_add_up_to_the_evidence_of_the_whole(split: int) -> None:
    numbers = np.random.default_rng(split).normal(size=(5, TOKENS))
    whole = of_tokens(numbers)
    joined = of_tokens(numbers[:, :split]).plus(of_tokens(numbers[:, split:]))
    assert (joined.tokens, joined.misses) == (whole.tokens, whole.misses)
    assert joined.k == pytest.approx(whole.k)
    assert joined.excess == pytest.approx(whole.excess)
    assert joined.variance == pytest.approx(whole.variance)
    assert joined.z == pytest.approx(whole.z)
    assert (joined.cold, joined.hot) == pytest.approx((whole.cold, whole.hot))


def test_a_piece_without_replay_leaves_the_whole_without_misses() -> None:
    replayed = of_tokens(np.random.default_rng(0).normal(size=(5, TOKENS)))
    unknown = replace(replayed, misses=None)
    assert replayed.plus(unknown).misses is None
    assert unknown.plus(replayed).misses is None
