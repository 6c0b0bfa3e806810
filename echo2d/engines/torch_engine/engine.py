"""TorchEngine: the engine protocol on the event loop, in front of the decoder's thread."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, TypeVar

import torch

from echo2d.core.protocol.control_messages import AnswerToScore, SeedReplay
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.seeds import SEED_BITS
from echo2d.engines.base import (
    AdapterBase,
    EngineLoad,
    EngineOptions,
    GenerateRequest,
    Quantization,
    RefitReport,
    SampleOutput,
)
from echo2d.engines.stream import SAMPLES_OPEN_MAX, RequestStream, check_request, require_held
from echo2d.engines.torch_engine.answer_score import passes_of
from echo2d.engines.torch_engine.decoder import Decoder, DecoderOptions, DecoderOutput
from echo2d.engines.torch_engine.policy import prepare
from echo2d.engines.torch_engine.prompt_pass import PromptPass
from echo2d.errors import EngineFault, OperatorFault

_T = TypeVar("_T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def devices_of(device: str, engines: int) -> list[str]:
    """Choose a device for each engine: a GPU each, or the CPU for all.

    OperatorFault: there are too few GPUs, or one named GPU for several engines.
    """
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not gpus):
        return ["cpu"] * engines
    if engines == 1:
        return ["cuda" if device == "auto" else device]
    if device not in ("auto", "cuda") or gpus < engines:
        raise OperatorFault(
            f"engines: {engines} engines on device {device!r} need a GPU each; GPUs found: {gpus}; "
            "use fewer engines, or device 'auto' or 'cpu'"
        )
    return [f"cuda:{number}" for number in range(engines)]


def threads_each(options: EngineOptions) -> int | None:
    """Return the CPU threads of one engine; None: torch decides, for the only engine of a box."""
    if options.count == 1:
        return options.threads or None
    return max(1, (options.threads or len(os.sched_getaffinity(0))) // options.count)


def make_torch_engines(options: EngineOptions) -> "list[TorchEngine]":
    """Make the engines. OperatorFault: this machine lacks the devices, or torch the dtype."""
    return [
        TorchEngine(
            device=device,
            dtype=("float32" if device == "cpu" else "bfloat16")
            if options.dtype == "auto"
            else options.dtype,
            slots_max=options.slots,
            rng_seed=secrets.randbits(32),
            tokens_per_s_max=options.tokens_per_s_each,
            threads=threads_each(options),
            quantization="int8" if options.quantized_as else "none",
        )
        for device in devices_of(options.device, options.count)
    ]


class TorchEngine:
    """An engine in this process; see `engines/base.py` for the contract.

    It is seeded: a request with its own seeds gives the same tokens whatever else runs, up to the
    rounding of batched matrix products. Other requests draw their seeds from `rng_seed` in order of
    arrival. `tensor_digests` stops generation while it reads the weights back.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        slots_max: int = 128,
        rng_seed: int = 0,
        tokens_per_s_max: float | None = None,
        threads: int | None = None,
        quantization: Quantization = "none",
    ) -> None:
        """OperatorFault: this machine lacks the device, `dtype` is unknown, or int8 is asked of a
        GPU.
        """
        if dtype not in _DTYPES:
            raise OperatorFault(f"engine dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        self._options = DecoderOptions(
            _device(device),
            _DTYPES[dtype],
            slots_max,
            tokens_per_s_max,
            threads,
            int8=quantization == "int8",
        )
        if self._options.int8 and self._options.device.type != "cpu":
            raise OperatorFault(
                "worker.quantization: the torch engine computes in int8 on a CPU only, and found "
                f'device {device!r}; set worker.device = "cpu", or quantization = "none"'
            )
        self._seeds = Random(rng_seed)
        self._refits = asyncio.Lock()
        self._decoder: Decoder | None = None
        self._thread: Thread | None = None
        self._ended = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._calls: set[Future[Any]] = set()

    @property
    def label(self) -> str | None:
        return None if self._decoder is None else self._decoder.label

    @property
    def held(self) -> Collection[str]:
        return frozenset() if self._decoder is None else self._decoder.held

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._decoder = Decoder(
            self._options, emit=lambda output: loop.call_soon_threadsafe(_deliver, output)
        )
        self._thread = Thread(
            target=self._run, args=(loop, self._decoder), name="echo2d-decoder", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        if self._decoder is not None:
            self._decoder.post(self._decoder.stop)
        if self._thread is not None:
            # The thread may hang. This wait can be cancelled, and `join` cannot.
            await self._ended.wait()
            await asyncio.to_thread(self._thread.join)

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        """Read and check the files while generation goes on, then swap weights between two tokens.

        Cancelling has no effect once the swap has begun.
        """
        async with self._refits:
            decoder = self._started()
            prepared = await asyncio.to_thread(
                prepare, snapshot, decoder.policy, self._options.dtype, base, label
            )
            return await self._on_decoder(partial(decoder.swap, prepared, label))

    async def hold(self) -> None:
        await self._on_decoder(self._started().hold)

    async def release(self) -> None:
        await self._on_decoder(self._started().release)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        decoder = self._started()
        stream = self._submit(decoder, request)
        try:
            while (delta := await stream.get()) is not None:
                yield delta
        finally:
            del self._streams[request.request_id]
            # The consumer left early, so the rest is aborted.
            if stream.samples_open:
                decoder.post(partial(decoder.abort, stream))

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and self._decoder is not None:
            self._decoder.post(partial(self._decoder.abort, stream))

    async def load(self) -> EngineLoad:
        """Count without asking the decoder, so that a refit cannot delay the answer.

        The counts may be a moment old.
        """
        running = 0 if self._decoder is None else len(self._decoder.running)
        return EngineLoad(running, max(0, self._samples_open() - running), self._options.slots_max)

    async def tensor_digests(self) -> Mapping[str, bytes] | None:
        return await self._on_decoder(self._started().digests)

    def free_bytes(self) -> int:
        """Free bytes of the GPU, or of this machine's memory."""
        device = self._options.device
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0])
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(facts["MemAvailable"].split()[0])

    async def score(
        self,
        answers: Sequence[AnswerToScore],
        *,
        label: str,
        replay: SeedReplay,
    ) -> list[Evidence]:
        """Score the answers, a few at a time, between two steps of generation."""
        decoder = self._started()
        found: dict[int, Evidence] = {}
        for together in passes_of(decoder.serving(label), answers, replay):
            scored = await self._on_decoder(partial(decoder.score, together, label, replay))
            for each, evidence in zip(together, scored, strict=True):
                before = found.get(each.place)
                found[each.place] = evidence if before is None else before.plus(evidence)
        return [found[place] for place in range(len(answers))]

    async def read_prompt(self, call: bytes, *, label: str) -> bytes:
        """Read the prompt, a part at a time, between two steps of generation."""
        decoder = self._started()
        prompt = PromptPass(decoder.serving(label), call)
        while not prompt.over:
            await self._on_decoder(partial(decoder.read_prompt, prompt, label))
        return prompt.scores()

    async def check(self) -> None:
        """Assert the decoder's invariants between two of its turns."""
        await self._on_decoder(self._started().check)

    def _started(self) -> Decoder:
        if self._decoder is None:
            raise EngineFault("the engine is not running")
        return self._decoder

    def _submit(self, decoder: Decoder, request: GenerateRequest) -> RequestStream:
        policy = decoder.policy
        if policy is None or decoder.label is None:
            raise EngineFault("no version is served")
        require_held(request, decoder.held)
        if request.request_id in self._streams:
            raise EngineFault(f"request {request.request_id} is running already")
        if self._samples_open() + request.samples > SAMPLES_OPEN_MAX:
            raise EngineFault(f"more than {SAMPLES_OPEN_MAX} samples are running or waiting")
        limit = check_request(request, vocab_size=policy.vocab_size, context_max=policy.context_max)
        seeds = request.rng_seeds
        if seeds is None:
            seeds = [self._seeds.getrandbits(SEED_BITS) for _ in range(request.samples)]
        stream = self._streams[request.request_id] = RequestStream(request.samples)
        decoder.post(
            partial(decoder.submit, request, stream, seeds=seeds, limit=limit, checked=policy)
        )
        return stream

    def _samples_open(self) -> int:
        return sum(stream.samples_open for stream in self._streams.values())

    async def _on_decoder(self, call: Callable[[], _T]) -> _T:
        done: Future[_T] = Future()
        self._started().post(partial(_answer, done, call))
        self._calls.add(done)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._calls.discard(done)

    def _run(self, loop: asyncio.AbstractEventLoop, decoder: Decoder) -> None:
        try:
            decoder.run()
        finally:
            # This also runs when a bug ended the thread. Otherwise callers would wait for ever.
            loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._decoder = None
        self._ended.set()
        for stream in self._streams.values():
            stream.abort()
        for call in self._calls:
            if not call.done():
                call.set_exception(EngineFault("the engine has ended"))


def _device(name: str) -> torch.device:
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OperatorFault(f"engine device {name!r} cannot be used: {error}") from error


def _deliver(output: DecoderOutput) -> None:
    for stream, delta in output:
        stream.put(delta)


def _answer(done: Future[_T], call: Callable[[], _T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
        # Any other exception is a bug. It ends the thread, because the model's state is unknown.
        if not isinstance(error, EngineFault):
            raise
