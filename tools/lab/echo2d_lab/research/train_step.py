"""Measure the CPU time and the memory of one train step of echo2d, of TRL and of a plain loop.

    bash tools/trl/setup.sh
    .cache/trl/venv/bin/python -m echo2d_lab.research.train_step [--rounds 5] [--only NAME ...]

The program imports TRL, so it runs in TRL's environment. Each variant has a process of its own with
one thread, and the variants take turns, one step each in a round. A step trains a Qwen3 of 42 M
parameters with random weights in float32 on 2 groups of 4 answers: forward, backward, clipping of the
gradient's norm and AdamW. Every variant must find the same norm, so all do the same work.

    plain       the bound: a Hugging Face model, an answer at a time without padding, the head only on
                answer tokens, PPO's clip, and nothing else
    echo2d      `Policy.train_step` with packing. Answers of a group may share one copy of their
                prompt, which the bound never does; "a prompt each" turns that off
    TRL         `GRPOTrainer._compute_loss`, without its code for generation. Each micro-batch is
                padded to its own longest answer, while TRL pads to the longest of the step. On a CPU
                TRL applies the head to all positions, on a GPU only to answer tokens;
                "head as on a GPU" does that here, too
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from echo2d.client import Batch, Group, Span, Trajectory
from echo2d.learner.batch.checks import BatchRules
from echo2d.learner.batch.packing import answers_of, parts
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks

VOCABULARY, HIDDEN, LAYERS = 32768, 512, 8
PROMPT_TOKENS = 64
ANSWER_TOKENS = ((71, 312, 180, 254), (298, 133, 247, 301))  # of the answers of each group
TOKENS = sum(map(sum, ANSWER_TOKENS))
# Error of the rollout's logprobs, so small that no variant clips or truncates anything.
NOISE = 0.03
LR, GRAD_CLIP, CLIP = 1e-6, 1.0, 0.2
NORM_DIFFERENCE_MAX = 1e-4
PAD, EOS = "<pad>", "<eos>"  # of the tokenizer that TRL asks for

Step = Callable[[], float]


class Answer(NamedTuple):
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float


class Turn(NamedTuple):
    """One step: its CPU time, the norm of its gradient, and the most memory the process has had."""

    cpu_s: float
    norm: float
    rss_mb: float


def plain(directory: Path) -> Step:
    model = trained_model(directory)
    optimizer = torch.optim.AdamW(
        model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    answers = answers_in(directory)

    def step() -> float:
        for answer in answers:
            row = torch.from_numpy(np.concatenate([answer.prompt, answer.tokens]).astype(np.int64))
            hidden = model.base_model(input_ids=row[None], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[0, PROMPT_TOKENS - 1 : -1])
            logprobs = -cross_entropy(logits, row[PROMPT_TOKENS:], reduction="none")
            ratio = (logprobs - torch.from_numpy(answer.logprobs)).exp()
            gain = ratio * answer.advantage
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * answer.advantage
            torch.autograd.backward(-torch.minimum(gain, clipped).sum() / TOKENS)
        return optimized(model, optimizer)

    return step


def echo2d(directory: Path, *, shared: bool = True, **settings: Any) -> Step:
    config = LearnerConfig(
        url="http://127.0.0.1:1",
        token_file=directory / "token",
        model=directory,
        snapshot_root=directory / "snapshots",
        out_dir=directory / "out",
        steps=1 << 20,
        lr=LR,
        grad_clip=GRAD_CLIP,
        threads=1,
        **settings,
    )
    policy = Policy(config, Ranks())
    batch = batch_in(directory)
    groups = len(batch.groups)
    rules = BatchRules(2, groups, len(ANSWER_TOKENS[0]), VOCABULARY, len(ANSWER_TOKENS[0]))

    def step() -> float:
        answers = answers_of(batch, rules, advantages_of(config))
        if not shared:
            answers = [[replace(each, prompt=1) for each in group] for group in answers]
        laid_out = policy.lay_out(parts(answers, config.optimizer_steps, step=1, rng_seed=0))
        return policy.train_step(1, laid_out, staleness_max=2).grad_norm

    return step


def trl(directory: Path, micro_batch: int, *, head_as_on_gpu: bool = False) -> Step:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import utils

    if head_as_on_gpu:
        utils._use_triton = lambda _: True  # noqa: SLF001 - here it only chooses the positions
    model, answers = trained_model(directory), answers_in(directory)
    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=len(answers),
        num_generations=len(ANSWER_TOKENS[0]),
        learning_rate=LR,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        delta=3.0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda **_: [],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""] * len(answers)}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
    )
    optimizer = trainer.create_optimizer()
    micro_batches = len(answers) // micro_batch
    trainer.current_gradient_accumulation_steps = micro_batches
    trainer.args.steps_per_generation = micro_batches

    def step() -> float:
        for first in range(0, len(answers), micro_batch):
            inputs = padded(answers[first : first + micro_batch])
            torch.autograd.backward(trainer._compute_loss(model, inputs))  # noqa: SLF001 - it is what we time
        return optimized(model, optimizer)

    return step


VARIANTS: dict[str, Callable[[Path], Step]] = {
    "plain": plain,
    "echo2d": echo2d,
    "echo2d, micro_batch_tokens = 1024": partial(echo2d, micro_batch_tokens=1024),
    "echo2d, a prompt each": partial(echo2d, shared=False),
    "TRL, micro-batch of 8": partial(trl, micro_batch=8),
    "TRL, micro-batch of 1": partial(trl, micro_batch=1),
    "TRL, micro-batch of 1, head as on a GPU": partial(trl, micro_batch=1, head_as_on_gpu=True),
}


def padded(answers: Sequence[Answer]) -> dict[str, Tensor]:
    """The inputs of TRL's loss. All prompts are equally long."""

    def column(values: Sequence[NDArray[Any]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            list(map(torch.from_numpy, values)), batch_first=True
        )

    return {
        "prompt_ids": column([each.prompt.astype(np.int64) for each in answers]),
        "prompt_mask": column([np.ones(PROMPT_TOKENS, np.int64) for _ in answers]),
        "completion_ids": column([each.tokens.astype(np.int64) for each in answers]),
        "completion_mask": column([np.ones(len(each.tokens), np.int64) for each in answers]),
        "old_per_token_logps": column([each.logprobs for each in answers]),
        "advantages": torch.tensor([each.advantage for each in answers]),
        "num_items_in_batch": torch.tensor(TOKENS),
    }


def optimized(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Clip the gradient and apply it. Returns its norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def trained_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()


def batch_in(directory: Path) -> Batch:
    """The batch of every step: the same random tokens and rewards, with the logprobs that `prepare` has saved."""
    rng, path = np.random.default_rng(0), directory / "logprobs.npy"
    logprobs = np.load(path) if path.exists() else np.zeros(TOKENS, np.float32)
    groups = []
    for group, lengths in enumerate(ANSWER_TOKENS):
        prompt = rng.integers(2, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        answers = []
        for sample, length in enumerate(lengths):
            own, logprobs = logprobs[:length], logprobs[length:]
            tokens = rng.integers(2, VOCABULARY, length, dtype=np.int32)
            spans = (Span(0, length, 0, "00"),)
            reward = float(rng.normal())
            answers.append(Trajectory(tokens, own, spans, reward, "worker", sample=sample))
        groups.append(Group(group, prompt, tuple(answers)))
    return Batch(1, 1, "digest", tuple(groups))


def answers_in(directory: Path) -> list[Answer]:
    found = []
    for group in batch_in(directory).groups:
        rewards = np.array([each.reward for each in group.trajectories], np.float32)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        found += [
            Answer(group.prompt, each.tokens, each.logprobs, float(advantage))
            for each, advantage in zip(group.trajectories, advantages, strict=True)
        ]
    return found


def prepare(directory: Path) -> None:
    """Save the model, a tokenizer, and the rollout's logprobs."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            tie_word_embeddings=True,
            **shape,
        )
    )
    print(
        f"{model.num_parameters() / 1e6:.1f} M parameters, {TOKENS:,} tokens of answers in a step"
    )
    model.save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel({PAD: 0, EOS: 1}, unk_token=PAD))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS
    ).save_pretrained(directory)
    found = []
    for answer in answers_in(directory):
        row = torch.from_numpy(np.concatenate([answer.prompt, answer.tokens]).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0, PROMPT_TOKENS - 1 : -1]
        found.append(-cross_entropy(logits, row[PROMPT_TOKENS:], reduction="none").numpy())
    logprobs = np.concatenate(found)
    noise = np.random.default_rng(1).normal(0.0, NOISE, len(logprobs))
    np.save(directory / "logprobs.npy", (logprobs + noise).astype(np.float32))


def take_turns(variant: str, directory: Path) -> None:
    """Run a step for each line on stdin, and print its costs."""
    torch.set_num_threads(1)
    step = VARIANTS[variant](directory)
    for _ in sys.stdin:
        began = time.process_time()
        norm = step()
        cpu_s = time.process_time() - began
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(Turn(cpu_s, norm, rss_mb)), flush=True)


class Child:
    """The process of a variant."""

    def __init__(self, variant: str, directory: Path) -> None:
        self._variant = variant
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "echo2d_lab.research.train_step",
                "--variant",
                variant,
                str(directory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> Turn:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("["):
                return Turn(*json.loads(line))
        raise SystemExit(f"{self._variant}: its process ended with {self._process.wait()}")

    def end(self) -> None:
        self._process.communicate()


def measure(directory: Path, variants: Sequence[str], rounds: int) -> dict[str, list[Turn]]:
    children = {variant: Child(variant, directory) for variant in variants}
    # The first step makes the optimizer's state, and is not counted.
    first = {variant: child.turn() for variant, child in children.items()}
    norms = [turn.norm for turn in first.values()]
    if max(norms) - min(norms) > NORM_DIFFERENCE_MAX * min(norms):
        raise SystemExit(f"the variants have different gradients: their norms are {norms}")
    took: dict[str, list[Turn]] = {variant: [] for variant in variants}
    for done in range(rounds):
        for variant, child in children.items():
            took[variant].append(child.turn())
        line = ", ".join(f"{turns[-1].cpu_s:.2f}" for turns in took.values())
        print(f"round {done + 1}: {line} CPU-s", file=sys.stderr, flush=True)
    for child in children.values():
        child.end()
    return took


def table(took: dict[str, list[Turn]]) -> None:
    """Print the table. A ratio is that of two steps of the same round."""
    others = [name for name in ("plain", "echo2d") if name in took]
    names = ["train step", "CPU-s", "tokens / CPU-s", *(f"times {other}" for other in others)]
    print(f"| {' | '.join([*names, 'peak RSS'])} |")
    print("| --- " * (len(names) + 1) + "|")
    for variant, turns in took.items():
        cpu_s = [turn.cpu_s for turn in turns]
        ratios = [
            spread([own / turn.cpu_s for own, turn in zip(cpu_s, took[other], strict=True)])
            for other in others
        ]
        speed = f"{TOKENS / median(cpu_s):.0f}"
        cells = [variant, spread(cpu_s), speed, *ratios, f"{turns[-1].rss_mb:,.0f} MB"]
        print(f"| {' | '.join(cells)} |")


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    # This option starts the process of a variant.
    parser.add_argument("--variant", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.variant:
        take_turns(chosen.variant[0], Path(chosen.variant[1]))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        table(measure(Path(directory), chosen.only, chosen.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
