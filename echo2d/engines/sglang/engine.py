"""SglangEngine: the engine protocol in front of an SGLang server.

It admits requests, streams their output and ends them. Not here: which version is served
(`server`), and how a sample is generated (`engines/server/sampling_loop`).
"""

import asyncio
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from echo2d.core.base.model_config import expert_numbers
from echo2d.core.protocol.seeds import SEED_BITS
from echo2d.engines.base import (
    AdapterBase,
    EngineLoad,
    EngineOptions,
    GenerateRequest,
    RefitReport,
    SampleOutput,
)
from echo2d.engines.server.admission import SampleAdmission
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import StreamChunk, under_adapter
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.server.recompute import RecomputeMeter
from echo2d.engines.server.sampling_loop import SamplingLoop
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.files import limits_of
from echo2d.engines.sglang.generate import read_chunk, request_body
from echo2d.engines.sglang.launch import Launch, launches, require_arguments, require_installed
from echo2d.engines.sglang.server import Running, Serving
from echo2d.engines.sglang.weight_update import RefitMode
from echo2d.engines.stream import SAMPLES_OPEN_MAX, RequestStream, check_request
from echo2d.errors import EngineFault, OperatorFault


def make_sglang_engines(options: EngineOptions) -> "list[SglangEngine]":
    """Make one engine for each server. OperatorFault: an option is missing or unusable."""
    if options.tokens_per_s_max:
        raise OperatorFault(
            "worker.tokens_per_s_max: SGLang cannot limit its rate; "
            "use --max-running-requests in worker.engine_args"
        )
    return [
        SglangEngine(where, slots=options.slots, refit_mode=options.refit_mode)
        for where in _servers(options)
    ]


def _servers(options: EngineOptions) -> Sequence[Launch | Running]:
    if options.python is not None and options.url:
        raise OperatorFault("worker.engine_python: set either this or worker.engine_url, not both")
    if options.python is None:
        if not options.url:
            raise OperatorFault(
                "worker.engine_python: expected --engine-python VENV/bin/python of the environment in "
                "which SGLang is installed, or --engine-url with the URL of a running server"
            )
        urls = [url.strip() for url in options.url.split(",")]
        if len(urls) != options.count or not all(
            url.startswith(("http://", "https://")) for url in urls
        ):
            raise OperatorFault(
                f"worker.engine_url: expected {options.count} http:// URLs; found {options.url!r}"
            )
        return [
            Running(url, *_keys(options.key_file), folder=options.folder / f"engine-{index}")
            for index, url in enumerate(urls)
        ]
    if not options.python.exists():
        raise OperatorFault(f"worker.engine_python: {options.python} does not exist")
    try:
        arguments = shlex.split(options.arguments)
    except ValueError as error:
        raise OperatorFault(f"worker.engine_args: {error}") from error
    require_arguments(arguments)
    launch = Launch(options.python.absolute(), arguments, options.folder, options.environment)
    require_installed(launch)
    return launches(launch, options.count)


def _keys(file: Path | None) -> list[str]:
    """Return the API key and the admin key, if the file holds them."""
    if file is None:
        return []
    try:
        return file.read_text().split()[:2]
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorFault(f"worker.engine_key_file: cannot read {file}: {error}") from error


class SglangEngine:
    """An engine whose model runs in an SGLang server.

    where: how to start a server, or where one runs. slots: how many samples may run at once; fewer
    run while the server is full. rng_seed: makes the seeds of requests that have none.
    """

    def __init__(
        self,
        where: Launch | Running,
        *,
        slots: int = 64,
        refit_mode: RefitMode = "retract",
        rng_seed: int | None = None,
    ) -> None:
        self._seeds = Random(secrets.randbits(64) if rng_seed is None else rng_seed)
        self._room = SampleAdmission(slots)
        self._calls: dict[str, GenerationCall] = {}
        self._recompute = RecomputeMeter()
        self._serving = Serving(
            where,
            refit_mode,
            nothing=self._abort_all,
            measured=self._room.look,
            running=self._running,
            recompute=self._recompute,
        )
        self._writing = SamplingLoop(
            self._serving, self._room, self._recompute, body=self._body, read=self._read
        )

    @property
    def label(self) -> str | None:
        return self._serving.label

    @property
    def server(self) -> SglangClient | None:
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
        report = await self._serving.refit(snapshot, label, base)
        if base is None:
            return report
        await self._writing.cut_outdated()
        await self._serving.drop_adapters(self._writing.labels)
        tokens, recompute_s = self._recompute.take()
        return replace(report, recomputed_tokens=tokens, recompute_s=recompute_s)

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
            # A sample without a request id waits for a slot or for a refit: SGLang does not know it,
            # so it ends here.
            if sample.index not in call.rids:
                call.stream.put(sample.buffer.take("abort"))
        for rid in list(call.rids.values()):
            with suppress(EngineFault):
                await self.server.abort(rid)

    async def load(self) -> EngineLoad:
        return EngineLoad(self._room.inside, self._room.waiting, self._room.slots)

    async def tensor_digests(self) -> Mapping[str, bytes] | None:
        """None, because SGLang does not return its weights.

        It gives checksums of the tensors that it computes with, not of the tensors in the files.
        """
        if self.label is None:
            raise EngineFault("no version is served")
        return None

    def _admit(self, request: GenerateRequest) -> GenerationCall:
        self._serving.require_running()
        if self.label is None or (layout := self._serving.layout) is None:
            raise EngineFault("no version is served")
        if request.sampling.min_p and self._serving.deterministic:
            raise EngineFault(
                "SGLang with --enable-deterministic-inference cannot draw with min_p: the request would end it"
            )
        if request.request_id in self._calls:
            raise EngineFault(f"request {request.request_id} is running already")
        if (
            sum(call.stream.samples_open for call in self._calls.values()) + request.samples
            > SAMPLES_OPEN_MAX
        ):
            raise EngineFault(f"more than {SAMPLES_OPEN_MAX} samples are running or waiting")
        vocab_size, context_max = limits_of(layout)
        limit = check_request(request, vocab_size=vocab_size, context_max=context_max)
        seeds = request.rng_seeds
        if seeds is None:
            seeds = [self._seeds.getrandbits(SEED_BITS) for _ in range(request.samples)]
        call = GenerationCall(request, RequestStream(request.samples), seeds, limit)
        self._calls[request.request_id] = call
        return call

    def _body(
        self, rid: str, salt: str, label: str, call: GenerationCall, sample: SampleState
    ) -> dict[str, Any]:
        adapter = {"lora_path": label} if self._serving.adapters.newest else {}
        return request_body(rid, salt, call, sample) | adapter

    def _read(self, chunk: Mapping[str, Any], label: str) -> StreamChunk:
        layout, weights = self._serving.layout, self._serving.weights
        found = read_chunk(chunk, None if layout is None else expert_numbers(layout.config))
        adapted = weights is not None and self._serving.adapters.newest is not None
        return under_adapter(found, weights, label) if adapted else found

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
