"""The interface of an inference engine.

An engine serves one policy version at a time under a *label* (`ids.version_label`). It reports in
spans which label wrote each output token (I2: spans come from the engine, never from a counter
elsewhere). It changes version in place (*refit*) while requests are running: they keep their
tokens, their KV cache is computed again under the new weights, and the new version writes the next
token.

A version is a whole model, or a LoRA adapter together with its base model. The label names either.
An engine *holds* the adapter that it serves and, beside it, those that `AdapterBase.kept` names: a request may name one
of them, which then writes all its tokens. It may also let a request that names none go on under the adapter with which
it began, at most `AdapterBase.staleness_max` versions behind the newest. A whole model is held alone.

To add an engine, write a factory (`EngineOptions` -> list of engines) and add it to `registry.ENGINES`, or name it in
an entry point of your own distribution. Then write a harness in `tests/support/engine_harness.py`, and run the contract
suites in `tests/support/engine_contract.py` and, if it serves adapters, `tests/support/held_contract.py` over it.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from echo2d.core.base.ids import label_version
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

    Sampling ends at one of `stop_token_ids` (which is part of the output, finish "stop"), after
    `max_new_tokens` (finish "length"), or where the model's context is full (finish "context"). An
    engine knows no other end tokens.
    """

    request_id: str
    # The prompt may end with output tokens of an earlier attempt. Their number is already subtracted from
    # `max_new_tokens`.
    prompt: Sequence[int]
    samples: int
    max_new_tokens: int
    sampling: Sampling = WHOLE
    stop_token_ids: Sequence[int] = ()
    # One seed for each sample. A sample draws as if it were alone in a request with its seed. None: the engine
    # chooses the seeds.
    rng_seeds: Sequence[int] | None = None
    # This many tokens of `prompt` were drawn for the same sample, in an earlier attempt or turn. A
    # *seeded* engine goes on drawing where these ended (`core/protocol/seeds`).
    written: int = 0
    # The held version that writes all tokens, whatever is served meanwhile. None: the served one, and those after it.
    label: str | None = None
    columns: Sequence[
        str
    ] = ()  # the columns that the run keeps; an engine need not write any other


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """New output of one sample.

    Every sample ends with one delta whose `finish` is not None; that one may be empty.
    """

    sample: int
    tokens: Sequence[int]
    # Natural log of the sampling distribution (temperature applied, full vocabulary), accurate to float32.
    logprobs: Sequence[float]
    # The spans cover exactly these tokens; positions count from the sample's first output token.
    spans: Sequence[LabelSpan]
    finish: FinishReason | None = None  # None: the sample goes on
    columns: Sequence[Column] = ()  # values for exactly these tokens (`core/protocol/columns`)


