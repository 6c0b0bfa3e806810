"""Measure the speed and the errors of rollouts in int8 on a real model.

    python -m echo2d_lab.research.quantized_rollouts MODEL [--rounds 3] [--answers 8] [--scored 0] [--slots 48]

The torch engine answers the 80 held-out sums of `make math`, --answers times each, in float32, in bfloat16
and in int8 (bfloat16 between the layers), one after the other in each round. The seeds are the same for
all, so that the differences between their rewards are less random. Then a float32 copy of the model, as
the auditor and a learner on a CPU have it, scores each answer again:

    tokens/s   per CPU second, with prompts; other work on the machine hardly changes it; median of the rounds,
               smallest to largest
    accuracy   share of right answers at temperature 1, with the standard error over questions
    K          mean |log p - q| of a token: p of float32, q as the engine reported it
    ratio      share of tokens with p / q above learner.tis_cap, and outside the clip
    missed     share of tokens that are further than 0.02, 0.05 and 0.1 from where their seed points

MODEL: a directory; `make math` leaves SmolLM2-135M in ~/.cache/echo2d. The program needs reasoning-gym.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.protocol.seeds import SEED_BITS
from echo2d.engines.base import FinishReason, GenerateRequest
from echo2d.engines.torch_engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.scoring import UNIFORM_TOLERANCE, Scorable, score_all
from echo2d.learner.config import Recipe
from echo2d.tasks.base import Reward, TextPrompt
from echo2d.tasks.rows.task import RowsTask
from echo2d.tasks.served_task import ModelFiles, TaskTexts
from examples.math.run import NEW_TOKENS, PROMPT
from examples.math.sums import write_sums

ENGINES = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
}
TOLERANCES = (1.0, 2.5, 5.0)  # in units of UNIFORM_TOLERANCE
SCORED_TOGETHER = 16


@dataclass(slots=True)
class Answered:
    """One sample."""

    question: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


class Sums:
    """The held-out questions, as the model reads them, and their scorer."""

    def __init__(self, model: Path, folder: Path) -> None:
        _, held_out = write_sums(folder)
        self._task = RowsTask(
            str(held_out),
            prompt=PROMPT,
            scorer="regex",
            scorer_options={"pattern": r"\d+"},
            epochs=1,
            shuffle=False,
        )
        facts: dict[str, Any] = {"template": None, "system": "", "options": {}}
        self._texts = TaskTexts(ModelFiles.read({"directory": str(model), **facts}))
        self._questions: list[TextPrompt] = [self._task.prompt(at) for at in range(len(self._task))]
        self.prompts = [self._texts.tokens(each) for each in self._questions]
        self.stop = json.loads((model / "generation_config.json").read_text())["eos_token_id"]

    def reward(self, answer: Answered) -> float:
        assert answer.finish in ("stop", "length")
        text = self._texts.answer(answer.tokens, answer.finish)
        found = self._task.reward(self._questions[answer.question], text)
        assert isinstance(found, Reward | float | int)
        return float(found.value if isinstance(found, Reward) else found)


async def answered(
    engine: TorchEngine, sums: Sums, seeds: Sequence[Sequence[int]]
) -> tuple[list[Answered], float]:
    """All answers of one round, and its CPU seconds."""

    async def ask(question: int) -> list[Answered]:
        found = [Answered(question, seed) for seed in seeds[question]]
        request = GenerateRequest(
            str(question),
            sums.prompts[question],
            len(found),
            NEW_TOKENS,
            stop_token_ids=(sums.stop,),
            rng_seeds=seeds[question],
        )
        async for output in engine.generate(request):
            sample = found[output.sample]
            sample.tokens += output.tokens
            sample.logprobs += output.logprobs
            sample.finish = output.finish or sample.finish
        return found

    began = time.process_time()
    groups = await asyncio.gather(*map(ask, range(len(sums.prompts))))
    return [each for group in groups for each in group], time.process_time() - began


def scored(
    policy: InferencePolicy, sums: Sums, answers: Sequence[Answered]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """log p - q of each token, and the distance of each from where its seed points, in tolerances."""
    gaps, distances = [], []
    for start in range(0, len(answers), SCORED_TOGETHER):
        part = answers[start : start + SCORED_TOGETHER]
        asked = [Scorable(sums.prompts[each.question], each.tokens, each.seed) for each in part]
        for each, found in zip(part, score_all(policy, asked, sampling=WHOLE), strict=True):
            assert found.distances is not None
            gaps.append(found.logprobs - np.array(each.logprobs))
            distances.append(found.distances)
    return np.concatenate(gaps), np.concatenate(distances)


def mean_of_questions(answers: Sequence[Answered], values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error over questions."""
    by_question: dict[int, list[float]] = {}
    for answer, value in zip(answers, values, strict=True):
        by_question.setdefault(answer.question, []).append(value)
    means = list(map(fmean, by_question.values()))
    return fmean(means), stdev(means) / len(means) ** 0.5


