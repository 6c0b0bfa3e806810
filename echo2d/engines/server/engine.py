"""ServerEngine: the engine protocol in front of an inference server.

It admits requests, streams their output and ends them. Not here: which version is served
(`serving`), how a sample is generated (`sampling_loop`), and the words of each kind of server (`ServerKind`).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self

from echo2d.core.base.model_config import context_max
from echo2d.core.protocol.seeds import SEED_BITS
from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.base import (
    AdapterBase,
    EngineLoad,
    EngineOptions,
    GenerateRequest,
    RefitReport,
    SampleOutput,
)
from echo2d.engines.server.adapters import under_adapter
from echo2d.engines.server.admission import SampleAdmission
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import StreamChunk
from echo2d.engines.server.http_client import ServerClient
from echo2d.engines.server.launch import Running, ServerLaunch, servers_of
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.server.recompute import RecomputeMeter
from echo2d.engines.server.sampling_loop import SamplingLoop
from echo2d.engines.server.serving import Serving
from echo2d.engines.server.weight_files import vocabulary
from echo2d.engines.server.weight_update import RefitMode, Updates
from echo2d.engines.stream import SAMPLES_OPEN_MAX, RequestStream, check_request, require_held
from echo2d.errors import EngineFault


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What is different from one kind of server to another."""

    launch: type[ServerLaunch]
    connect: Callable[[str, str, str], ServerClient]
    updates: Updates
    # The body of a request for the next piece of a sample, from the request's id, the salt of its cached prefixes, the
    # name of its adapter (None: it has none), the call and the sample.
    body: Callable[[str, str, str | None, GenerationCall, SampleState], Mapping[str, Any]]
    # What a chunk of a stream means; the config of the model.
    read: Callable[[Mapping[str, Any], Mapping[str, object]], StreamChunk]
    # The tokens of the context that the server can fill, of this many.
    context: Callable[[int], int]
    # Why a server cannot run a request; empty: it can.
    refusal: Callable[[Any, GenerateRequest], str] = lambda *_: ""
    # Why no server of this kind can serve an adapter; empty: one can.
    adapter_refusal: Callable[[AdapterLayout], str] = lambda _: ""


