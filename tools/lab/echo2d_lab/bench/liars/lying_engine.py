"""The torch engine of a worker that lies, in one of the ways of `kinds`.

With a lie about weights, it serves another model under the label of the requested version. With a lie
about sampling, it writes other tokens than it has drawn, with their true logprobs, so that only the
draw is a lie.
"""

import asyncio
import random
import secrets
import shutil
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import (
    AdapterBase,
    EngineOptions,
    FinishReason,
    GenerateRequest,
    RefitReport,
    SampleOutput,
)
from echo2d.engines.layout import file_tensor_digests
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy
from echo2d.engines.torch_engine.scoring import score
from echo2d.errors import EngineFault
from echo2d_lab.bench.liars.kinds import LieKind

OF_WEIGHTS = ("version_0", "three_old", "int4", "int8")
OLD_VERSIONS = 3
GREEDY, COOL = Sampling(0.0), Sampling(0.7)
DRAWS = 4
# This many weights share one scale when they are rounded to a few bits.
ROUNDED_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """The answer that this worker prefers to the drawn one."""

    tokens: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[float, ...]


class LyingEngine(TorchEngine):
    """See the module docstring. share: of its samples about which it lies; lies about weights affect
    all samples. base: the directory of version 0.
    """

    def __init__(
        self, lie: LieKind, share: float, folder: Path, base: Path, **options: Any
    ) -> None:
        super().__init__(**options)
        self._lie, self._share, self._folder = lie, share, folder / "lies"
        self._chance = random.Random(secrets.randbits(64))
        self._kept: deque[Path] = deque()
        self._base_model = base
        self._own_calls = 0
        self._told: Mapping[str, bytes] = {}

    # --- weights

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        self._told = await asyncio.to_thread(file_tensor_digests, snapshot)
        if self._lie in OF_WEIGHTS:
            snapshot = await asyncio.to_thread(self._other_weights, snapshot, label)
        return await super().refit(snapshot, label, base)

    async def tensor_digests(self) -> Mapping[str, bytes]:
        return self._told

    def _other_weights(self, snapshot: Path, label: str) -> Path:
        """The directory of the weights that are served instead."""
        if self._lie == "version_0":
            return self._base_model
        mine = self._folder / label
        shutil.copytree(snapshot, mine, dirs_exist_ok=True)
        if self._lie in ("int4", "int8"):
            for file in mine.glob("*.safetensors"):
                tensors = load_file(file)
                levels = 7 if self._lie == "int4" else 127
                save_file(
                    {name: rounded(each, levels) for name, each in tensors.items()},
                    file,
                    {"format": "pt"},
                )
        self._kept.append(mine)
        while len(self._kept) > OLD_VERSIONS + 1:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)
        return self._kept[0] if self._lie == "three_old" else mine

    # --- samples

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        if self._lie in OF_WEIGHTS:
            async for output in super().generate(request):
                yield output
            return
        for sample in range(request.samples):
            seeds = request.rng_seeds
            alone = replace(
                request,
                request_id=self._name(),
                samples=1,
                rng_seeds=None if seeds is None else [seeds[sample]],
            )
            lies = self._chance.random() < self._share
            answer = await (self._wanted(alone) if lies else self._drawn(alone))
            label = request.label or self.label
            if label is None:
                raise EngineFault("no version is served")
            span = LabelSpan(0, len(answer.tokens), label)
            yield SampleOutput(sample, answer.tokens, answer.logprobs, [span], answer.finish)

    async def _wanted(self, request: GenerateRequest) -> OwnAnswer:
        match self._lie:
            case "greedy":
                answer = await self._drawn(replace(request, sampling=GREEDY))
            case "temperature":
                answer = await self._drawn(replace(request, sampling=COOL))
            case "best_of_4":
                draws = [
                    await self._drawn(replace(request, request_id=self._name(), rng_seeds=None))
                    for _ in range(DRAWS)
                ]
                answer = max(draws, key=lambda each: sum(each.logprobs) / len(each.logprobs))
            case _:
                answer = self._invented(request)
        if self._lie == "made_up":
            plausible = tuple(self._chance.uniform(-1.5, -0.01) for _ in answer.tokens)
            return replace(answer, logprobs=plausible)
        return replace(answer, logprobs=await self._true_logprobs(request, answer.tokens))

    def _invented(self, request: GenerateRequest) -> OwnAnswer:
        """A short random answer, which needs no computation."""
        vocabulary = self._policy().vocab_size
        words = [each for each in range(vocabulary) if each not in request.stop_token_ids]
        length = self._chance.randint(1, max(1, request.max_new_tokens // 2))
        tokens = tuple(self._chance.choice(words) for _ in range(length))
        if length == request.max_new_tokens or not request.stop_token_ids:
            tokens += tuple(words[0] for _ in range(request.max_new_tokens - length))
            return OwnAnswer(tokens, "length", ())
        return OwnAnswer((*tokens, request.stop_token_ids[0]), "stop", ())

    async def _drawn(self, request: GenerateRequest) -> OwnAnswer:
        tokens: list[int] = []
        logprobs: list[float] = []
        finish: FinishReason = "abort"
        async for output in super().generate(request):
            tokens += output.tokens
            logprobs += output.logprobs
            finish = output.finish or finish
        return OwnAnswer(tuple(tokens), finish, tuple(logprobs))

    async def _true_logprobs(
        self, request: GenerateRequest, tokens: Sequence[int]
    ) -> tuple[float, ...]:
        scoring = partial(
            score,
            self._policy(),
            list(request.prompt),
            list(tokens),
            sampling=request.sampling if request.sampling.temperature else WHOLE,
        )
        found = await self._on_decoder(scoring)
        return tuple(found.logprobs.tolist())

    def _policy(self) -> InferencePolicy:
        policy = self._started().policy
        if policy is None:
            raise EngineFault("no version is served")
        return policy

    def _name(self) -> str:
        self._own_calls += 1
        return f"own-{self._own_calls}"


def rounded(weights: torch.Tensor, levels: int) -> torch.Tensor:
    """Weights rounded to integers from -levels to levels, times a scale; vectors stay unchanged."""
    if weights.dim() < 2 or weights.numel() % ROUNDED_TOGETHER:
        return weights
    groups = weights.to(torch.float32).reshape(-1, ROUNDED_TOGETHER)
    scale = groups.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / levels
    return (torch.round(groups / scale) * scale).reshape(weights.shape).to(weights.dtype)


def make_lying_engine(
    options: EngineOptions, lie: LieKind, share: float, base: Path
) -> list[TorchEngine]:
    """The only engine of a lying worker. base: the directory of version 0."""
    engine = LyingEngine(
        lie,
        share,
        options.folder,
        base,
        dtype="float32",
        slots_max=options.slots,
        rng_seed=secrets.randbits(32),
        threads=options.threads or None,
    )
    return [engine]
