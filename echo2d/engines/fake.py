"""An engine without a model, for tests and simulations. Every token is a hash of its context.

So a test can compute any token again: `fake_token` is the policy, and `fake_logprob` gives the
logprob of any token. The engine needs no torch. The asyncio task that consumes a request makes its tokens, at
the engine's pace. A thread is used only to read the files of a snapshot. Like a real engine it checks the
snapshot's layout. It can be told to fail.
"""

import asyncio
import secrets
from array import array
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blake3 import blake3

from echo2d.engines.base import (
    AdapterBase,
    EngineLoad,
    EngineOptions,
    FinishReason,
    GenerateRequest,
    RefitReport,
    SampleOutput,
)
from echo2d.engines.layout import SnapshotLayout, file_tensor_digests, read_layout
from echo2d.engines.stream import SAMPLES_OPEN_MAX, SampleBuffer, check_request, require_held
from echo2d.errors import EngineFault

RefitOutcome = Literal["done", "fails", "doubtful"]

FAKE_VOCAB_SIZE = 512
FAKE_EOS = 1


def fake_token(
    label: str,
    context: Sequence[int],
    *,
    sample: int,
    rng_seed: int,
    vocab_size: int = FAKE_VOCAB_SIZE,
) -> tuple[int, float]:
    """Return the token that a sample writes under `label`, and its logprob.

    context: the prompt and the sample's output so far.
    """
    token = _hash(f"token {rng_seed} {sample} {label}", context) % vocab_size
    return token, fake_logprob(label, context, token)


def fake_logprob(label: str, context: Sequence[int], token: int) -> float:
    """Return the logprob of `token` after `context` under `label`.

    It does not depend on seed and sample, so a learner can score tokens again.
    """
    # A logprob is one of 2^16 values in (-8, 0], in steps of 2^-13; float32 holds each of them exactly.
    return -(_hash(f"logprob {token} {label}", context) % (1 << 16)) / (1 << 13)


def _hash(what: str, tokens: Sequence[int]) -> int:
    return int.from_bytes(
        blake3(what.encode() + b"\0" + array("q", tokens).tobytes()).digest(8), "little"
    )


def make_fake_engines(options: EngineOptions) -> "list[FakeEngine]":
    return [
        FakeEngine(
            FakePolicy(secrets.randbits(32)),
            tokens_per_s=options.tokens_per_s_each,
            slots=options.slots,
        )
        for _ in range(options.count)
    ]


@dataclass(frozen=True, slots=True)
class FakePolicy:
    """What a fake engine writes: tokens from `fake_token`, and `eos_token_id` at a drawn length.

    If the request does not name `eos_token_id` as a stop token, the sample goes on after it. The sample ends
    earlier if the hash gives a stop token, or if the request allows fewer tokens.
    """

    rng_seed: int = 0
    vocab_size: int = FAKE_VOCAB_SIZE
    eos_token_id: int = FAKE_EOS
    # The shortest and the longest drawn length, the end token included.
    answer_tokens: tuple[int, int] = (8, 64)

    def draw(self, request: GenerateRequest, index: int) -> tuple[int, int]:
        """Return the seed under which a sample draws, and the sample number it draws as."""
        if request.sampling.temperature == 0:
            return 0, 0
        return (
            (self.rng_seed, index) if request.rng_seeds is None else (request.rng_seeds[index], 0)
        )

    def answer_length(self, prompt: Sequence[int], sample: int, rng_seed: int) -> int:
        least, most = self.answer_tokens
        return least + _hash(f"length {rng_seed} {sample}", prompt) % (most - least + 1)


