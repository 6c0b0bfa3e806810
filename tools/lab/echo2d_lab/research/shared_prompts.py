"""Measure how much faster the learner is when the answers of a group share one copy of their prompt.

    python -m echo2d_lab.research.shared_prompts MODEL [--rounds 3] [--groups 8] [--answers 12]

One CPU thread runs the forward and the backward pass over the answers of one step, by turns with a
copy of the prompt for each answer, and with one copy for all answers of a row.
MODEL: a directory; `make math` leaves SmolLM2-135M in ~/.cache/echo2d.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from echo2d.learner.batch.packing import PackedAnswer, micro_batches
from echo2d.learner.model.scorer import AnswerScorer

MICRO_BATCH_TOKENS = 2048


def answers(groups: int, size: int, prompt: int, length: int, vocab: int) -> list[PackedAnswer]:
    """Answers of random tokens, on which the cost of a pass does not depend."""
    rng = np.random.default_rng(0)
    made = []
    for group in range(groups):
        question = rng.integers(0, vocab, prompt)
        for sample in range(size):
            tokens = np.concatenate([question, rng.integers(0, vocab, length)]).astype(np.int32)
            counts = np.arange(prompt + length) >= prompt
            logprobs, staleness = np.zeros(length, np.float32), np.zeros(length, np.int64)
            facts = (tokens, counts, logprobs, staleness, np.float32(1.0))
            made.append(PackedAnswer(group, sample, *facts, prompt=prompt))
    return made


def seconds(
    scorer: AnswerScorer, step: Sequence[PackedAnswer], *, shared: bool
) -> tuple[float, int]:
    """Seconds of one pass over the step, and the positions that it reads."""
    if not shared:
        step = [dataclasses.replace(answer, prompt=1) for answer in step]
    batches = micro_batches(step, MICRO_BATCH_TOKENS, packed=True)
    began = time.monotonic()
    for batch in batches:
        torch.autograd.backward(scorer(batch).logprobs_n.sum())
    scorer.model.zero_grad()
    return time.monotonic() - began, sum(batch.tokens_bt.size for batch in batches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=46)
    parser.add_argument("--answer-tokens", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).train()
    scorer = AnswerScorer(model)
    assert scorer.packed, "this model cannot"
    lengths = (chosen.prompt_tokens, chosen.answer_tokens)
    step = answers(chosen.groups, chosen.answers, *lengths, model.config.vocab_size)
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(chosen.rounds):
        for shared, found in took.items():
            wall_s, positions = seconds(scorer, step, shared=shared)
            found.append(wall_s)
            name = "one prompt for several answers" if shared else "a prompt for each answer"
            print(f"{name}: {wall_s:.1f} s, {positions} positions", flush=True)
    ratios = [alone / both for alone, both in zip(took[False], took[True], strict=True)]
    print(
        f"medians {median(took[False]):.1f} s and {median(took[True]):.1f} s; "
        f"ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
