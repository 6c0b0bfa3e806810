"""The interface of an inference engine.

An engine serves one policy version at a time under a *label* (`ids.version_label`). It reports in
spans which label wrote each output token (I2: spans come from the engine, never from a counter
elsewhere). It changes version in place (*refit*) while requests are running: they keep their
tokens, their KV cache is computed again under the new weights, and the new version writes the next
token.

A version is a whole model, or a LoRA adapter together with its base model. The label names either;
an engine that serves adapters by name uses it as the adapter's name.

To add an engine, write a factory (`EngineOptions` -> list of engines) and add it to `registry.ENGINES`, or name it in
an entry point of your own distribution. Then write a harness in `tests/support/engine_harness.py`, and run the contract
suite in `tests/support/engine_contract.py` over it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from echo2d.core.protocol.columns import Column
from echo2d.core.protocol.control_messages import AnswerToScore, Finish, SeedReplay
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.worker.events import LabelSpan
from echo2d.errors import EngineFault

FinishReason = Finish | Literal["abort"]
Quantization = Literal["none", "int8"]


class UnsuitedEngine(EngineFault):
    """The model is sound, but this engine or this host cannot serve it."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation call: `samples` continuations of one prompt, sampled from the full
    distribution.

    `prompt` may end with output tokens of an earlier attempt; then `max_new_tokens` was already
    reduced by them. Sampling ends at one of `stop_token_ids` (which is
    part of the output, finish "stop"), after `max_new_tokens` (finish "length"), or where the
    model's context is full (finish "context"). An engine knows no other end tokens. rng_seeds: one
    for each sample, which draws as if it were alone in a request with that seed; None: the engine's
    choice. written: so many tokens of `prompt` were drawn for the same sample, in an earlier attempt
    or turn; a *seeded* engine goes on drawing where these left off (`core/protocol/seeds`).
    """

    request_id: str
    prompt: Sequence[int]
    samples: int
    max_new_tokens: int
    sampling: Sampling = WHOLE
    stop_token_ids: Sequence[int] = ()
    rng_seeds: Sequence[int] | None = None
    written: int = 0


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """New output of one sample: tokens, their logprobs, spans that cover exactly these tokens
    (positions count from the sample's first output token), and how it finished (None: it goes on).
    Every sample ends with one delta whose `finish` is not None; that one may be empty.

    logprobs: natural log of the sampling distribution (temperature applied, full vocabulary),
    float32 accuracy. columns: of exactly these tokens, if the engine writes any (`core/protocol/columns`).
    """

    sample: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[LabelSpan]
    finish: FinishReason | None = None
    columns: Sequence[Column] = ()


@dataclass(frozen=True, slots=True)
class RefitReport:
    """A finished refit, and what it cost.

    pause_s: the seconds in which no token could be generated, without recompute_s.
    recomputed_tokens: prompt and output so far of every running sample whose KV cache the engine
    dropped for the new weights, and computes again. recompute_s: the seconds that this takes the
    engine, whether the refit waits for it or it happens afterwards; None: not known yet.
    """

    label: str
    pause_s: float
    recomputed_tokens: int = 0
    recompute_s: float | None = 0.0


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that an adapter belongs to, as the caller found it when it was verified.

    digest: the one that the adapter names (`adapters.base_digest`). tensors: blake3-256 of each, by
    the files' names.
    """

    directory: Path
    digest: str
    tensors: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Samples that run and samples that wait; slots: how many can run at once without thrashing."""

    running: int
    waiting: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the operator chose for the engines of one worker; a factory of `registry.ENGINES` reads
    what concerns it.

    count: engines to make, none started yet. slots: samples that each runs at once.
    tokens_per_s_max: of all engines together; 0: no limit. threads: CPU threads of all together; 0:
    the engine decides. device, dtype: as in the worker's config. folder: where an engine may keep
    logs. environment: what a server process is given of this one's. python, arguments, url,
    key_file: how a server is started or reached. refit_mode: how it pauses for a new version.
    quantization: of the torch engine's linear layers.
    """

    count: int
    slots: int
    tokens_per_s_max: float = 0.0
    threads: int
    device: str
    dtype: str
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    arguments: str = ""
    url: str = ""
    key_file: Path | None = None
    refit_mode: Literal["retract", "abort", "in_place"] = "retract"
    quantization: Quantization = "none"

    @property
    def tokens_per_s_each(self) -> float | None:
        """None: no limit."""
        return self.tokens_per_s_max / self.count or None


class Engine(Protocol):
    """All methods run on one event loop. `EngineFault` is the only fault that leaves them.

    After a *doubtful* refit (neither surely done nor surely not) `label` is None and `generate`
    raises `EngineFault` until a later refit succeeds (I3: the old version or nothing, never a
    mixture).
    """

    @property
    def label(self) -> str | None:
        """The version being served; None: before the first refit, and after a doubtful one."""

    async def start(self) -> None:
        """Get ready for the first refit: start threads, processes or whatever the engine needs."""

    async def close(self) -> None:
        """End every request with finish "abort" and free everything."""

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        """Load the files in directory `snapshot` (verified by the caller) and serve them as
        `label`.

        With `base` they are an adapter, and what is served is base and adapter; a base that is
        loaded already stays. The engine sees to it that the base's tensors which it holds are those
        of `base`. EngineFault: not done. Then either the old version is still served (`label`
        unchanged) or none (`label` None).
        """

    async def hold(self) -> None:
        """Generate no token until `release`. Requests keep their tokens and wait; a refit may come.

        EngineFault: the engine continues as before, or serves nothing.
        """

    async def release(self) -> None:
        """End a `hold`. Without one, do nothing."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        """Stream the output of all samples as it is made. Closing the iterator aborts the rest."""

    async def abort(self, request_id: str) -> None:
        """End the samples of this request alone with finish "abort". Unknown ids are ignored."""

    async def load(self) -> EngineLoad:
        """Measure how full the engine is."""

    async def tensor_digests(self) -> Mapping[str, bytes] | None:
        """blake3-256 of each weight tensor as read back from the engine's memory, in the snapshot's
        names and dtype.

        Of an adapter only its own tensors. None: this engine cannot read its memory back.
        """


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """An engine that can also score answers that others wrote."""

    def free_bytes(self) -> int:
        """Memory that is free on its device now."""

    async def score(
        self,
        answers: Sequence[AnswerToScore],
        *,
        label: str,
        replay: SeedReplay,
    ) -> list[Evidence]:
        """What the served version says about each answer, with one prefill each.

        EngineFault: another version than `label` is served,
        or an answer has tokens that it does not know.
        """
