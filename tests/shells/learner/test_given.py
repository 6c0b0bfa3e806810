"""Given tokens are read, but do not count in anything that is trained or measured.

The gradient of answers with given tokens, too old ones and branches is compared in `objective/test_gradients.py`.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2d.client import Batch, Span, Trajectory
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import PackedAnswer, answers_of
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks
from examples import own_loop
from tests.support.batches import with_given
from tests.support.learner import learn, record
from tests.support.oracle import Gradient, difference, gradient_of
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS, ScriptedCoordinator

VOCABULARY, STEP = 17, 20
MASKS = BatchRules(2, GROUPS, GROUP_SIZE, VOCABULARY, GROUP_SIZE, masks=True)
TOO_OLD, NEW = STEP - 4, STEP - 1
# Called with the index of a group, the number of a trajectory in the group, and the trajectory.
Change = Callable[[int, int, Trajectory], Trajectory]


def change(batch: Batch, how: Change) -> Batch:
    groups = tuple(
        dataclasses.replace(
            group,
            trajectories=tuple(how(index, each.sample, each) for each in group.trajectories),
        )
        for index, group in enumerate(batch.groups)
    )
    return dataclasses.replace(batch, groups=groups)


def conversation(group: int, sample: int, written: Trajectory) -> Trajectory:
    """Three of a group have given tokens: at the start, as an agent's first call; between written ones, once and
    twice. Every other one begins too old.
    """
    rng = np.random.default_rng((group, sample))
    length = len(written.tokens)
    spans = [(0, 3, TOO_OLD), (3, length, NEW)] if sample % 2 else [(0, length, NEW)]
    found = dataclasses.replace(
        written,
        spans=tuple(Span(*span, digest="00") for span in spans),
        logprobs=np.minimum(written.logprobs + rng.normal(0, 0.3, length), 0).astype(np.float32),
        reward=float(rng.normal()),
    )
    for at in sorted(rng.choice(np.arange(1, length), max(0, sample - 1), replace=False))[::-1]:
        found = with_given(found, int(at), rng.integers(0, VOCABULARY, 1 + at % 3).tolist())
    return with_given(found, 0, rng.integers(0, VOCABULARY, 5).tolist()) if sample < 1 else found


@pytest.fixture(scope="module")
def batch(base: Path) -> Batch:
    found = dataclasses.replace(record(base, 1)[0], step=STEP)
    return change(found, conversation)


def answers(config: LearnerConfig, batch: Batch) -> list[PackedAnswer]:
    assert faults(batch, STEP, MASKS, Trained()) == {}
    return [answer for group in answers_of(batch, MASKS, advantages_of(config)) for answer in group]


def trained(config: LearnerConfig, batch: Batch) -> Gradient:
    """The gradient of one optimizer step."""
    policy = Policy(config, Ranks())
    (part,) = policy.lay_out([answers(config, batch)])
    policy._gradient(part, MASKS.staleness_max, {})
    return gradient_of(policy.model)


def counted(each: Trajectory) -> int:
    """How many tokens are in the loss."""
    return sum(span.end - span.start for span in each.spans if span.version != TOO_OLD)


@pytest.fixture
def blind(config: LearnerConfig, tmp_path: Path) -> LearnerConfig:
    """A model whose tokens do not see each other: its output depends on the last token alone."""
    model = Path(shutil.copytree(config.model, tmp_path / "blind"))
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if name.endswith("o_proj.weight"):
            weights[name].zero_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return dataclasses.replace(config, model=model)


def other_given(batch: Batch, *, last: bool) -> Batch:
    """Other ids for given tokens: the last one of each run, or all but the last one."""

    def how(_: int, __: int, each: Trajectory) -> Trajectory:
        tokens = each.tokens.copy()
        for start, end in each.given:
            flipped = slice(end - 1, end) if last else slice(start, end - 1)
            tokens[flipped] = (tokens[flipped] + 5) % VOCABULARY
        return dataclasses.replace(each, tokens=tokens)

    return change(batch, how)


def test_given_tokens_have_no_loss_of_their_own(blind: LearnerConfig, batch: Batch) -> None:
    """In this model all tokens of a run but the last can have an effect only as predicted tokens."""
    # The clip is so wide that it drops hardly a token.
    changed = dataclasses.replace(blind, clip_eps_low=0.9, clip_eps_high=9.0, clip_ratio_max=0.0)
    policy = Policy(changed, Ranks())

    def seen(batch: Batch) -> Gradient:
        (part,) = policy.lay_out([answers(changed, batch)])
        policy._gradient(part, MASKS.staleness_max, {})
        found = gradient_of(policy.model)
        policy.model.zero_grad()
        # The output of attention is multiplied by zeros, so attention affects only the gradient of these zeros.
        return {name: each for name, each in found.items() if "o_proj" not in name}

    plain = seen(batch)
    inside, behind = (seen(other_given(batch, last=last)) for last in (False, True))
    assert difference(inside, plain) < 1e-6
    assert difference(behind, plain) > 1e-2


def test_a_users_own_loop_leaves_out_given_tokens_in_the_same_way(
    blind: LearnerConfig, batch: Batch
) -> None:
    model = load_model(blind.model)
    inside, behind = (other_given(batch, last=last) for last in (False, True))
    for plain, one, other in zip(batch.groups, inside.groups, behind.groups, strict=True):
        losses = [own_loop.loss_of(model, group).item() for group in (plain, one, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert losses[0] != pytest.approx(losses[2], rel=1e-3)


def test_the_head_runs_for_no_given_token(config: LearnerConfig, batch: Batch) -> None:
    (part,) = Policy(config, Ranks()).lay_out([answers(config, batch)])
    members = [each for group in batch.groups for each in group.trajectories]
    tokens = sum(map(counted, members))
    assert sum(int(micro.answer_bt.sum()) for micro in part.micro) == tokens
    assert tokens == part.totals.tokens == sum(micro.tokens for micro in part.micro)


def test_numbers_of_episodes_change_no_bit_without_branches(
    config: LearnerConfig, batch: Batch
) -> None:
    named = change(batch, lambda _, sample, each: dataclasses.replace(each, episode=9 - sample))
    found, expected = trained(config, named), trained(config, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_trains_beside_given_tokens_and_its_rows_count_them(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.spoil[1] = lambda batch: change(
        batch, lambda _, sample, each: with_given(each, 4, [1, 2, 3]) if sample == 3 else each
    )
    rows = learn(dataclasses.replace(config, steps=2), coordinator)
    assert coordinator.refused == {}
    facts = [(row["answer_tokens"], row["given_tokens"], row["turns"]) for row in rows]
    assert facts == [(9.0, 0.75, 1.25), (9.0, 0.0, 1.0)]
    assert [row["tokens"] for row in rows] == [GROUPS * GROUP_SIZE * 9] * 2
    assert [row["by_staleness"]["0"]["length"] for row in rows[:1]] == [9.0]
    names = [(score.group, score.sample) for score in coordinator.scores[1]]
    assert len(names) == len(set(names)) == GROUPS * GROUP_SIZE
