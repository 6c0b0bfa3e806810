"""Sequential tests over a worker's trajectories."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from echo2d.core.audit.sequential import (
    BLOCK,
    FLAGS_HONEST,
    THRESHOLD,
    TRAJECTORY_MAX,
    FlagTest,
    SeedTest,
    TemperTest,
)
from echo2d.core.protocol.evidence import COLD, HOT, Evidence

Chances = NDArray[np.float64]


def test_five_flags_in_a_row_convict_and_four_do_not() -> None:
    test = FlagTest()
    for count in range(1, 6):
        test.add(flagged=True)
        assert test.convicts == (count == 5)


def test_a_worker_with_a_long_honest_past_is_convicted_as_fast() -> None:
    test = FlagTest()
    for _ in range(10_000):
        test.add(flagged=False)
    assert test.sum == 0
    for _ in range(5):
        test.add(flagged=True)
    assert test.convicts


@pytest.mark.parametrize("rng_seed", range(3))
def test_flags_at_the_honest_rate_do_not_convict(rng_seed: int) -> None:
    rng, test, highest = random.Random(rng_seed), FlagTest(), 0.0
    for _ in range(20_000):
        test.add(flagged=rng.random() < FLAGS_HONEST)
        highest = max(highest, test.sum)
    assert highest < THRESHOLD, f"rng_seed={rng_seed}"


@pytest.mark.parametrize("tokens", [1, 12, 400])
def test_missed_seeds_within_the_limit_do_not_convict(tokens: int) -> None:
    rng, test, highest = np.random.default_rng(5), SeedTest(), 0.0
    for misses in rng.binomial(tokens, 0.002, size=20_000):
        test.add(int(misses), tokens, 0.002)
        highest = max(highest, test.sum)
    assert highest < THRESHOLD
    assert test.tokens == 20_000 * tokens


@pytest.mark.parametrize(("share", "answers_max"), [(0.02, 60), (0.07, 12), (1.0, 4)])
def test_too_many_missed_seeds_convict(share: float, answers_max: int) -> None:
    """Greedy, another seed, made up: shares of missed tokens of the demo's model."""
    rng, counts = np.random.default_rng(5), []
    for _ in range(21):
        test, count = SeedTest(), 0
        while not test.convicts:
            test.add(int(rng.binomial(29, share)), 29, 0.002)
            count += 1
        counts.append(count)
    assert sorted(counts)[10] <= answers_max, counts
    assert min(counts) >= 4, "no single answer convicts"


def drawn(rng: np.random.Generator, p: Chances, q: Chances, tokens: int) -> Evidence:
    """Evidence about tokens that were drawn from q, and ought to be drawn from p."""
    chosen = rng.choice(len(p), size=tokens, p=q)
    cold, hot = (
        float(((power - 1) * np.log(p[chosen]) - np.log((p**power).sum())).sum())
        for power in (COLD, HOT)
    )
    return Evidence(tokens, 0.0, 0.0, 1.0, cold, hot, None)


def chances(rng: np.random.Generator, sharpness: float) -> Chances:
    logits = sharpness * rng.standard_normal(50)
    found: Chances = np.exp(logits) / np.exp(logits).sum()
    return found


def tempered(p: Chances, power: float) -> Chances:
    found: Chances = p**power / (p**power).sum()
    return found


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0, 12.0])
@pytest.mark.parametrize("tokens", [1, 12, 200])
def test_honest_draws_of_a_very_certain_model_do_not_convict(sharpness: float, tokens: int) -> None:
    """The ratios are exact: with 4,000 answers the sum comes this close to THRESHOLD in one run of 80."""
    rng, test, highest = np.random.default_rng(3), TemperTest(), 0.0
    for _ in range(4000):
        p = chances(rng, sharpness)
        test.add(drawn(rng, p, p, tokens))
        highest = max(highest, test.cold, test.hot)
    assert highest < THRESHOLD, highest


@pytest.mark.parametrize("power", [0.5, 1.5, 4.0])
def test_draws_at_another_temperature_convict(power: float) -> None:
    rng, test, count = np.random.default_rng(1), TemperTest(), 0
    while not test.convicts and count < 1000:
        p = chances(rng, 2.0)
        test.add(drawn(rng, p, tempered(p, power), 12))
        count += 1
    assert count in (BLOCK, 2 * BLOCK)
    assert (test.cold > test.hot) == (power > 1)


def test_one_trajectory_counts_at_most_its_limit() -> None:
    test = TemperTest()
    for count in range(1, BLOCK + 1):
        assert (test.cold, test.hot) == (0.0, 0.0), count
        test.add(Evidence(1000, 0.0, 0.0, 1.0, 500.0, -500.0, None))
    assert (test.cold, test.hot) == (BLOCK * TRAJECTORY_MAX, 0.0)


def test_a_first_sequence_of_short_answers_does_not_convict() -> None:
    """Of 32 that run at a time, the surprising ones end early."""
    rng, test = np.random.default_rng(5), TemperTest()
    for _ in range(500):
        p = chances(rng, 6.0)
        wave = [drawn(rng, p, p, 12) for _ in range(BLOCK // 2)]
        for found in sorted(wave, key=lambda each: -each.hot):
            test.add(found)
            assert not test.convicts
