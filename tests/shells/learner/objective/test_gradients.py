"""The learner's gradient of random recipes and batches is that of the oracle, which is written from the papers.

A seed draws the recipe, the layout of rows and the batch: given tokens, branches of episodes, spans of several
versions, answers that were cut off, temperatures, prompts of one token, a head that is tied or not. Seeds 0 to 89 have
every combination of objective, proximal policy and correction that the learner accepts. The first seeds run at every
commit, with every form of the KL, a teacher alone and beside a reward; all 200 run in `make nightly-slow`. Each fifth
seed trains a mixture of experts, of which engines told some.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from echo2d.client import Batch, Group, Sampling, Span, Trajectory
from echo2d.core.protocol.experts import EXPERTS
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import answers_of, parts, whole_answers
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks
from tests.support.batches import with_given
from tests.support.learner import config_in
from tests.support.model_shapes import MOE, SMALL
from tests.support.oracle import (
    Gradient,
    Models,
    difference,
    expected_gradient,
    given_tlc,
    gradient_of,
    replaying,
)

DIFFERENCE_MAX = 1e-5  # the learner computes in float32, the oracle in float64
STEP, STALENESS_MAX = 9, 3
RECIPES = tuple(
    itertools.product(
        ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "distill"),
        ("rollout", "recomputed", "loglinear"),
        ("none", "tis", "adaptive_clip", "icepop", "sequence_mask", "sequence_tis"),
    )
)
# kl_coef, kl_in and kl_estimator.
KLS = (
    (0.0, "loss", "k3"),
    (0.1, "loss", "k2"),
    (0.1, "loss", "k3"),
    *((0.1, "reward", each) for each in ("k1", "k2", "k3")),
)
EVERY_COMMIT, EVERY_NIGHT = 12, 200
# Errors of the rollout's logprobs: random ones, and a larger one of one token of each answer.
NOISE, OUTLIER = 0.3, 1.5


SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "mixture": {"kind": Qwen3MoeConfig, "num_experts": 6, "norm_topk_prob": True, **MOE},
}


class Weights(NamedTuple):
    base: Path
    moved: dict[str, torch.Tensor]  # of the policy, which differs from the base
    teacher: Path

    def double(
        self, weights: dict[str, torch.Tensor] | None = None, directory: Path | None = None
    ) -> Any:
        """The base, or the model of another directory, or the base with these weights, in float64."""
        model = AutoModelForCausalLM.from_pretrained(
            directory or self.base, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        model.set_experts_implementation("eager")  # the grouped products do not take float64
        model.load_state_dict(weights or model.state_dict())
        return model.double()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """Two models, whose heads are tied or not, a mixture of experts, and a wider teacher of more layers."""
    torch.manual_seed(0)

    # The range is so wide that the output depends strongly on the prompt.
    def made(name: str, kind: Any = Qwen3Config, **changes: Any) -> tuple[Path, Any]:
        shape = kind(**{**SMALL, "initializer_range": 0.2, **changes})
        model = AutoModelForCausalLM.from_config(shape)
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        (directory / "tokenizer.json").write_text("{}")
        return directory, model

    teacher, _ = made("teacher", hidden_size=48, num_hidden_layers=3)
    found = {}
    for name, shape in SHAPES.items():
        directory, model = made("base", **shape)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * weight.std() * torch.randn_like(weight)
        found[name] = Weights(directory, model.state_dict(), teacher)
    return found


def drawn_settings(seed: int, rng: np.random.Generator, teacher: Path) -> dict[str, Any]:
    """Settings of the learner that change the gradient, or must not."""
    # 37 and 108 have no common divisor.
    objective, proximal, correction = RECIPES[seed * 37 % len(RECIPES)]
    kl_coef, kl_in, kl_estimator = KLS[seed % len(KLS)]
    if (
        objective == "distill" and kl_in == "reward"
    ):  # the learner refuses it, because rewards do not count
        kl_coef = 0.0
    scales = objective in ("grpo", "gspo", "cispo")
    # The learner refuses the other recipes of cispo and of adaptive_clip, and the others without a two-sided clip.
    bounded = proximal == "recomputed" or (proximal == "rollout" and correction != "none")
    if (objective == "cispo" and not bounded) or correction == "adaptive_clip":
        proximal = "recomputed"
    found: dict[str, Any] = {
        "objective": objective,
        "proximal": proximal,
        "correction": correction,
        "clip_ratio_max": float(rng.choice([0.0, 1.6, 3.0] if bounded else [1.6, 3.0])),
        "tis_cap": float(rng.choice([1.1, 2.0])),
        "mask_low": float(rng.choice([0.0, 0.8])),
        "mask_high": float(rng.choice([0.0, 1.3])),
        "kl_coef": kl_coef,
        "kl_in": kl_in,
        "kl_estimator": kl_estimator,
        "teacher": teacher if objective == "distill" or not seed % 4 else None,
        "teacher_coef": float(rng.choice([0.3, 1.0])),
        "kl_weighted": bool(rng.integers(2)),
        "entropy_coef": float(rng.choice([0.0, 0.05])),
        "loss_mean": str(rng.choice(["auto", "token", "sequence", "constant"])),
        "loss_tokens": 20,
        "advantage_std": str(rng.choice(["sample", "population", *(["batch"] * 2 * scales)])),
        "cut_off": str(rng.choice(["train", "filter"])),
        "optimizer_steps": int(rng.integers(1, 4)),
        "packing": bool(rng.integers(4)),
        "micro_batch_tokens": int(rng.choice([40, 100, 16384])),
        "recompute": str(rng.choice(["none", "selective", "all"])),
        "rng_seed": seed,
    }
    if objective != "cispo" and rng.integers(2):
        found |= {"clip_eps_low": 0.1, "clip_eps_high": 0.3}
    return found


def drawn_batch(rules: BatchRules, rng: np.random.Generator, policy: Any) -> Batch:
    groups = (drawn_group(place, rules, rng, policy) for place in range(rules.groups))
    return Batch(STEP, 1, "digest", tuple(groups))


def drawn_group(place: int, rules: BatchRules, rng: np.random.Generator, policy: Any) -> Group:
    prompt = rng.integers(0, SMALL["vocab_size"], rng.integers(1, 10), dtype=np.int32)
    sampling = Sampling(float(rng.choice([0.7, 1.0, 1.3])))
    members: list[Trajectory] = []
    for episode in range(rules.group_size):
        reward = float(rng.integers(-8, 9)) / 8
        for branch in range(rng.choice([1, 1, 3])):
            drawn = drawn_trajectory(rules, rng)
            if hasattr(policy, "given_tlc"):
                drawn = with_experts(drawn, rng)
                policy.given_tlc = given_tlc(len(prompt), drawn)
            members.append(
                dataclasses.replace(
                    drawn,
                    # A group needs an answer in the loss.
                    finish=drawn.finish if members else "stop",
                    logprobs=drawn_logprobs(prompt, drawn, sampling.temperature, rng, policy),
                    reward=reward,
                    episode=episode,
                    branch=branch,
                    sample=(branch << 16) + episode,
                )
            )
    return Group(place, prompt, tuple(members), sampling=sampling)


def drawn_trajectory(rules: BatchRules, rng: np.random.Generator) -> Trajectory:
    """An answer of up to three spans, with up to two ranges of given tokens."""
    length = int(rng.integers(2, 24))
    cuts = sorted({0, length, *rng.integers(0, length, 2).tolist()})
    ages = rng.integers(0, STALENESS_MAX + 1 + rules.masks, len(cuts))
    ages[0] = min(ages[0], STALENESS_MAX)  # an answer has a token in the loss
    found = Trajectory(
        rng.integers(0, SMALL["vocab_size"], length, dtype=np.int32),
        np.zeros(length, dtype=np.float32),
        tuple(
            Span(*ends, STEP - 1 - int(age), "00")
            for ends, age in zip(itertools.pairwise(cuts), ages, strict=False)
        ),
        0.0,
        "worker",
        finish=str(rng.choice(["stop", "stop", "stop", "length"])),
    )
    for at in sorted({*rng.integers(0, length, rng.integers(3)).tolist()}, reverse=True):
        found = with_given(found, at, rng.integers(0, SMALL["vocab_size"], 3).tolist())
    return found


def with_experts(drawn: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Two of three trajectories with experts, zeros for given tokens."""
    shape = (len(drawn.tokens), SMALL["num_hidden_layers"], SHAPES["mixture"]["num_experts"])
    experts = rng.random(shape).argsort(-1)[..., : MOE["num_experts_per_tok"]].astype(np.uint8)
    experts[~drawn.written] = 0
    return dataclasses.replace(drawn, columns={EXPERTS: experts}) if rng.integers(3) else drawn


