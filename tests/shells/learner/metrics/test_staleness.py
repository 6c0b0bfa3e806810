"""The facts of a train step by staleness, against loops over the tokens."""

import numpy as np
import pytest
import torch

from echo2d.learner.metrics.staleness import (
    add_up,
    answers_by_staleness,
    by_staleness,
    overall,
    tally,
)
from tests.support.batches import STEP, batch_of, trajectory, with_given


def test_sums_of_micro_batches_equal_those_of_the_step() -> None:
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(0, 0.5, 40).astype(np.float32)
    staleness = rng.choice([0, 2, 3], 40)
    keeps, corrected = rng.random(40) < 0.7, rng.random(40) < 0.2
    entropy = rng.random(40).astype(np.float32)
    distance = rng.random(40).astype(np.float32)
    given = (entropy, log_ratio, keeps, corrected, staleness, distance)
    tensors = [torch.tensor(each) for each in given]
    pieces = []
    for at in (slice(0, 9), slice(9, 40)):
        surprise, ratios, kept, changed, ages, far = (each[at] for each in tensors)
        pieces.append(tally(torch.tensor(1.5), surprise, ratios, kept, changed, ages, 4, far))
    found = add_up(pieces)
    assert float(found.loss) == 3.0
    means = by_staleness(found)
    assert list(means) == [0, 2, 3]
    for value in (0, 2, 3):
        at, one = staleness == value, means[value]
        ratio = np.exp(log_ratio[at])
        assert one.tokens == at.sum()
        assert one.ratio_mean == pytest.approx(ratio.mean(), rel=1e-5)
        assert one.ratio_max == pytest.approx(ratio.max(), rel=1e-5)
        assert one.clip_share == pytest.approx(1 - keeps[at].mean())
        assert one.corrected_share == pytest.approx(corrected[at].mean())
        assert one.entropy == pytest.approx(entropy[at].mean(), rel=1e-5)
        assert one.kl_base == pytest.approx(distance[at].mean(), rel=1e-5)
        assert one.kl == pytest.approx(
            np.mean([each - 1 - np.log(each) for each in ratio]), rel=1e-4
        )
    whole = overall(found)
    assert whole.tokens == 40
    assert whole.ratio_max == pytest.approx(np.exp(log_ratio).max(), rel=1e-5)
    assert whole.ratio_mean == pytest.approx(np.exp(log_ratio).mean(), rel=1e-5)


def test_the_distance_to_the_base_is_absent_without_a_base() -> None:
    tokens = torch.ones(3), torch.zeros(3), torch.ones(3) > 0, torch.ones(3) < 0
    found = tally(torch.tensor(0.0), *tokens, torch.tensor([0, 0, 2]), 3)
    assert overall(found).kl_base is None
    assert [each.kl_base for each in by_staleness(found).values()] == [None, None]
    assert overall(found).entropy == 1.0


def test_answers_count_by_their_oldest_token() -> None:
    mixed = trajectory(3, spans=[(0, 1, STEP - 3), (1, 3, STEP - 1)], reward=0.0)
    assert answers_by_staleness(batch_of(mixed, trajectory(5))) == {
        0: {"answers": 3, "reward": pytest.approx(2 / 3), "length": pytest.approx(10 / 3)},
        2: {"answers": 1, "reward": 0.0, "length": 3.0},
    }


def test_given_tokens_do_not_count_in_the_length_of_an_answer() -> None:
    found = answers_by_staleness(batch_of(with_given(trajectory(5), 2, [4] * 30), trajectory(5)))
    assert found[0]["length"] == (3 + 2 + 5 + 5) / 4
