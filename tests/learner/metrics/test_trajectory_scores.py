"""The learner's own forward pass tells honest trajectories from made-up ones."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from echo2d.client import TrajectoryScore
from learner.batch.packing import MicroBatch, PackedAnswer, micro_batches
from learner.config import LearnerConfig
from learner.metrics import trajectory_scores
from learner.metrics.trajectory_scores import (
    Z_TOKENS,
    ScoreSums,
    drawn,
    score_sums,
    scores_of,
    surprise_moments,
)
from learner.model.policy import Policy, answer_logprobs, load_model
from learner.ranks.ranks import Ranks

TEMPERATURE = 0.4  # the hardly trained model is sure of something then
PROMPT, LENGTH, ANSWERS = 3, 24, 64
VOCABULARY = 17


@pytest.fixture(scope="module")
def honest(base: Path) -> NDArray[np.int64]:
    """Prompts, each with an answer drawn from the model: [ANSWERS, PROMPT + LENGTH]."""
    model, dice = load_model(base).eval(), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ANSWERS, PROMPT), generator=dice)
    with torch.inference_mode():
        for _ in range(LENGTH):
            chances = (model(input_ids=tokens).logits[:, -1] / TEMPERATURE).softmax(1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=dice)], dim=1)
    return tokens.numpy()


def made_up(honest: NDArray[np.int64]) -> NDArray[np.int64]:
    tokens = honest.copy()
    tokens[:, PROMPT:] = np.random.default_rng(2).integers(0, VOCABULARY, (ANSWERS, LENGTH))
    return tokens


def true_logprobs(base: Path, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    counts = np.broadcast_to(np.arange(tokens.shape[1]) >= PROMPT, tokens.shape)
    with torch.inference_mode():
        found = answer_logprobs(load_model(base), tokens, np.array(counts), TEMPERATURE)
    return np.asarray(found.numpy().reshape(ANSWERS, LENGTH))


def scored(
    config: LearnerConfig,
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    *,
    masked: int = 0,
    **changes: Any,
) -> tuple[TrajectoryScore, ...]:
    """What the first train step says. The first `masked` tokens of each answer are not in the loss."""
    settings: dict[str, Any] = {"micro_batch_tokens": 200, **changes}
    policy = Policy(dataclasses.replace(config, **settings), Ranks())
    answers = [
        PackedAnswer(
            group_id=100 + number // 8,
            sample=number % 8,
            tokens=tokens[number].astype(np.int32),
            counts=np.arange(PROMPT + LENGTH) >= PROMPT + masked,
            logprobs_n=logprobs[number, masked:],
            staleness_n=np.zeros(LENGTH - masked, dtype=np.int64),
            advantage=np.float32(0.0),
            temperature=TEMPERATURE,
        )
        for number in range(ANSWERS)
    ]
    half = len(answers) // policy._config.optimizer_steps
    parts = [answers[at : at + half] for at in range(0, len(answers), half)]
    return policy.train_step(1, policy.lay_out(parts), 2).scores


@pytest.mark.parametrize("changes", [{}, {"packing": False}, {"lora_rank": 2}])
def test_honest_tokens_have_the_learners_logprobs_and_a_normal_z(
    config: LearnerConfig, base: Path, honest: NDArray[np.int64], changes: dict[str, Any]
) -> None:
    scores = scored(config, honest, true_logprobs(base, honest), **changes)
    names = [(100 + number // 8, number % 8) for number in range(ANSWERS)]
    assert sorted((score.group, score.sample) for score in scores) == names
    assert max(score.k for score in scores) < 1e-5
    z = np.array([score.z for score in scores])
    assert abs(z.mean()) < 4 / math.sqrt(ANSWERS)
    assert 0.7 < z.std() < 1.4


def test_made_up_tokens_with_made_up_logprobs_are_nats_away(
    config: LearnerConfig, honest: NDArray[np.int64]
) -> None:
    rng = np.random.default_rng(3)
    plausible = -rng.exponential(0.3, (ANSWERS, LENGTH)).astype(np.float32)
    scores = scored(config, made_up(honest), plausible)
    assert min(score.k for score in scores) > 2.0
    assert min(score.z for score in scores) > 4.0


def test_made_up_tokens_with_true_logprobs_were_not_drawn(
    config: LearnerConfig, base: Path, honest: NDArray[np.int64]
) -> None:
    tokens = made_up(honest)
    scores = scored(config, tokens, true_logprobs(base, tokens))
    assert max(score.k for score in scores) < 1e-5
    assert min(score.z for score in scores) > 4.0


def test_tokens_outside_the_loss_do_not_count(
    config: LearnerConfig, base: Path, honest: NDArray[np.int64]
) -> None:
    tokens = honest.copy()
    tokens[:, PROMPT : PROMPT + 4] = made_up(honest)[:, PROMPT : PROMPT + 4]
    logprobs = true_logprobs(base, tokens)
    logprobs[:, :4] = -30.0
    assert max(score.k for score in scored(config, tokens, logprobs, masked=4)) < 1e-5
    assert min(score.k for score in scored(config, tokens, logprobs)) > 2.0


def test_several_optimizer_steps_score_each_trajectory_once(
    config: LearnerConfig, base: Path, honest: NDArray[np.int64]
) -> None:
    scores = scored(config, honest, true_logprobs(base, honest), optimizer_steps=2)
    assert len({(score.group, score.sample) for score in scores}) == len(scores) == ANSWERS


def test_moments_of_the_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, everywhere or at some places, as numpy has them."""
    monkeypatch.setattr(trajectory_scores, "CHUNK_VALUES", {"cpu": 40})
    logits = np.random.default_rng(0).normal(0, 3, (11, 17))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chances = np.exp(logprobs)
    entropies = -(chances * logprobs).sum(1)
    variances = (chances * (logprobs + entropies[:, None]) ** 2).sum(1)
    everything = torch.from_numpy(logprobs.astype(np.float32))
    for places in (None, np.array([0, 4, 10])):
        at = slice(None) if places is None else places
        found = surprise_moments(everything, None if places is None else torch.from_numpy(places))
        assert np.allclose(found[0].numpy(), entropies[at], rtol=1e-4)
        assert np.allclose(found[1].numpy(), variances[at], rtol=1e-3)


