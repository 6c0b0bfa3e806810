"""Refits one real SGLang server while samples run, in one mode after the other.

    round 1: none, retract, abort, in_place    round 2: ...    each: the same prompts and lengths

In `none` there is no refit, so the wall time of another mode minus that of `none` is the total cost of
its refits: pause_s and recompute_s are compared with this figure.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2d.engines.base import GenerateRequest, RefitReport
from echo2d.engines.server import sampling_loop
from echo2d.engines.server.launch import Running
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.errors import EngineFault
from echo2d_lab.bench.refit.replay import load_model, replay

Mode = Literal["none", "retract", "abort", "in_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitWork:
    """samples: number that run at once, with prompts that share nothing. refits: number in each mode, at
    equal distances in tokens; fewer if the samples end before. change: relative change of the weights
    from version to version. held_s: see `sampling_loop.HELD_S_MAX`.
    """

    samples: int = 16
    prompt_tokens: int = 512
    answer_tokens: int = 400
    refits: int = 6
    change: float = 0.005
    held_s: float = sampling_loop.HELD_S_MAX


@dataclass(slots=True)
class ModeFound:
    """One mode in one round.

    Lists have an entry for each refit. resumes_s: until every request has written a token again.
    risk: the largest number of tokens that the server had written and the engine had not yet passed on:
    they are lost if the worker dies. lost: tokens that the server wrote and the engine never passed on.
    cuts, wrong, checked, error: see ReplayedSample; over all samples. unlike, moved: means, in nats.
    """

    mode: Mode
    wall_s: float = 0.0
    pause_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    recompute_s: list[float | None] = field(default_factory=list)
    resumes_s: list[float] = field(default_factory=list)
    risk: int = 0
    lost: int = 0
    cuts: int = 0
    wrong: int = 0
    checked: int = 0
    error: float = 0.0
    unlike: float = 0.0
    moved: float = 0.0

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        head_dim=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16_384,
        tie_word_embeddings=True, initializer_range=0.08, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def make_versions(folder: Path, work: RefitWork, config: Qwen3Config) -> list[Path]:
    """Make the versions: version 0 is random, each later one a little different from the one before."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    disable_progress_bar()
    made = []
    for version in range(work.refits + 1):
        made.append(folder / f"version-{version}")
        model.save_pretrained(made[-1])
        with torch.no_grad():
            for tensor in model.parameters():
                tensor *= 1.0 + work.change * torch.randn_like(tensor)
    return made


class _Watch:
    """Counts the tokens that the server writes for each request."""

    def __init__(self) -> None:
        self.written: dict[str, int] = {}
        self.given = 0
        self.ended = 0
        self.risk = 0
        self._since: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def total(self) -> int:
        return sum(self.written.values())

    def chunk(self, rid: str, tokens: int) -> None:
        if tokens > self.written.get(rid, 0):
            self._since.add(rid)
        self.written[rid] = max(tokens, self.written.get(rid, 0))
        self.look()

    def look(self) -> None:
        self.risk = max(self.risk, self.total - self.given)
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    async def all_wrote(self, samples: int) -> None:
        """Wait until each of these samples that still runs has written a token after this call."""
        self._since.clear()
        await self.until(lambda: len(self._since) >= samples - self.ended)

    @contextmanager
    def watching(self) -> Iterator[None]:
        generate = SglangClient.generate

        async def watched(
            client: SglangClient, body: Mapping[str, Any]
        ) -> AsyncIterator[Mapping[str, Any]]:
            async for chunk in generate(client, body):
                self.chunk(body["rid"], int(chunk["meta_info"]["completion_tokens"]))
                yield chunk

        with patch.object(SglangClient, "generate", watched):
            yield


@dataclass(slots=True)
class _Answer:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


async def measure(
    server: Running, versions: Sequence[Path], work: RefitWork, mode: Mode
) -> ModeFound:
    """Run the samples to their end, and refit the server meanwhile. EngineFault: a sample was lost."""
    found, watch = ModeFound(mode), _Watch()
    engine = SglangEngine(
        server, slots=work.samples, refit_mode="retract" if mode == "none" else mode, rng_seed=0
    )
    config = await asyncio.to_thread((versions[0] / "config.json").read_text)
    vocabulary, numbers = json.loads(config)["vocab_size"], np.random.default_rng(0)
    answers = [
        _Answer(numbers.integers(0, vocabulary, work.prompt_tokens).tolist())
        for _ in range(work.samples)
    ]
    clock = asyncio.get_running_loop()
    await engine.start()
    with watch.watching(), patch.object(sampling_loop, "HELD_S_MAX", work.held_s):
        await engine.refit(versions[0], _label(0))
        async with asyncio.TaskGroup() as tasks:
            for number, answer in enumerate(answers):
                tasks.create_task(_read(engine, number, answer, work, watch))
            await watch.until(lambda: len(watch.written) == work.samples)
            began, first = clock.time(), watch.total
            rest = work.samples * work.answer_tokens - first
            for version in range(1, 1 if mode == "none" else work.refits + 1):
                goal = first + rest * version // (work.refits + 2)
                await watch.until(lambda goal=goal: watch.total >= goal)  # type: ignore[misc]
                if watch.ended == work.samples:
                    break
                report = await engine.refit(versions[version], _label(version))
                resumed = clock.time()
                await watch.all_wrote(work.samples)
                _note(found, report, clock.time() - resumed)
        found.wall_s = clock.time() - began
    await engine.close()
    found.risk, found.lost = watch.risk, watch.total - watch.given
    await asyncio.to_thread(_check, found, versions, answers)
    return found


def _note(found: ModeFound, report: RefitReport, resumes_s: float) -> None:
    found.pause_s.append(report.pause_s)
    found.tokens.append(report.recomputed_tokens)
    found.recompute_s.append(report.recompute_s)
    found.resumes_s.append(resumes_s)


async def _read(
    engine: SglangEngine, number: int, answer: _Answer, work: RefitWork, watch: _Watch
) -> None:
    request = GenerateRequest(f"{number:03}", answer.prompt, 1, work.answer_tokens)
    async for delta in engine.generate(request):
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        for span in delta.spans:
            answer.labels += [span.label] * (span.end - span.start)
        watch.given += len(delta.tokens)
        watch.ended += delta.finish is not None
        if delta.finish == "abort":
            raise EngineFault(f"sample {number} ended after {len(answer.tokens)} tokens")
        watch.look()


def _check(found: ModeFound, versions: Sequence[Path], answers: Sequence[_Answer]) -> None:
    """Compute every logprob again, with the version that its span names."""
    disable_progress_bar()
    torch.set_num_threads(1)
    models = {_label(version): folder for version, folder in enumerate(versions)}
    model_of = cache(lambda label: load_model(models[label]))
    unlike: list[float] = []
    moved: list[float] = []
    for answer in answers:
        sample = replay(
            model_of, answer.prompt, answer.tokens, answer.logprobs, answer.labels,
            keeps_kv=found.mode == "in_place",
        )  # fmt: skip
        found.cuts += sample.cuts
        found.wrong += sample.wrong
        found.checked += len(answer.tokens)
        found.error = max(found.error, sample.error)
        unlike += sample.unlike
        moved += sample.moved
    found.unlike, found.moved = (mean(each) if each else 0.0 for each in (unlike, moved))


def _label(version: int) -> str:
    return f"{version}-{version:012x}"
