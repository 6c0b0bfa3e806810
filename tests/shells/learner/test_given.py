"""Given tokens are read, but do not count in anything that is trained or measured.

The references are written out here: a row at a time, with the model's own attention, log p of every token, and weight 0
where a token was given or is too old.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo2d.client import Batch, Group, Span, Trajectory
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import PackedAnswer, answers_of
from echo2d.learner.config import LearnerConfig, Mean
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.objective.objectives import distance_to_base, policy_loss
from echo2d.learner.objective.token_weights import WeightInputs, weigh
from echo2d.learner.ranks.ranks import Ranks
from examples import own_loop
from tests.support.batches import with_given
from tests.support.learner import learn, record
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS, ScriptedCoordinator

VOCABULARY, STEP = 17, 20
MASKS = BatchRules(2, GROUPS, GROUP_SIZE, VOCABULARY, GROUP_SIZE, masks=True)
TOO_OLD, NEW = STEP - 4, STEP - 1
WIDE: dict[str, Any] = {"clip_eps_low": 0.9, "clip_eps_high": 9.0, "clip_ratio_max": 0.0}
Gradient = dict[str, Tensor]
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


def answers(config: LearnerConfig, batch: Batch, rules: BatchRules = MASKS) -> list[PackedAnswer]:
    assert faults(batch, STEP, rules, Trained()) == {}
    return [answer for group in answers_of(batch, rules, advantages_of(config)) for answer in group]


def moved(config: LearnerConfig) -> Policy:
    """A policy that differs from the base, as after some train steps."""
    policy, dice = Policy(config, Ranks()), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=dice)
    return policy


def trained(
    config: LearnerConfig, batch: Batch, rules: BatchRules = MASKS, *, shared: bool = True
) -> Gradient:
    """The gradient of one optimizer step. shared: whether answers may read one copy of a prompt."""
    policy = moved(config)
    found = answers(config, batch, rules)
    if not shared:
        found = [dataclasses.replace(each, prompt=1) for each in found]
    (part,) = policy.lay_out([found])
    policy._gradient(part, rules.staleness_max, {})
    return gradient(policy.model)


def gradient(model: Any) -> Gradient:
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def by_hand(config: LearnerConfig, batch: Batch) -> Gradient:
    model, base = load_model(config.model), load_model(config.model)
    model.load_state_dict(moved(config).model.state_dict())
    lengths: Counter[tuple[int, int]] = Counter()  # of each episode
    for group in batch.groups:
        for episode, each in zip(group.episodes, group.trajectories, strict=True):
            lengths[group.group_id, episode] += int(counts_in(each).sum())
    for group in batch.groups:
        rewards = {
            name: each.reward for name, each in zip(group.episodes, group.trajectories, strict=True)
        }
        found_e = advantages_of(config)(np.array([*rewards.values()], dtype=np.float32))
        advantage_of = dict(zip(rewards, found_e, strict=True))
        for episode, each in zip(group.episodes, group.trajectories, strict=True):
            counts_t = counts_in(each)
            share = {
                "token": 1 / lengths.total(),
                "sequence": 1 / (len(lengths) * lengths[group.group_id, episode]),
                "constant": 1 / (len(lengths) * max(1, config.loss_tokens)),
            }[config.mean]
            shares_t = share * counts_t
            logprobs_t, entropy_t = scores(model, group, each)
            base_t = scores(base, group, each)[0].detach()
            rollout_t = torch.from_numpy(each.logprobs.copy())
            advantages_t = torch.full_like(rollout_t, float(advantage_of[episode]))
            weights_t = torch.ones_like(rollout_t)
            answer_t = torch.zeros_like(counts_t, dtype=torch.int64)
            facts = (logprobs_t.detach(), rollout_t, advantages_t, staleness_of(each), answer_t)
            inputs = WeightInputs(*(fact_t[counts_t] for fact_t in facts))
            weights_t[counts_t] = weigh(config, inputs).weights_n
            distance_t = distance_to_base(logprobs_t, base_t, rollout_t)
            extra_t = config.kl_coef * distance_t - config.entropy_coef * entropy_t
            loss = policy_loss(logprobs_t, weights_t, advantages_t, shares_t)
            torch.autograd.backward(loss + (shares_t * extra_t).sum())
    return gradient(model)


def scores(model: Any, group: Group, each: Trajectory) -> tuple[Tensor, Tensor]:
    """log p and entropy of every output token [t]. The answer has a row of its own."""
    row = torch.from_numpy(np.concatenate([group.prompt, each.tokens])).long()
    logits = model(input_ids=row[None]).logits[0, len(group.prompt) - 1 : -1]
    everything = (logits / group.sampling.temperature).log_softmax(-1)
    logprobs = everything.gather(1, row[len(group.prompt) :, None])[:, 0]
    return logprobs, -(everything.exp() * everything).sum(1)


def staleness_of(each: Trajectory) -> Tensor:
    """The staleness of each token [t]; -1: the token was given."""
    found = torch.full((len(each.tokens),), -1)
    for span in each.spans:
        found[span.start : span.end] = STEP - 1 - span.version
    return found


def counts_in(each: Trajectory) -> Tensor:
    """Which tokens are in the loss [t]."""
    found = staleness_of(each)
    return (found >= 0) & (found <= MASKS.staleness_max)


def difference(found: Gradient, expected: Gradient) -> float:
    """The norm of the difference, divided by the norm of the expected gradient, over all weights."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).double().square().sum()) for name in found)
    whole = sum(float(each.double().square().sum()) for each in expected.values())
    return float(np.sqrt(off / whole))


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"loss_mean": "sequence"},
        {"objective": "dr_grpo", "loss_tokens": 9},
        {"objective": "gspo"},
        {"proximal": "loglinear", "correction": "icepop"},
        {"correction": "sequence_mask"},
        {"kl_coef": 0.5, "entropy_coef": 0.1},
    ],
    ids=str,
)
def test_the_gradient_equals_that_of_all_tokens_with_a_share_of_0_for_given_ones(
    config: LearnerConfig, batch: Batch, recipe: dict[str, Any]
) -> None:
    # A wide clip, so that it drops hardly a token.
    changed = dataclasses.replace(config, **{**WIDE, **recipe})
    assert sum(len(each.given) for group in batch.groups for each in group.trajectories) == 16
    assert difference(trained(changed, batch), by_hand(changed, batch)) < 1e-6