def test_a_distribution_without_a_doubt_has_no_variance() -> None:
    certain = torch.log_softmax(torch.tensor([[0.0, 500.0, 0.0]]), dim=1)
    entropy, variance = surprise_moments(certain, None)
    assert (float(entropy), float(variance)) == (0.0, 0.0)
    sums = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    assert scores_of([ScoreSums([(1, 0)], sums)]) == [TrajectoryScore(1, 0, 0.0, 0.0)]


def test_long_answers_are_judged_by_some_of_their_tokens() -> None:
    assert drawn(np.repeat([0, 1], [3, Z_TOKENS]), np.random.default_rng(0)) is None
    lengths = (5, Z_TOKENS + 40, 2, 3 * Z_TOKENS)
    answers = np.repeat(np.arange(4), lengths)
    places = drawn(answers, np.random.default_rng(0))
    assert places is not None
    assert (np.diff(places) > 0).all()
    assert np.bincount(answers[places]).tolist() == [5, Z_TOKENS, 2, Z_TOKENS]
    other = drawn(answers, np.random.default_rng(1))
    assert other is not None
    assert places.tolist() != other.tolist()


def test_a_long_answers_k_is_of_all_tokens_and_its_z_of_those_drawn() -> None:
    """Random tokens at the end of a long answer raise both."""
    length = 4 * Z_TOKENS
    everything = torch.log_softmax(
        torch.tensor([[3.0, 0.0, 0.0, 0.0]]).expand(length, 4).clone(), dim=1
    )
    tokens = torch.zeros(length, dtype=torch.int64)
    tokens[length // 2 :] = 1
    logprobs = everything.gather(1, tokens[:, None])[:, 0]
    micro = one_answer(np.full(length, float(everything[0, 0]), dtype=np.float32))
    sums = score_sums(micro, everything, logprobs, np.random.default_rng(0))
    (score,) = scores_of([sums])
    assert score.k == pytest.approx(1.5, rel=1e-4)
    entropy, variance = (float(each[0]) for each in surprise_moments(everything[:1], None))
    mean = -float(logprobs.mean())
    expected = (mean - entropy) * math.sqrt(Z_TOKENS / variance)
    assert score.z == pytest.approx(expected, rel=0.25)


def one_answer(claimed: NDArray[np.float32]) -> MicroBatch:
    """A micro-batch of one answer with these logprobs."""
    tokens = np.zeros(len(claimed) + 1, dtype=np.int32)
    counts = np.arange(len(tokens)) > 0
    staleness = np.zeros(len(claimed), dtype=np.int64)
    answer = PackedAnswer(7, 1, tokens, counts, claimed, staleness, np.float32(1.0))
    (micro,) = micro_batches([answer], len(tokens), packed=True)
    return micro


def test_what_is_not_finite_is_left_out() -> None:
    sums = torch.tensor(
        [[2.0, 2.0, 2.0], [1.0, math.inf, 1.0], [3.0, 3.0, math.nan], [4.0, 4.0, 4.0]]
    )
    found = scores_of([ScoreSums([(1, 0), (1, 1), (1, 2)], sums)])
    assert found == [TrajectoryScore(1, 0, 0.5, 1.5)]
