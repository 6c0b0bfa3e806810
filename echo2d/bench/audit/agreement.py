"""Measure how far honest engines agree: what one wrote is replayed by another.

    python -m echo2d.bench.audit.agreement [--model DIR] [--groups 32] [--tokens 100]

Each writer answers the same prompts with the same seeds, alone or in a full batch, in float32 or
bfloat16. Each auditor scores every answer with one prefill. The table gives, for each pair:

    same      answers equal, token by token, to what the auditor's engine writes alone
    inside    answers of which every token lies where its seed points, within the tolerance
    misses    tokens that do not, per million
    K         mean, 99.9 % quantile and maximum over answers
    Z         mean and standard deviation over answers

Without --model it is the demo's tiny one.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from echo2d.core.audit.evidence import Evidence, evidence, outside
from echo2d.core.base.ids import GroupId
from echo2d.core.base.model_config import end_token_ids
from echo2d.core.protocol.seeds import sample_seeds, seed_key, uniforms
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.scoring import score

GROUP_SIZE = 8
KEY = seed_key(b"agreement" * 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HonestWriter:
    """An honest engine. slots: samples that it runs at once."""

    dtype: str
    slots: int

    @property
    def name(self) -> str:
        return f"{self.dtype}, {'alone' if self.slots == 1 else f'{self.slots} at once'}"


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    group: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


WRITERS = (HonestWriter("float32", 1), HonestWriter("float32", 64), HonestWriter("bfloat16", 64))


async def write(
    model: Path,
    writer: HonestWriter,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: Sequence[int],
) -> list[WrittenAnswer]:
    """WrittenAnswer every prompt GROUP_SIZE times, in the order of prompts and samples."""
    engine = TorchEngine(dtype=writer.dtype, slots_max=writer.slots)
    await engine.start()
    await engine.refit(model, "0-a")

    async def group(number: int, prompt: Sequence[int]) -> list[WrittenAnswer]:
        seeds = sample_seeds(KEY, GroupId(number), range(GROUP_SIZE))
        request = GenerateRequest(
            str(number), prompt, GROUP_SIZE, tokens, stop_token_ids=ends, rng_seeds=seeds
        )
        written: list[list[int]] = [[] for _ in seeds]
        logprobs: list[list[float]] = [[] for _ in seeds]
        async for delta in engine.generate(request):
            written[delta.sample] += delta.tokens
            logprobs[delta.sample] += delta.logprobs
        return [
            WrittenAnswer(number, sample, tuple(written[sample]), tuple(logprobs[sample]))
            for sample in range(GROUP_SIZE)
        ]

    found = await asyncio.gather(*(group(number, each) for number, each in enumerate(prompts)))
    await engine.close()
    return [answer for answers in found for answer in answers]


def replay(policy: InferencePolicy, prompt: Sequence[int], answer: WrittenAnswer) -> Evidence:
    """What the policy says about an answer at temperature 1."""
    scored = score(policy, prompt, answer.tokens, temperature=1.0, top_p=1.0)
    (seed,) = sample_seeds(KEY, GroupId(answer.group), [answer.sample])
    numbers = uniforms(seed, np.arange(len(answer.tokens)))
    return evidence(
        scored.logprobs,
        np.array(answer.logprobs),
        surprises=scored.surprises,
        entropies=scored.entropies,
        variances=scored.variances,
        outside=outside(numbers, scored.lows, scored.highs),
    )


def row(
    writer: HonestWriter, auditor: str, found: Sequence[Evidence], same: float, whole: int
) -> str:
    ks, zs = np.array([each.k for each in found]), np.array([each.z for each in found])
    tokens, misses = sum(each.tokens for each in found), sum(each.misses or 0 for each in found)
    inside = sum(not each.misses for each in found) / whole
    return (
        f"| {writer.name} | {auditor} | {whole} | {tokens} | {same:.2%} | {inside:.2%} "
        f"| {1e6 * misses / tokens:.0f} | {ks.mean():.1e}, {np.quantile(ks, 0.999):.1e}, "
        f"{ks.max():.1e} | {zs.mean():+.2f}, {zs.std():.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or make_tiny_model(Path(folder))
        config = json.loads((model / "config.json").read_text())
        ends = end_token_ids(config)
        rng = np.random.default_rng(0)
        prompts = rng.integers(3, int(config["vocab_size"]), size=(asked.groups, 9)).tolist()
        policies = {
            name: build(prepare(model, None, dtype), dtype, torch.device("cpu"))
            for name, dtype in DTYPES.items()
        }
        print(
            "| writer | auditor | answers | tokens | same | inside | misses per million | K | Z |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        written = {
            writer: asyncio.run(write(model, writer, prompts, asked.tokens, ends))
            for writer in WRITERS
        }
        alone = [answer.tokens for answer in written[WRITERS[0]]]
        for writer, answers in written.items():
            same = float(np.mean([a.tokens == b for a, b in zip(answers, alone, strict=True)]))
            for auditor, policy in policies.items():
                found = [replay(policy, prompts[each.group], each) for each in answers]
                print(row(writer, auditor, found, same, len(answers)), flush=True)


if __name__ == "__main__":
    main()