@dataclass(frozen=True, slots=True)
class RefitReport:
    """A finished refit, and what it cost."""

    label: str
    pause_s: float  # seconds in which no token could be generated, without recompute_s
    # How many tokens the engine computes again, because it dropped their KV cache for the new weights: prompt
    # and output so far of running samples.
    recomputed_tokens: int = 0
    # Seconds that the engine needs for that, during the refit or after it; None: not known yet.
    recompute_s: float | None = 0.0
    # How many adapters it holds at most, if these are fewer than `AdapterBase.held_max`.
    held_max: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that an adapter belongs to, as the caller verified it."""

    directory: Path
    digest: str  # the digest that the adapter names (`adapters.base_digest`)
    tensors: Mapping[str, bytes]  # blake3-256 of each tensor, by its name in the files
    # How many versions behind the newest a token may be that the run still trains on (S).
    staleness_max: int = 0
    # The labels of adapters that stay held beside the one of this refit, as far as the engine holds them.
    kept: frozenset[str] = frozenset()
    # How many adapters are held at most, the served one included: the same number at each refit, because an engine
    # may have to load the base again to make room.
    held_max: int = 1

    @property
    def adapters_max(self) -> int:
        """How many adapters an engine needs room for: those that are held, those of the `staleness_max` versions under
        which requests go on, and the one that is loaded next.
        """
        return self.held_max + self.staleness_max + 1

    def outdated(self, label: str, newest: str) -> bool:
        """Whether a request must not go on under this adapter, because no train step would take its next token."""
        if label == newest:
            return False
        # After a revocation another adapter may have the same version, or the newest one an older version.
        return not 0 < label_version(newest) - label_version(label) <= self.staleness_max


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How many samples run and wait."""

    running: int
    waiting: int
    slots: int  # samples that can run at once without thrashing


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the operator chose for the engines of one worker. Each factory of `registry.ENGINES` reads the
    fields that it needs.
    """

    count: int  # engines to make; none of them is started yet
    slots: int  # samples that each engine runs at once
    tokens_per_s_max: float = 0.0  # limit of all engines together; 0: no limit
    threads: int  # CPU threads of all engines together; 0: the engine decides
    # These two are as in the worker's config.
    device: str
    dtype: str
    folder: Path  # where an engine may keep logs
    # The variables of this process that a server process gets.
    environment: Mapping[str, str] = field(default_factory=dict)
    # How a server is started or reached.
    python: Path | None = None
    arguments: str = ""
    url: str = ""
    key_file: Path | None = None
    # How the server pauses for a new version.
    refit_mode: Literal["retract", "abort", "in_place"] = "retract"
    quantized_as: str = (
        ""  # what the worker says that its engines quantize weights to; empty: they do not
    )

    @property
    def tokens_per_s_each(self) -> float | None:
        """None: no limit."""
        return self.tokens_per_s_max / self.count or None


class Engine(Protocol):
    """All methods run on one event loop. `EngineFault` is the only fault that leaves them.

    After a *doubtful* refit (the engine may or may not have the new weights) `label` is None and `generate`
    raises `EngineFault` until a later refit succeeds (I3: the old version or nothing, never a
    mixture).
    """

    @property
    def label(self) -> str | None:
        """The version being served; None: before the first refit, and after a doubtful one."""

    @property
    def held(self) -> Collection[str]:
        """The labels that a request may name, `label` among them; empty while `label` is None.

        After a refit to an adapter they are its own, and those of `AdapterBase.kept` that were held before it and have
        the same base. The engine drops every other adapter once no request names it.
        """

    async def start(self) -> None:
        """Get ready for the first refit: start threads, processes or whatever the engine needs."""

    async def close(self) -> None:
        """End every request with finish "abort" and free everything."""

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        """Load the files in directory `snapshot` (verified by the caller) and serve them as
        `label`.

        With `base` the files are an adapter, which is served together with that base. A base that is loaded
        already is not loaded again. The engine makes sure that the base's tensors in its memory are those of
        `base`. An adapter that is held already becomes the served one, and `snapshot` is not read. EngineFault: the
        refit failed. Then either the old version is still served (`label` and `held` unchanged) or none (`label` None).

        If the engine has to drop an adapter that requests name (for another base, a whole model, or more room than it
        has), their samples end with "abort".
        """

    async def hold(self) -> None:
        """Generate no token until `release`. Requests keep their tokens and wait; a refit is allowed.

        EngineFault: the engine continues as before, or serves nothing.
        """

    async def release(self) -> None:
        """End a `hold`. Without one, do nothing."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        """Stream the output of all samples as it is made. Closing the iterator aborts the rest.

        EngineFault: the engine cannot run the request, or does not hold the version that it names.
        """

    async def abort(self, request_id: str) -> None:
        """End only the samples of this request, with finish "abort". Unknown ids are ignored."""

    async def load(self) -> EngineLoad:
        """Measure how full the engine is."""

    async def tensor_digests(self) -> Mapping[str, bytes] | None:
        """blake3-256 of each weight tensor as read back from the engine's memory, by the snapshot's
        names and in its dtype.

        For an adapter, only its own tensors. None: this engine cannot read its memory back.
        """


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """An engine that can also score answers of other engines, and prompts."""

    def free_bytes(self) -> int:
        """Bytes that are free now on the engine's device."""

    async def score(
        self,
        answers: Sequence[AnswerToScore],
        *,
        label: str,
        replay: SeedReplay,
    ) -> list[Evidence]:
        """Score each answer under a held version, with one prefill per answer.

        EngineFault: the engine does not hold `label`, or an answer has tokens that the version does not know.
        """

    async def read_prompt(self, call: bytes, *, label: str) -> bytes:
        """What a client of the Tinker API asks of a prompt, under a held version.

        call: the body of the learner's order "score". Returns what the learner would answer (`tinker/wire`).
        EngineFault: the engine does not hold `label`, or cannot read this prompt.
        """
