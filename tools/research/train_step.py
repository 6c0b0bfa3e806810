"""Measure the CPU time of a train step: the learner, Hugging Face TRL, and a plain loop over the same answers.

    bash tools/trl/setup.sh && .cache/trl/venv/bin/python -m tools.research.train_step [--rounds 5]

A Qwen3 of 42 M parameters with random weights takes steps on two groups of four answers in float32, on one thread,
with AdamW and the gradient's norm clipped. Each program has a process of its own; they take their steps in turn, so a
busy machine slows all of them. CPU time is counted, not wall time.

The plain loop runs transformers' model over one answer after the other: no padding, the head on answer tokens alone.
The learner reads the prompt of a group once; `unshared` has it read the prompt for every answer, as all others do.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from learner.batch.packing import PackedAnswer
from learner.config import LearnerConfig
from learner.model.policy import Policy
from learner.ranks.ranks import Ranks

VOCABULARY, HIDDEN, LAYERS = 32768, 512, 8
GROUPS, GROUP_SIZE, PROMPT, SHORTEST, LONGEST = 2, 4, 64, 71, 312
LR, CLIP = 1e-6, 1.0
END = "<end>"

Step = Callable[[], None]


def make_model(directory: Path) -> None:
    """Save the model, and a tokenizer that nobody asks for a token."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({END: 0}, unk_token=END))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(directory)


def answers(*, shared: bool = True) -> list[PackedAnswer]:
    """The answers of a step. What it costs does not depend on their tokens."""
    rng, found = np.random.default_rng(0), []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, PROMPT, dtype=np.int32)
        for sample in range(GROUP_SIZE):
            length = int(rng.integers(SHORTEST, LONGEST + 1))
            tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, length, dtype=np.int32)])
            logprobs = np.full(length, -np.log(VOCABULARY), dtype=np.float32)
            facts = (np.arange(len(tokens)) >= PROMPT, logprobs, np.zeros(length, dtype=np.int64))
            advantage = np.float32(1 - 2 * (sample % 2))
            row = (group, sample, tokens, *facts, advantage)
            found.append(PackedAnswer(*row, prompt=PROMPT if shared else 1))
    return found


def plain(model: Path, _: Path) -> Step:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer, given = torch.optim.AdamW(policy.parameters(), lr=LR), answers()
    total = sum(len(each.logprobs_n) for each in given)

    def step() -> None:
        for each in given:
            tokens = torch.from_numpy(each.tokens.astype(np.int64))
            hidden = policy.model(tokens[None], use_cache=False).last_hidden_state
            logits = policy.lm_head(hidden[0, PROMPT - 1 : -1])
            scores = logits.log_softmax(-1).gather(1, tokens[PROMPT:, None])[:, 0]
            ratio = (scores - torch.from_numpy(each.logprobs_n)).exp()
            advantage = float(each.advantage)
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            torch.autograd.backward(-clipped.sum() / total)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def echo2d(model: Path, folder: Path, *, shared: bool = True, **changes: Any) -> Step:
    config = LearnerConfig(
        url="http://127.0.0.1:1",
        token_file=folder / "token",
        model=model,
        snapshot_root=folder / "snapshots",
        out_dir=folder / "out",
        steps=1 << 30,
        lr=LR,
        grad_clip=CLIP,
        threads=1,
        **changes,
    )
    policy, given = Policy(config, Ranks()), answers(shared=shared)

    def step() -> None:
        policy.train_step(1, policy.lay_out([given]), 0)

    return step


def trl(model: Path, folder: Path, *, rows: int) -> Step:
    """rows: answers of a micro-batch, padded to the longest of them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    given = answers()
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(given) // rows,
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST,
        loss_type="dapo",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda **_: [0.0],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * len(given)}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )
    policy = trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(given) // rows
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    total = torch.tensor(sum(len(each.logprobs_n) for each in given))
    pad = torch.nn.utils.rnn.pad_sequence
    batches = []
    for start in range(0, len(given), rows):
        some = given[start : start + rows]
        tokens = [torch.from_numpy(each.tokens.astype(np.int64)) for each in some]
        batches.append(
            {
                "prompt_ids": torch.stack([each[:PROMPT] for each in tokens]),
                "prompt_mask": torch.ones(len(some), PROMPT, dtype=torch.int64),
                "completion_ids": pad([each[PROMPT:] for each in tokens], batch_first=True),
                "completion_mask": pad(
                    [torch.ones(len(each) - PROMPT, dtype=torch.int64) for each in tokens],
                    batch_first=True,
                ),
                "old_per_token_logps": pad(
                    [torch.from_numpy(each.logprobs_n) for each in some], batch_first=True
                ),
                "advantages": torch.tensor([float(each.advantage) for each in some]),
                "num_items_in_batch": total,
            }
        )

    def step() -> None:
        for each in batches:
            trainer._compute_loss(policy, each).backward()  # noqa: SLF001 - a step without its loop
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS: dict[str, Callable[[Path, Path], Step]] = {
    "plain loop": plain,
    "learner": echo2d,
    "learner, rows of 1,024": lambda model, folder: echo2d(model, folder, micro_batch_tokens=1024),
    "learner, unshared": lambda model, folder: echo2d(model, folder, shared=False),
    "TRL, 8 answers at a time": lambda model, folder: trl(model, folder, rows=8),
    "TRL, 1 answer at a time": lambda model, folder: trl(model, folder, rows=1),
}


def serve(name: str, model: Path) -> None:
    """Take a step for every line that comes, and say what it cost."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        step = PROGRAMS[name](model, Path(folder))
        for _ in sys.stdin:
            began = time.process_time()
            step()
            cost = time.process_time() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            print(json.dumps([cost, peak]), flush=True)


class Program:
    """A process of `serve`."""

    def __init__(self, name: str, model: Path) -> None:
        command = [sys.executable, "-m", "tools.research.train_step", "--serve", name, "--model"]
        self._process = subprocess.Popen(
            [*command, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> tuple[float, float]:
        """CPU seconds of one more step, and the peak memory in MiB since the start."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("["):
            if not line:
                raise SystemExit(f"a program ended with exit code {self._process.wait()}")
        cost, peak = json.loads(line)
        return cost, peak

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve, chosen.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_model(model)
        programs = {name: Program(name, model) for name in PROGRAMS}
        costs: dict[str, list[float]] = {name: [] for name in PROGRAMS}
        peaks = {}
        for each in range(chosen.rounds + 1):
            for name, program in programs.items():
                cost, peaks[name] = program.step()
                # The first step makes AdamW's state.
                costs[name] += [cost] if each else []
        for program in programs.values():
            program.end()
    total = sum(len(each.logprobs_n) for each in answers())
    print(f"{total} answer tokens a step; medians of {chosen.rounds} rounds (smallest to largest)")
    for name, found in costs.items():
        ratios = [one / other for one, other in zip(found, costs["plain loop"], strict=True)]
        print(
            f"{name:26} {median(found):6.2f} CPU s ({min(found):.2f} to {max(found):.2f}); of the plain loop "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); peak {peaks[name]:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
