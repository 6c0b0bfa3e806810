"""The gradients of echo2d and TRL for every shared recipe: `python -m tests.support.trl_gradients DIRECTORY`.

TRL's environment runs it. Both sides train a small Qwen3 for one optimizer step by their own train
loops, and the gradient is taken just before the optimizer uses it. echo2d packs the answers into
several micro-batches; TRL pads them into one. Every other answer has given tokens. The model
differs from the base model of the KL term. DIRECTORY gets that base.

Prints JSON: by recipe the advantages and the losses of both sides, the micro-batches of echo2d, and
the relative difference of its gradient from each gradient of TRL.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from echo2d.client import Batch, Group, Sampling, Span, Trajectory
from echo2d.learner.batch.checks import BatchRules
from echo2d.learner.batch.packing import answers_of, parts
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks
from examples.trl_grpo import StaleGRPOTrainer, earned_by
from tests.support.model_shapes import SMALL
from tests.support.oracle import Gradient, difference, gradient_of
from tests.support.trl_recipes import RECIPES, UNEQUAL, SharedRecipe

PROMPTS = (5, 7, 9)  # tokens of each group's prompt
# Tokens of each answer, by group.
ANSWERS = ((3, 40, 17, 25), (31, 8, 12, 22), (14, 36, 5, 19))
GIVEN = (2, 5)  # of the output tokens of every other answer
TEMPERATURE = 0.8
# Errors of the rollout's logprobs: random ones, and OUTLIER for one token of each answer. The two-sided
# clip drops that token if the advantage is negative.
NOISE, OUTLIER = 0.35, 1.5
MICRO_BATCH_TOKENS = 64
NO_CLIPPING = 1e9
# Wide enough that logits matter. With much larger weights the model magnifies the rounding of float32:
# both gradients are then equally far from one in float64.
INITIALIZER_RANGE = 0.2
RULES = BatchRules(staleness_max=2, groups=len(PROMPTS), group_size=4, vocab_size=61, group_min=4)


class Step(NamedTuple):
    """What one side reports about its optimizer step."""

    gradient: Gradient
    advantages: list[float]
    loss: float


@dataclass(frozen=True, slots=True)
class Bench:
    """What both sides train: these weights, on this batch. base: the directory of the base model."""

    base: Path
    weights: dict[str, Tensor]
    batch: Batch

    def ours(self, recipe: SharedRecipe) -> tuple["Step", int]:
        """echo2d's step, and the number of its micro-batches."""
        config = self._config(recipe)
        policy = Policy(config, Ranks())
        policy.model.load_state_dict(self.weights)
        groups = answers_of(self.batch, RULES, advantages_of(config))
        (part,) = policy.lay_out(parts(groups, 1, step=1, rng_seed=0))
        taken: list[Gradient] = []
        policy._optimizer.register_step_pre_hook(lambda *_: taken.append(gradient_of(policy.model)))
        report = policy.train_step(1, [part], staleness_max=2)
        advantages = [float(answer.advantage) for group in groups for answer in group]
        return Step(taken[0], advantages, report.loss), len(part.micro)

    def _config(self, recipe: SharedRecipe) -> LearnerConfig:
        return LearnerConfig(
            url="http://127.0.0.1:1",
            token_file=self.base / "token",
            model=self.base,
            snapshot_root=self.base / "snapshots",
            out_dir=self.base / "out",
            steps=1,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            grad_clip=NO_CLIPPING,
            **recipe.learner,
        )

    def theirs(self, recipe: SharedRecipe) -> "Step":
        """TRL's step."""
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model.load_state_dict(self.weights)
        taken = TakenGradient()
        trainer = (GRPOTrainer if recipe.vllm else StaleGRPOTrainer)(
            model=model,
            reward_funcs=earned_by,
            args=self._trl_config(recipe),
            train_dataset=Dataset.from_dict({"prompt": [""] * len(self._answers())}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(self.base),
            rollout_func=self._rollout,
            callbacks=[taken],
        )
        if recipe.vllm:
            # There is no vLLM here; of vLLM, TRL's corrections need only these two.
            trainer.use_vllm, trainer._last_loaded_step = True, 0
        ended = trainer.train()
        return Step(taken.gradient, list(trainer._logs["advantages"]), ended.training_loss)

    def _trl_config(self, recipe: SharedRecipe) -> GRPOConfig:
        return GRPOConfig(
            output_dir=str(self.base / "trl"),
            max_steps=1,
            per_device_train_batch_size=len(self._answers()),
            num_generations=RULES.group_size,
            temperature=TEMPERATURE,
            max_grad_norm=0.0,  # no clipping
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **recipe.trl,
        )

    def _answers(self) -> list[tuple[Group, Trajectory]]:
        return [(group, each) for group in self.batch.groups for each in group.trajectories]

    def _rollout(self, prompts: Sequence[str], _: GRPOTrainer) -> dict[str, list[Any]]:
        answers = self._answers()
        assert len(answers) == len(prompts)
        return {
            "prompt_ids": [group.prompt.tolist() for group, _ in answers],
            "completion_ids": [each.tokens.tolist() for _, each in answers],
            "logprobs": [each.logprobs.tolist() for _, each in answers],
            "env_mask": [each.written.astype(int).tolist() for _, each in answers],
            "earned": [each.reward for _, each in answers],
        }


class TakenGradient(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Takes the gradient just before TRL's optimizer step."""

    gradient: Gradient

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradient = gradient_of(model)


def make_bench(directory: Path) -> Bench:
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**SMALL, initializer_range=INITIALIZER_RANGE)).eval()
    base.save_pretrained(directory)
    words = {word: token for token, word in enumerate(["<pad>", "<eos>", *map(str, range(59))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)
    with torch.no_grad():
        for weight in base.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std())
    rng = np.random.default_rng(0)
    groups = [
        Group(
            place,
            (prompt := rng.integers(2, RULES.vocab_size, PROMPTS[place], dtype=np.int32)),
            tuple(
                trajectory(base, prompt, length, sample, rng)
                for sample, length in enumerate(ANSWERS[place])
            ),
            sampling=Sampling(TEMPERATURE, 1.0),
        )
        for place in range(RULES.groups)
    ]
    weights = {name: weight.detach().clone() for name, weight in base.state_dict().items()}
    return Bench(directory, weights, Batch(1, 1, "digest", tuple(groups)))


def trajectory(
    model: Any, prompt: Any, length: int, sample: int, rng: np.random.Generator
) -> Trajectory:
    tokens = rng.integers(2, RULES.vocab_size, length, dtype=np.int32)
    row = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=row[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1).gather(1, row[len(prompt) :, None])[:, 0].numpy()
    off = rng.normal(0.0, NOISE, length)
    off[rng.integers(length)] -= OUTLIER
    drawn = np.minimum(logprobs + off, 0.0).astype(np.float32)
    spans: tuple[Span, ...] = (Span(0, length, 0, "00"),)
    given: tuple[tuple[int, int], ...] = ()
    if sample % 2:
        start, end = GIVEN
        spans, given = (Span(0, start, 0, "00"), Span(end, length, 0, "00")), (GIVEN,)
        drawn[start:end] = 0.0
    reward = float(rng.normal())
    return Trajectory(tokens, drawn, spans, reward, "worker", given=given, sample=sample)


def main(directory: Path) -> None:
    bench = make_bench(directory)
    recipes = RECIPES | UNEQUAL
    ours = {name: bench.ours(recipe) for name, recipe in recipes.items()}
    theirs = {name: bench.theirs(recipe) for name, recipe in recipes.items()}
    found = {
        name: {
            "micro_batches": micro_batches,
            "advantages": [own.advantages, theirs[name].advantages],
            "losses": [own.loss, theirs[name].loss],
            "differences": {
                other: difference(own.gradient, each.gradient) for other, each in theirs.items()
            },
        }
        for name, (own, micro_batches) in ours.items()
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