class FakeEngine:
    """An engine without a model that keeps the pace of a real one.

    tokens_per_s: pace of the whole engine; None: as fast as its consumers.
    bundle_tokens: a delta holds up to this many tokens.
    refit_s: seconds that a refit pauses generation. prefill_tokens_per_s: the pause is longer by the time in
    which the KV caches of all unfinished samples would be computed again at this rate; None: by no time.
    refit_outcomes: the outcomes of the next refits, in order; every later refit is "done".

    A greedy request draws as sample 0 under seed 0. No sample waits for a slot: `slots` only changes what
    `load` reports.
    """

    def __init__(
        self,
        policy: FakePolicy | None = None,
        *,
        tokens_per_s: float | None = None,
        bundle_tokens: int = 4,
        slots: int = 64,
        refit_s: float = 0.0,
        prefill_tokens_per_s: float | None = None,
        refit_outcomes: Iterable[RefitOutcome] = (),
    ) -> None:
        self._policy = policy or FakePolicy()
        self._tokens_per_s = tokens_per_s
        self._bundle_tokens = bundle_tokens
        self._slots = slots
        self._refit_s = refit_s
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._outcomes = deque(refit_outcomes)
        self._running = False
        self._label: str | None = None
        # What the files of each held version have.
        self._files: dict[str, _Files] = {}
        self._requests: dict[str, _Request] = {}
        self._weights = asyncio.Lock()  # a refit pauses generation by holding it
        self._held_at: float | None = None
        self._held_s = 0.0  # seconds of all holds that have ended
        # The moment, by `_time`, until which the tokens made so far keep the engine busy.
        self._free_at = 0.0

    @property
    def label(self) -> str | None:
        return self._label

    @property
    def held(self) -> Collection[str]:
        return self._files.keys()

    async def start(self) -> None:
        self._running = True

    async def close(self) -> None:
        self._running = False
        self._serve_nothing()

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        self._require_running()
        served = None if self._label is None else self._files[self._label]
        beside = served is not None and served.beside(base)
        if beside and label in self._files:
            found = self._files[label]
        else:
            found = await asyncio.to_thread(_read, snapshot, base)
        if served is not None and found.layout.config == served.layout.config:
            found.layout.require_tensors_of(served.layout)
        outcome = self._outcomes.popleft() if self._outcomes else "done"
        if outcome == "fails":
            raise EngineFault("this refit was told to fail")
        async with self._weights:
            await asyncio.sleep(self._refit_s)
            if outcome == "doubtful":
                self._serve_nothing()
                raise EngineFault("this refit was told to end in doubt, nothing is served")
            kept = base.kept if base is not None and beside else frozenset()
            moved = [each for each in self._requests.values() if each.label is None]
            tokens = sum(request.context_tokens for request in moved)
            rate = self._prefill_tokens_per_s
            recompute_s = 0.0 if rate is None else tokens / rate
            await asyncio.sleep(recompute_s)
            self._require_running()
            held = {each: files for each, files in self._files.items() if each in kept}
            self._label, self._files = label, {**held, label: found}
            for request in self._requests.values():
                if not beside and request.label not in (None, label):
                    request.abort()
        return RefitReport(label, self._refit_s, tokens, recompute_s)

    async def hold(self) -> None:
        if self._held_at is None:
            self._held_at = asyncio.get_running_loop().time()
        for request in self._requests.values():
            request.moves.clear()

    async def release(self) -> None:
        if self._held_at is not None:
            self._held_s += asyncio.get_running_loop().time() - self._held_at
            self._held_at = None
        for request in self._requests.values():
            request.moves.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        running = self._admit(request)
        try:
            while running.samples:
                await self._pace(running)
                # An aborted request must end also during a hold.
                if not running.aborted.is_set():
                    await running.moves.wait()
                async with self._weights:
                    deltas = running.step(self._label)
                for delta in deltas:
                    yield delta
        finally:
            del self._requests[request.request_id]

    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].abort()

    async def load(self) -> EngineLoad:
        samples = self._samples_open()
        return EngineLoad(min(samples, self._slots), max(0, samples - self._slots), self._slots)

    async def tensor_digests(self) -> Mapping[str, bytes]:
        """Return the digests of the files as they were when the served version was loaded."""
        if self._label is None:
            raise EngineFault("no version is served")
        return self._files[self._label].digests

    def _require_running(self) -> None:
        if not self._running:
            raise EngineFault("the engine is not running")

    def _admit(self, request: GenerateRequest) -> "_Request":
        self._require_running()
        if self._label is None:
            raise EngineFault("no version is served")
        require_held(request, self._files)
        if request.request_id in self._requests:
            raise EngineFault(f"request {request.request_id} is running already")
        if self._samples_open() + request.samples > SAMPLES_OPEN_MAX:
            raise EngineFault(f"more than {SAMPLES_OPEN_MAX} samples are running or waiting")
        check_request(request, vocab_size=self._policy.vocab_size, context_max=None)
        running = _Request(request, self._policy, self._bundle_tokens)
        if self._held_at is None:
            running.moves.set()
        return self._requests.setdefault(request.request_id, running)

    def _samples_open(self) -> int:
        return sum(len(request.samples) for request in self._requests.values())

    def _serve_nothing(self) -> None:
        self._label, self._files = None, {}
        for request in self._requests.values():
            request.abort()

    async def _pace(self, request: "_Request") -> None:
        """Let other tasks run. With a pace, wait until one more token of each sample is due.

        The engine's time stands still during a hold.
        """
        if self._tokens_per_s is None:
            await asyncio.sleep(0)
            return
        self._free_at = due = (
            max(self._free_at, self._time()) + len(request.samples) / self._tokens_per_s
        )
        while not request.aborted.is_set() and (left_s := due - self._time()) > 0:
            await request.moves.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await request.aborted.wait()

    def _time(self) -> float:
        """The event loop's time in seconds, without the time spent in holds."""
        now = asyncio.get_running_loop().time() if self._held_at is None else self._held_at
        return now - self._held_s