def drawn_logprobs(
    prompt: Any, drawn: Trajectory, temperature: float, rng: np.random.Generator, policy: Any
) -> Any:
    """Logprobs near those of the policy; 0 for given tokens."""
    row = torch.from_numpy(np.concatenate([prompt, drawn.tokens])).long()
    with torch.no_grad():
        logits = policy(input_ids=row[None]).logits[0, len(prompt) - 1 : -1] / temperature
    found = logits.log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0].numpy()
    found += rng.normal(0.0, NOISE, len(found))
    found[rng.integers(len(found))] -= OUTLIER
    return np.where(drawn.written, np.minimum(found, 0.0), 0.0).astype(np.float32)


def steps_of(
    config: LearnerConfig, rules: BatchRules, batch: Batch, start: dict[str, torch.Tensor]
) -> Iterator[tuple[set[int], dict[str, torch.Tensor], Gradient]]:
    """Yield the groups of each optimizer step of the learner, the weights before the step, and its gradient."""
    policy = Policy(config, Ranks())
    rules = dataclasses.replace(rules, experts=policy.expert_shape)
    assert faults(batch, STEP, rules, Trained()) == {}
    policy.model.load_state_dict(start)
    penalties = policy.penalties(whole_answers(batch, rules)) if config.penalizes else {}
    groups = answers_of(batch, rules, advantages_of(config), penalties)
    laid_out = policy.lay_out(
        parts(groups, config.optimizer_steps, step=STEP, rng_seed=config.rng_seed)
    )
    taken: list[tuple[dict[str, torch.Tensor], Gradient]] = []

    def take(*_: object) -> None:
        before = {name: each.clone() for name, each in policy.model.state_dict().items()}
        taken.append((before, gradient_of(policy.model)))

    policy._optimizer.register_step_pre_hook(take)
    policy.train_step(STEP, laid_out, STALENESS_MAX)
    for part, facts in zip(laid_out, taken, strict=True):
        yield ({answer.group_id for answer in part.answers}, *facts)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.nightly] if seed >= EVERY_COMMIT else [])
        for seed in range(EVERY_NIGHT)
    ],
)
def test_the_gradient_is_that_of_the_oracle(
    seed: int, weights: dict[str, Weights], tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    drawn, mixes = rng.integers(2), seed % 5 == 3
    found = weights["mixture" if mixes else "tied" if drawn else "untied"]
    settings = drawn_settings(seed, rng, found.teacher)
    # grad_clip is so large that nothing is clipped.
    config = config_in(
        tmp_path, found.base, steps=STEP, lr=3e-3, warmup_steps=0, grad_clip=1e9, **settings
    )
    size = int(rng.integers(2, 5))
    rules = BatchRules(
        STALENESS_MAX,
        groups=int(rng.integers(3, 6)),
        group_size=size,
        vocab_size=SMALL["vocab_size"],
        group_min=size,
        masks=bool(rng.integers(2)),
        trains_cut=config.cut_off == "train",
    )
    start, base = found.double(found.moved), found.double()
    teacher = found.double(directory=found.teacher)
    if mixes:
        start = replaying(start)
    batch = drawn_batch(rules, rng, start)
    seen: set[int] = set()
    for groups, before, own in steps_of(config, rules, batch, found.moved):
        own_model = found.double(before)
        models = Models(replaying(own_model) if mixes else own_model, start, base, teacher)
        off = difference(own, expected_gradient(config, rules, batch, groups, models))
        print(f"seed={seed} off={off:.1e} {settings}")  # noqa: T201
        assert off <= DIFFERENCE_MAX
        assert not groups & seen
        seen |= groups
    assert seen == {group.group_id for group in batch.groups}