@pytest.mark.parametrize(
    "layout",
    [{"packing": False}, {"micro_batch_tokens": 40}, {"packing": False, "micro_batch_tokens": 40}],
    ids=str,
)
def test_every_layout_has_the_same_gradient(
    config: LearnerConfig, batch: Batch, layout: dict[str, Any]
) -> None:
    changed = dataclasses.replace(config, loss_mean="sequence", **WIDE)
    expected = trained(changed, batch)
    found = trained(dataclasses.replace(changed, **layout), batch)
    assert difference(found, expected) < 1e-6
    assert difference(trained(changed, batch, shared=False), expected) < 1e-6


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
    changed = dataclasses.replace(blind, **WIDE)
    policy = Policy(changed, Ranks())

    def seen(batch: Batch) -> Gradient:
        (part,) = policy.lay_out([answers(changed, batch)])
        policy._gradient(part, MASKS.staleness_max, {})
        found = gradient(policy.model)
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
    (part,) = moved(config).lay_out([answers(config, batch)])
    members = [each for group in batch.groups for each in group.trajectories]
    counted = sum(int(counts_in(each).sum()) for each in members)
    assert sum(int(micro.answer_bt.sum()) for micro in part.micro) == counted
    assert counted == part.totals.tokens == sum(micro.tokens for micro in part.micro)


def test_numbers_of_episodes_change_no_bit_without_branches(
    config: LearnerConfig, batch: Batch
) -> None:
    named = change(batch, lambda _, sample, each: dataclasses.replace(each, episode=9 - sample))
    found, expected = trained(config, named), trained(config, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
def test_an_episode_of_several_branches_weighs_as_one(
    config: LearnerConfig, batch: Batch, mean: Mean
) -> None:
    """Samples 2 and 3 are its branches. If micro-batches are small, they are in different ones."""
    changed = dataclasses.replace(config, loss_mean=mean, loss_tokens=9, **WIDE)
    rules = dataclasses.replace(MASKS, group_size=GROUP_SIZE - 1, group_min=GROUP_SIZE - 1)

    def branch(_: int, sample: int, each: Trajectory) -> Trajectory:
        episode = min(sample, 2)
        return dataclasses.replace(
            each, episode=episode, branch=sample // 3, reward=float(episode % 2)
        )

    branched = change(batch, branch)
    expected = by_hand(changed, branched)
    for tokens_max in (40, 4096):
        narrow = dataclasses.replace(changed, micro_batch_tokens=tokens_max)
        assert difference(trained(narrow, branched, rules), expected) < 1e-6


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