class _Request:
    """The unfinished samples of one request.

    moves: cleared during a hold, when no token is made. aborted: the next step ends all samples.
    """

    def __init__(self, request: GenerateRequest, policy: FakePolicy, bundle_tokens: int) -> None:
        stop = frozenset(request.stop_token_ids)
        self.samples = [
            _Sample(request, policy, index, stop, draw=policy.draw(request, index))
            for index in range(request.samples)
        ]
        self.aborted = asyncio.Event()
        self.moves = asyncio.Event()
        self.label = request.label
        self._bundle_tokens = bundle_tokens

    @property
    def context_tokens(self) -> int:
        """Prompt and output so far of all its samples."""
        return sum(sample.context_tokens for sample in self.samples)

    def abort(self) -> None:
        self.aborted.set()
        self.moves.set()

    def step(self, served: str | None) -> list[SampleOutput]:
        """Write one more token of every sample; return the deltas that are due."""
        label = self.label or served
        if label is None or self.aborted.is_set():
            ended, self.samples = self.samples, []
            return [sample.buffer.take("abort") for sample in ended]
        deltas, going_on = [], []
        for sample in self.samples:
            finish = sample.write(label)
            if finish is None:
                going_on.append(sample)
            if finish is not None or len(sample.buffer) >= self._bundle_tokens:
                deltas.append(sample.buffer.take(finish))
        self.samples = going_on
        return deltas


class _Sample:
    def __init__(
        self,
        request: GenerateRequest,
        policy: FakePolicy,
        index: int,
        stop: frozenset[int],
        draw: tuple[int, int],
    ) -> None:
        self.buffer = SampleBuffer(index)
        self._policy = policy
        self._stop = stop
        self._rng_seed, self._draws_as = draw
        self._context = list(request.prompt)
        self._tokens_left = request.max_new_tokens
        self._tokens_to_end = policy.answer_length(request.prompt, self._draws_as, self._rng_seed)

    @property
    def context_tokens(self) -> int:
        return len(self._context)

    def write(self, label: str) -> FinishReason | None:
        self._tokens_left -= 1
        self._tokens_to_end -= 1
        token, logprob = self._next(label)
        self._context.append(token)
        self.buffer.add(token, logprob, label)
        if token in self._stop:
            return "stop"
        return None if self._tokens_left else "length"

    def _next(self, label: str) -> tuple[int, float]:
        if self._tokens_to_end == 0:
            return self._policy.eos_token_id, fake_logprob(
                label, self._context, self._policy.eos_token_id
            )
        vocab_size = self._policy.vocab_size
        return fake_token(
            label,
            self._context,
            sample=self._draws_as,
            rng_seed=self._rng_seed,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, slots=True)
class _Files:
    """What a version's files have."""

    layout: SnapshotLayout
    digests: dict[str, bytes]

    def beside(self, base: AdapterBase | None) -> bool:
        """Whether it is an adapter of this base."""
        return base is not None and self.layout.config.get("base") == base.digest


def _read(snapshot: Path, base: AdapterBase | None) -> _Files:
    return _Files(read_layout(snapshot, base), file_tensor_digests(snapshot))
