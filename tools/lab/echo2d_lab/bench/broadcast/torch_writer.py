"""Writes answers with a torch model in this process, decoded as the engine does; the worker of `in_process` uses it.

The learner offers a version as float32 tensors. It is served in the bfloat16 that a publish makes of them, and computed
in float32. The same seed and versions give the same answers.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from echo2d.core.base.ids import Digest
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.protocol.sampling import WHOLE
from echo2d.engines.torch_engine.batch import DecodeBatch
from echo2d.engines.torch_engine.policy import build, prepare
from echo2d.engines.torch_engine.sampling import draw
from echo2d_lab.bench.lab.in_process import Written


class TorchWriter:
    """directory: the base model, whose layout every version has."""

    def __init__(
        self, directory: Path, stop: frozenset[int], max_new_tokens: int, rng_seed: int
    ) -> None:
        self._policy = build(
            prepare(directory, None, torch.float32), torch.float32, torch.device("cpu")
        )
        self._stop, self._max = stop, max_new_tokens
        self._random = random.Random(rng_seed)
        self._offered: dict[Digest, dict[str, Tensor]] = {}

    def offer(self, weights: Mapping[str, Tensor]) -> Digest:
        """Keep the weights that `refit` will load under the returned digest. Published versions must differ."""
        tensors = {
            name: weights[name].detach().to(torch.bfloat16) for name in self._policy.layout.tensors
        }
        hasher = blake3()
        for name in sorted(tensors):
            hasher.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
        digest = Digest(hasher.digest())
        self._offered[digest] = tensors
        return digest

    def refit(self, version: VersionKey) -> None:
        self._policy.copy(self._offered.pop(version.digest), self._policy.layout)

    def write(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[Written]]:
        written = [Written([], []) for count in samples for _ in range(count)]
        with torch.inference_mode():
            self._decode(prompts, samples, written)
        rest = iter(written)
        return [[next(rest) for _ in range(count)] for count in samples]

    def _decode(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int], written: Sequence[Written]
    ) -> None:
        batch, running = DecodeBatch(self._policy), list(written)
        batch.add(prompts, samples)
        while running:
            tokens, logprobs = draw(
                batch.logits, [WHOLE] * len(running), [self._random.random() for _ in running]
            )
            for each, token, logprob in zip(running, tokens, logprobs, strict=True):
                each.tokens.append(token)
                each.logprobs.append(logprob)
            staying = [row for row, each in enumerate(running) if not self._is_over(each)]
            batch.keep(staying)
            running = [running[row] for row in staying]
            if running:
                batch.step([each.tokens[-1] for each in running])

    def _is_over(self, written: Written) -> bool:
        return written.tokens[-1] in self._stop or len(written.tokens) == self._max
