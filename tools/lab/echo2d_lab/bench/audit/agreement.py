"""Measure how far honest engines agree: one engine writes answers, and another one replays them.

    python -m echo2d_lab.bench.audit.agreement [--model DIR] [--groups 32] [--tokens 100]
        [--replay torch|sglang] [--temperature 1] [--top-p 1]

Each writer answers the same prompts with the same seeds, alone or in a full batch, in float32 or
bfloat16. With --replay sglang it draws as SGLang does (`gumbel_writer`), also in a batch that makes
SGLang draw ranks. Each auditor scores every answer with one prefill. The table gives, for each pair:

    same      answers that equal those of the first writer, token by token
    inside    answers in which every token is where its seed points, within the narrowest tolerance
    misses    tokens that are not, per million, within each tolerance
    distance  of a token from where its seed points, in units of the narrowest tolerance: 99 %, 99.9 %, maximum
    K         mean, 99.9 % quantile and maximum over answers
    Z         mean and standard deviation over answers

Two rows at the end show dishonest writers: one drew with another seed, one always took the likeliest
token. The default of --model is the demo's tiny model.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from echo2d.core.base.ids import GroupId
from echo2d.core.base.model_config import end_token_ids
from echo2d.core.protocol.evidence import TOLERANCES, Evidence
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.seeds import sample_seeds, seed_key
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.scoring import Replay, score
from echo2d_lab.bench.audit.gumbel_writer import write_gumbel

GROUP_SIZE = 8
GROUPS_OPEN = 256  # requests that an engine gets at a time
KEY = seed_key(b"agreement" * 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HonestWriter:
    """An honest engine. slots: samples that it runs at once. ranks: it draws ranks, as SGLang does while a
    greedy request is in its batch.
    """

    dtype: str
    slots: int
    ranks: bool = False

    @property
    def name(self) -> str:
        batch = "alone" if self.slots == 1 else f"{self.slots} at once"
        return f"{self.dtype}, {batch}{', by rank' if self.ranks else ''}"


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    group: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def seed(self) -> int:
        return sample_seeds(KEY, GroupId(self.group), [self.sample])[0]


@dataclass(frozen=True, slots=True)
class AuditBench:
    """The measurement: the model's directory, the prompts, and how they are answered."""

    model: Path
    prompts: Sequence[Sequence[int]]
    tokens: int
    ends: Sequence[int]
    replay: Replay
    sampling: Sampling


WRITERS = (HonestWriter("float32", 1), HonestWriter("float32", 64), HonestWriter("bfloat16", 64))
RANKS = (HonestWriter("float32", 64, ranks=True), HonestWriter("bfloat16", 64, ranks=True))