def report(
    name: str,
    answers: Sequence[Answered],
    gaps: NDArray[np.float64],
    distances: NDArray[np.float64],
) -> None:
    recipe, ratios = Recipe(), np.exp(gaps)
    outside = (ratios < 1 - recipe.clip_low) | (ratios > 1 + recipe.clip_high)
    missed = ", ".join(f"{np.mean(distances > each):.3%}" for each in TOLERANCES)
    widths = ", ".join(f"{UNIFORM_TOLERANCE * each:g}" for each in TOLERANCES)
    print(
        f"{name}: {len(gaps)} tokens of {len(answers)} answers, K {np.abs(gaps).mean():.4f}, mean ratio "
        f"{ratios.mean():.4f}; above {recipe.tis_cap:g}: {np.mean(ratios > recipe.tis_cap):.3%}, outside "
        f"{1 - recipe.clip_low:g} to {1 + recipe.clip_high:g}: {outside.mean():.3%}; missed ({widths}): {missed}"
    )


async def measure(chosen: argparse.Namespace, folder: Path) -> None:
    sums, chance = Sums(chosen.model, folder), random.Random(chosen.seed)
    answers: dict[str, list[Answered]] = {name: [] for name in ENGINES}
    speeds: dict[str, list[float]] = {name: [] for name in ENGINES}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, (dtype, quantization) in ENGINES.items():
            engine = engines[name] = TorchEngine(
                dtype=dtype,
                slots_max=chosen.slots,
                threads=chosen.threads,
                quantization=quantization,  # type: ignore[arg-type]
            )
            await engine.start()
            stack.push_async_callback(engine.close)
            await engine.refit(chosen.model, "base")
        for number in range(chosen.rounds):
            seeds = [
                [chance.getrandbits(SEED_BITS) for _ in range(chosen.answers)] for _ in sums.prompts
            ]
            for name, engine in engines.items():
                found, seconds = await answered(engine, sums, seeds)
                answers[name] += found
                speeds[name].append(sum(len(each.tokens) for each in found) / seconds)
                print(
                    f"round {number + 1}, {name}: {speeds[name][-1]:.0f} tokens per CPU s",
                    flush=True,
                )
    rewards = {name: list(map(sums.reward, found)) for name, found in answers.items()}
    for name, found in answers.items():
        mean, error = mean_of_questions(found, rewards[name])
        pairs = [one - two for one, two in zip(rewards[name], rewards["float32"], strict=True)]
        less, its_error = mean_of_questions(found, pairs)
        low, middle, high = min(speeds[name]), median(speeds[name]), max(speeds[name])
        factors = [one / two for one, two in zip(speeds[name], speeds["float32"], strict=True)]
        print(
            f"{name}: {middle:.0f} tokens per CPU s ({low:.0f} to {high:.0f}), {median(factors):.2f} of float32 "
            f"({min(factors):.2f} to {max(factors):.2f}); accuracy {mean:.4f} ({error:.4f}), less float32's "
            f"{less:+.4f} ({its_error:.4f})"
        )
    torch.set_num_threads(chosen.threads)
    policy = build(prepare(chosen.model, None, torch.float32), torch.float32, torch.device("cpu"))
    for name, found in answers.items():
        if name != "float32":
            part = found[: chosen.scored or None]
            report(name, part, *scored(policy, sums, part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=8, help="to each question in each round")
    parser.add_argument("--scored", type=int, default=0, help="answers of each engine; 0: all")
    parser.add_argument("--slots", type=int, default=48, help="of each engine")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(chosen, Path(folder)))


if __name__ == "__main__":
    main()
