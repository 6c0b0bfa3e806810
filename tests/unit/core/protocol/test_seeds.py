"""Seeds of samples, and their random numbers."""

import numpy as np
import pytest

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.seeds import SEED_BITS, Uniforms, sample_seeds, seed_key, uniforms

FIRST_OF_5 = [0.4167470637848455, 0.5363275499442233, 0.7833177685093605]
KEY = seed_key(b"k" * 32)


def test_a_seed_depends_on_the_run_the_group_and_the_sample() -> None:
    other = seed_key(b"j" * 32)
    seeds = [
        seed
        for key in (KEY, other)
        for group in (0, 1, 11)
        for seed in sample_seeds(key, GroupId(group), (0, 1, 11))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << SEED_BITS for seed in seeds)
    assert sample_seeds(KEY, GroupId(1), [1]) == (seeds[4],)


def test_the_random_numbers_of_a_seed_are_the_same_in_every_build() -> None:
    """An auditor may run another build than the worker."""
    assert uniforms(5, [0, 1, 2]).tolist() == pytest.approx(FIRST_OF_5, abs=0)
    assert uniforms([5, 6], [1, 1])[0] == FIRST_OF_5[1]


def test_a_stream_of_random_numbers_can_be_continued_at_any_position() -> None:
    whole = Uniforms(5)
    drawn = [whole.draw() for _ in range(200)]
    assert drawn == uniforms(5, range(200)).tolist()
    later = Uniforms(5, 70)
    assert [later.draw() for _ in range(100)] == drawn[70:170]


@pytest.mark.parametrize("seeds", [range(4096), [7], [(1 << 63) - 1]])
def test_the_random_numbers_are_spread_evenly(seeds: list[int]) -> None:
    """Neighbouring seeds and neighbouring positions have nothing to do with each other."""
    count = 1 << 18
    positions = np.tile(np.arange(count // len(seeds)), len(seeds))
    numbers = uniforms(np.repeat(np.array(seeds, dtype=np.uint64), count // len(seeds)), positions)
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    hits = np.bincount((numbers * 64).astype(int), minlength=64)
    # Pearson's statistic has 63 degrees of freedom: 63 on average, 131 once in a million times.
    assert float(((hits - count / 64) ** 2).sum() / (count / 64)) < 131
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / count**0.5