class ServerEngine:
    """An engine whose model runs in a server of its own.

    where: how to start a server, or where one runs. slots: how many samples may run at once; fewer
    run while the server is full. quantized_as: what the worker says of its weights. rng_seed: makes
    the seeds of requests that have none.
    """

    kind: ClassVar[ServerKind]

    def __init__(
        self,
        where: ServerLaunch | Running,
        *,
        slots: int = 64,
        refit_mode: RefitMode = "retract",
        quantized_as: str = "",
        rng_seed: int | None = None,
    ) -> None:
        kind = self.kind
        self._seeds = Random(secrets.randbits(64) if rng_seed is None else rng_seed)
        self._room = SampleAdmission(slots)
        self._calls: dict[str, GenerationCall] = {}
        self._recompute = RecomputeMeter()
        self._serving = Serving(
            where,
            refit_mode,
            quantized_as,
            connect=kind.connect,
            updates=kind.updates,
            adapter_refusal=kind.adapter_refusal,
            nothing=self._abort_all,
            measured=self._room.look,
            running=self._running,
            recompute=self._recompute,
        )
        self._writing = SamplingLoop(
            self._serving, self._room, self._recompute, body=self._body, read=self._read
        )

    @classmethod
    def make(cls, options: EngineOptions) -> Sequence[Self]:
        """One engine for each server. OperatorFault: an option is missing or unusable."""
        return [
            cls(
                where,
                slots=options.slots,
                refit_mode=options.refit_mode,
                quantized_as=options.quantized_as,
            )
            for where in servers_of(options, cls.kind.launch)
        ]

    @property
    def label(self) -> str | None:
        return self._serving.label

    @property
    def held(self) -> Collection[str]:
        return self._serving.held

    @property
    def server(self) -> ServerClient | None:
        """The client of the server in use; None before the first refit and after a loss."""
        return self._serving.server

    @property
    def process(self) -> ServerProcess | None:
        """The process of the server, if this engine started it."""
        return self._serving.process

    async def start(self) -> None:
        """Accept refits. The first refit starts the server, which needs a model to start."""
        self._serving.start()

    async def close(self) -> None:
        await self._serving.close()

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        if base is None:
            return await self._serving.refit(snapshot, label, None)
        # Also before it loads another one: a failed load, or a full disk, must not keep them all.
        await self._drop_adapters()
        if self._serving.lacks_room(label):
            await self._end_named(but={label, *base.kept})
            await self._drop_adapters()
        report = await self._serving.refit(snapshot, label, base)
        await self._writing.cut_outdated()
        await self._drop_adapters()
        tokens, recompute_s = self._recompute.take()
        return replace(report, recomputed_tokens=tokens, recompute_s=recompute_s)

    async def _drop_adapters(self) -> None:
        """Drop the adapters that are neither held, nor used or named by a request."""
        calls = [call for call in self._calls.values() if not call.aborted]
        named = {call.request.label for call in calls if call.request.label is not None}
        await self._serving.drop_adapters(named | self._writing.labels)

    async def _end_named(self, but: Collection[str]) -> None:
        """End the requests that name another version than these, because the server has no room beside it."""
        for call in list(self._calls.values()):
            if call.request.label is not None and call.request.label not in but:
                await self.abort(call.request.request_id)
        await self._writing.cut(lambda sample, _: sample.named not in (None, *but))

    async def hold(self) -> None:
        await self._serving.hold()

    async def release(self) -> None:
        await self._serving.release()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        call = self._admit(request)
        try:
            async with asyncio.TaskGroup() as tasks:
                call.outputs = [SampleState(call, index) for index in range(request.samples)]
                written = [
                    tasks.create_task(self._writing.write(call, sample)) for sample in call.outputs
                ]
                while (delta := await call.stream.get()) is not None:
                    yield delta
                # All output is delivered, so the tasks have nothing left to do.
                for task in written:
                    task.cancel()
        except* GeneratorExit:
            # The consumer closed the iterator. The task group wraps this exception in a group, which
            # must not leave this generator.
            pass
        finally:
            del self._calls[request.request_id]

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is None or self.server is None:
            return
        call.aborted = True
        # Samples that wait until the first one has filled the prompt's cache must wake up to end.
        call.begun.set()
        for sample in call.outputs:
            # A sample without a request id waits for a slot or for a refit: the server does not know it,
            # so it ends here.
            if sample.index not in call.rids:
                call.stream.put(sample.buffer.take("abort"))
        for rid in list(call.rids.values()):
            with suppress(EngineFault):
                await self.server.abort(rid)

    async def load(self) -> EngineLoad:
        return EngineLoad(self._room.inside, self._room.waiting, self._room.slots)

    async def tensor_digests(self) -> Mapping[str, bytes] | None:
        """None, because servers do not return their weights by the names of the files."""
        if self.label is None:
            raise EngineFault("no version is served")
        return None

    def _admit(self, request: GenerateRequest) -> GenerationCall:
        self._serving.require_running()
        if self.label is None or (layout := self._serving.layout) is None:
            raise EngineFault("no version is served")
        require_held(request, self.held)
        if refusal := self.kind.refusal(self.server, request):
            raise EngineFault(refusal)
        if request.request_id in self._calls:
            raise EngineFault(f"request {request.request_id} is running already")
        if (
            sum(call.stream.samples_open for call in self._calls.values()) + request.samples
            > SAMPLES_OPEN_MAX
        ):
            raise EngineFault(f"more than {SAMPLES_OPEN_MAX} samples are running or waiting")
        tokens = context_max(layout.config)
        self._require_fits(request, tokens)
        limit = check_request(
            request,
            vocab_size=vocabulary(layout),
            context_max=None if tokens is None else self.kind.context(tokens),
        )
        seeds = request.rng_seeds
        if seeds is None:
            seeds = [self._seeds.getrandbits(SEED_BITS) for _ in range(request.samples)]
        call = GenerationCall(request, RequestStream(request.samples), seeds, limit)
        self._calls[request.request_id] = call
        return call

    def _require_fits(self, request: GenerateRequest, tokens: int | None) -> None:
        """EngineFault: the server has room for fewer tokens than the request may need. tokens: the model's context."""
        assert self.server is not None
        room = self.server.context_max
        if room is None or (tokens is not None and room >= tokens):
            return
        needed = len(request.prompt) + request.max_new_tokens
        if tokens is not None:
            needed = min(needed, self.kind.context(tokens))
        if needed > self.kind.context(room):
            raise EngineFault(
                f"a prompt of {len(request.prompt)} tokens and its answer may take {needed}; the server has room for "
                f"{room}: give it more ({self.server.CONTEXT_FLAG})"
            )

    def _body(
        self, rid: str, salt: str, label: str, call: GenerationCall, sample: SampleState
    ) -> Mapping[str, Any]:
        adapter = label if self._serving.adapters.newest else None
        return self.kind.body(rid, salt, adapter, call, sample)

    def _read(self, chunk: Mapping[str, Any], label: str, base: str | None) -> StreamChunk:
        layout = self._serving.layout
        found = self.kind.read(chunk, {} if layout is None else layout.config)
        return found if base is None else under_adapter(found, base, label)

    def _running(self) -> list[SampleState]:
        """The samples that the server works on."""
        return [call.outputs[index] for call in self._calls.values() for index in call.rids]

    def _abort_all(self) -> None:
        """End all requests, because no version is served any more."""
        for call in self._calls.values():
            call.aborted = True
            call.begun.set()
            call.stream.abort()

    async def check(self) -> None:
        self._room.check()
        self._recompute.check()
        assert self.label is None or self.server is not None
        assert self._room.inside <= sum(call.stream.samples_open for call in self._calls.values())
