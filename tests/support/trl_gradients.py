"""Compares the gradients of one optimizer step of the learner and of TRL, recipe by recipe. TRL's environment runs it.

    python -m tests.support.trl_gradients MODEL      # prints one JSON object

from_trl has the differences of whole gradients, relative; apart those from the gradient of the first recipe.

Both have the same weights, which are not those of the base, and the same 12 answers, whose recorded logprobs are off by
N(0, 0.35). The learner packs them into rows of several micro-batches; TRL pads all of them into one.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import nanstd

from learner.batch.packing import PackedAnswer
from learner.model.policy import Policy
from learner.objective.objectives import group_advantages
from learner.ranks.ranks import Ranks
from tests.support.learner import config_in

TEMPERATURE, NOISE, CONSTANT = 0.8, 0.35, 50
GROUPS, GROUP_SIZE, PROMPT, LONGEST, VOCABULARY = 3, 4, 6, 40, 17
MICRO_TOKENS = 64


@dataclass(frozen=True)
class Recipe:
    """What the learner's config has beside its defaults, and TRL's beside its own."""

    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)


# The workers' data are stale, and TRL's clip knows no further correction.
PPO: dict[str, Any] = {"correction": "none"}
PLAIN: dict[str, Any] = {**PPO, "clip_ratio_max": 0.0}
RECIPES = {
    "token mean": Recipe(PLAIN, {"loss_type": "dapo"}),
    "clip-higher": Recipe(
        {**PLAIN, "clip_eps_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}
    ),
    "two-sided clip": Recipe({**PPO, "clip_ratio_max": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "dual clip, by default": Recipe(PPO, {"loss_type": "dapo", "delta": 3.0}),
    "sequence mean": Recipe({**PLAIN, "loss_mean": "sequence"}, {"loss_type": "grpo"}),
    "dr_grpo": Recipe(
        {**PLAIN, "objective": "dr_grpo", "loss_tokens": CONSTANT},
        {"loss_type": "dr_grpo", "max_completion_length": CONSTANT},
    ),
    "gspo": Recipe(
        {**PLAIN, "objective": "gspo"},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "cispo": Recipe(
        {"objective": "cispo", "correction": "tis", "tis_cap": 1.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "kl, by default": Recipe({**PLAIN, "kl_coef": 0.1}, {"loss_type": "dapo", "beta": 0.1}),
    "kl, not weighed": Recipe(
        {**PLAIN, "kl_coef": 0.1, "kl_weighted": False},
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
    "entropy bonus": Recipe(
        {**PLAIN, "entropy_coef": 0.01}, {"loss_type": "dapo", "entropy_coef": 0.01}
    ),
}
FIRST = "token mean"


def answers(rng: np.random.Generator) -> list[PackedAnswer]:
    """The answers, whose logprobs are still missing."""
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(1, VOCABULARY, PROMPT, dtype=np.int32)
        rewards = rng.random(GROUP_SIZE, dtype=np.float32)
        for sample, advantage in enumerate(group_advantages(rewards, "scaled")):
            length = int(rng.integers(3, LONGEST + 1))
            tokens = np.concatenate([prompt, rng.integers(1, VOCABULARY, length, dtype=np.int32)])
            found.append(
                PackedAnswer(
                    group,
                    sample,
                    tokens,
                    np.arange(len(tokens)) >= PROMPT,
                    np.zeros(length, dtype=np.float32),
                    np.zeros(length, dtype=np.int64),
                    advantage,
                    temperature=TEMPERATURE,
                    prompt=PROMPT,
                )
            )
    return found


def perturb(model: torch.nn.Module) -> None:
    """Move the weights, by name alike in every copy."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))


def logprobs(model: Any, given: Sequence[PackedAnswer]) -> list[NDArray[np.float32]]:
    """Of the tokens of each answer, by the model's own forward pass."""
    found = []
    for each in given:
        tokens = torch.from_numpy(each.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, PROMPT - 1 : -1] / TEMPERATURE
        scores = logits.log_softmax(-1).gather(1, tokens[PROMPT:, None])[:, 0]
        found.append(scores.numpy().astype(np.float32))
    return found


def ours(folder: Path, model: Path, given: list[PackedAnswer], recipe: Recipe) -> dict[str, Tensor]:
    config = config_in(folder, model, micro_batch_tokens=MICRO_TOKENS, **recipe.ours)
    policy = Policy(config, Ranks())
    perturb(policy.model)
    (part,) = policy.lay_out([given])
    assert len(part.micro) > 2, "one micro-batch would not show how gradients are added up"
    policy._gradient(part, 0, {})
    return gradients(policy.model)


def theirs(
    folder: Path, model: Path, given: list[PackedAnswer], recipe: Recipe, base: list[NDArray[Any]]
) -> dict[str, Tensor]:
    settings: dict[str, Any] = {"max_completion_length": LONGEST, **recipe.theirs}
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(given),
        num_generations=GROUP_SIZE,
        temperature=TEMPERATURE,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        **settings,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda **_: [0.0],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * len(given)}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    perturb(trainer.model)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    lengths = [len(each.logprobs_n) for each in given]
    padded = {
        "completion_ids": padding([each.tokens[PROMPT:] for each in given]).long(),
        "completion_mask": padding([np.ones(length, dtype=np.int64) for length in lengths]),
        "old_per_token_logps": padding([each.logprobs_n for each in given]),
        "ref_per_token_logps": padding(base),
    }
    inputs = {
        **padded,
        "prompt_ids": torch.stack(
            [torch.from_numpy(each.tokens[:PROMPT]) for each in given]
        ).long(),
        "prompt_mask": torch.ones(len(given), PROMPT, dtype=torch.int64),
        "advantages": torch.tensor([float(each.advantage) for each in given]),
        "num_items_in_batch": torch.tensor(sum(lengths)),
    }
    trainer._compute_loss(trainer.model, inputs).backward()
    return gradients(trainer.model)


def padding(rows: Sequence[NDArray[Any]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(row) for row in rows], batch_first=True
    )


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the whole gradients: the norm of the difference over the norm of the second one."""
    assert found.keys() == expected.keys()
    one, other = (
        torch.cat([each[name].double().flatten() for name in expected])
        for each in (found, expected)
    )
    return float((one - other).norm() / other.norm())


def advantage_difference() -> float:
    """Between the learner's advantages of random rewards and TRL's."""
    rewards = torch.rand(8, GROUP_SIZE, generator=torch.Generator().manual_seed(2))
    deviation = nanstd(rewards, dim=1)[:, None]
    expected = (rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)
    found = np.stack([group_advantages(row, "scaled") for row in rewards.numpy()])
    return float(np.abs(found - expected.numpy()).max())


def main(directory: str) -> None:
    torch.set_num_threads(1)
    model, rng = Path(directory), np.random.default_rng(0)
    given = answers(rng)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    base = logprobs(plain, given)
    perturb(plain)
    for answer, exact in zip(given, logprobs(plain, given), strict=True):
        answer.logprobs_n[:] = exact + NOISE * rng.standard_normal(len(exact), dtype=np.float32)
    first: dict[str, Tensor] = {}
    found, apart = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RECIPES.items():
            mine = ours(Path(folder), model, given, recipe)
            found[name] = difference(mine, theirs(Path(folder), model, given, recipe, base))
            first = mine if name == FIRST else first
            apart[name] = difference(mine, first)
    print(json.dumps({"advantages": advantage_difference(), "from_trl": found, "apart": apart}))  # noqa: T201 - a program


if __name__ == "__main__":
    main(*sys.argv[1:])
