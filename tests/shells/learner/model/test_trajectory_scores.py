"""The learner's own forward pass distinguishes honest trajectories from invented ones."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from echo2d.client import TrajectoryScore
from echo2d.learner.batch.packing import PackedAnswer
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import Policy
from echo2d.learner.model.trajectory_scores import ScoreSums, scores_of
from echo2d.learner.ranks.ranks import Ranks
from tests.support.scripted_coordinator import answer_logprobs

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
    """The scores of the first train step. The first `masked` tokens of each answer are not in the loss."""
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


def test_made_up_logprobs_are_several_nats_from_the_learners(
    config: LearnerConfig, honest: NDArray[np.int64]
) -> None:
    rng = np.random.default_rng(3)
    plausible = -rng.exponential(0.3, (ANSWERS, LENGTH)).astype(np.float32)
    scores = scored(config, made_up(honest), plausible)
    assert min(score.k for score in scores) > 2.0
    assert min(score.z for score in scores) > 4.0


def test_made_up_tokens_with_true_logprobs_have_a_large_z(
    config: LearnerConfig, base: Path, honest: NDArray[np.int64]
) -> None:
    tokens = made_up(honest)
    scores = scored(config, tokens, true_logprobs(base, tokens))
    assert max(score.k for score in scores) < 1e-5
    assert min(score.z for score in scores) > 4.0


def test_tokens_outside_the_loss_do_not_count_in_the_scores(
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


def test_a_certain_distribution_has_no_variance() -> None:
    sums = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    assert scores_of([ScoreSums([(1, 0)], sums)]) == [TrajectoryScore(1, 0, 0.0, 0.0)]


def test_tokens_that_are_not_finite_are_left_out() -> None:
    sums = torch.tensor(
        [[2.0, 2.0, 2.0], [1.0, math.inf, 1.0], [3.0, 3.0, math.nan], [4.0, 4.0, 4.0]]
    )
    found = scores_of([ScoreSums([(1, 0), (1, 1), (1, 2)], sums)])
    assert found == [TrajectoryScore(1, 0, 0.5, 1.5)]