async def write(bench: AuditBench, writer: HonestWriter) -> list[WrittenAnswer]:
    """Answer every prompt GROUP_SIZE times with the torch engine, in order."""
    engine = TorchEngine(dtype=writer.dtype, slots_max=writer.slots)
    await engine.start()
    await engine.refit(bench.model, "0-a")

    room = asyncio.Semaphore(GROUPS_OPEN)

    async def group(number: int, prompt: Sequence[int]) -> list[WrittenAnswer]:
        async with room:
            return await answers(number, prompt)

    async def answers(number: int, prompt: Sequence[int]) -> list[WrittenAnswer]:
        seeds = sample_seeds(KEY, GroupId(number), range(GROUP_SIZE))
        request = GenerateRequest(
            str(number),
            prompt,
            GROUP_SIZE,
            bench.tokens,
            bench.sampling,
            stop_token_ids=bench.ends,
            rng_seeds=seeds,
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

    found = await asyncio.gather(
        *(group(number, each) for number, each in enumerate(bench.prompts))
    )
    await engine.close()
    return [answer for answers in found for answer in answers]


def write_as_sglang(
    bench: AuditBench, writer: HonestWriter, policy: InferencePolicy
) -> list[WrittenAnswer]:
    """Answer every prompt GROUP_SIZE times as SGLang would, in order."""
    wanted = [
        WrittenAnswer(group, sample, (), ())
        for group in range(len(bench.prompts))
        for sample in range(GROUP_SIZE)
    ]
    answers = []
    for start in range(0, len(wanted), writer.slots):
        batch = wanted[start : start + writer.slots]
        written = write_gumbel(
            policy,
            [bench.prompts[each.group] for each in batch],
            [each.seed for each in batch],
            tokens=bench.tokens,
            ends=bench.ends,
            sampling=bench.sampling,
            by_rank=writer.ranks,
        )
        answers += [
            replace(each, tokens=tuple(tokens), logprobs=tuple(logprobs))
            for each, (tokens, logprobs) in zip(batch, written, strict=True)
        ]
    return answers


def greedy(bench: AuditBench, policy: InferencePolicy, answer: WrittenAnswer) -> WrittenAnswer:
    """An answer of the same length that takes the likeliest token each time."""
    written = write_greedy(policy, bench.prompts[answer.group], len(answer.tokens))
    return replace(answer, tokens=tuple(written), logprobs=(0.0,) * len(written))


def write_greedy(policy: InferencePolicy, prompt: Sequence[int], tokens: int) -> list[int]:
    written = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            logits = policy.logits(torch.tensor([written], device=policy.device), 1)
            written.append(int(logits[0, -1].argmax()))
    return written[len(prompt) :]


def audit(
    bench: AuditBench, policy: InferencePolicy, answer: WrittenAnswer, *, seed: int
) -> tuple[Evidence, NDArray[np.float64]]:
    """The evidence of the policy about an answer, and each token's distance."""
    scored = score(
        policy,
        bench.prompts[answer.group],
        answer.tokens,
        sampling=bench.sampling,
        seed=seed,
        replay=bench.replay,
    )
    assert scored.distances is not None
    found = scored.evidence(np.array(answer.logprobs))
    return found, scored.distances


def row(
    names: str, audits: Sequence[tuple[Evidence, NDArray[np.float64]]], same: float | None
) -> str:
    found = [each for each, _ in audits]
    far = np.concatenate([distances for _, distances in audits])
    ks, zs = np.array([each.k for each in found]), np.array([each.z for each in found])
    tokens = len(far)
    misses = ", ".join(f"{1e6 * (far > each).mean():.0f}" for each in TOLERANCES)
    inside = sum(each.misses is not None and not each.misses[0] for each in found) / len(found)
    return (
        f"| {names} | {len(found)} | {tokens} | {'-' if same is None else f'{same:.2%}'} "
        f"| {inside:.2%} | {misses} "
        f"| {np.quantile(far, 0.99):.3f}, {np.quantile(far, 0.999):.3f}, {far.max():.3f} "
        f"| {ks.mean():.1e}, {np.quantile(ks, 0.999):.1e}, {ks.max():.1e} "
        f"| {zs.mean():+.2f}, {zs.std():.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--replay", choices=("torch", "sglang"), default="torch")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or make_tiny_model(Path(folder))
        config = json.loads((model / "config.json").read_text())
        rng = np.random.default_rng(0)
        bench = AuditBench(
            model=model,
            prompts=rng.integers(3, int(config["vocab_size"]), size=(asked.groups, 9)).tolist(),
            tokens=asked.tokens,
            ends=end_token_ids(config),
            replay=asked.replay,
            sampling=Sampling(asked.temperature, asked.top_p, asked.top_k, asked.min_p),
        )
        policies = {
            name: build(prepare(model, None, dtype), dtype, torch.device("cpu"))
            for name, dtype in DTYPES.items()
        }
        measure(bench, policies)


def measure(bench: AuditBench, policies: dict[str, InferencePolicy]) -> None:
    print(
        "| writer | auditor | answers | tokens | same | inside | misses per million | distance "
        "| K | Z |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    if bench.replay == "torch":
        written = {writer: asyncio.run(write(bench, writer)) for writer in WRITERS}
    else:
        # If the sampling cuts off tokens, every writer draws ranks.
        writers = (*WRITERS, *(() if bench.sampling.cuts else RANKS))
        written = {
            writer: write_as_sglang(bench, writer, policies[writer.dtype]) for writer in writers
        }
    first = written[WRITERS[0]]
    alone = [answer.tokens for answer in first]
    for writer, answers in written.items():
        same = float(np.mean([a.tokens == b for a, b in zip(answers, alone, strict=True)]))
        for auditor, policy in policies.items():
            audits = [audit(bench, policy, each, seed=each.seed) for each in answers]
            print(row(f"{writer.name} | {auditor}", audits, same), flush=True)
    policy = policies["float32"]
    audits = [audit(bench, policy, each, seed=each.seed ^ 1) for each in first]
    print(row("another seed | float32", audits, None), flush=True)
    likeliest = [greedy(bench, policy, each) for each in first[::GROUP_SIZE]]
    audits = [audit(bench, policy, each, seed=each.seed) for each in likeliest]
    print(row("greedy | float32", audits, None), flush=True)


if __name__ == "__main__":
    main()
