"""Runs leases on engines: one generation call per lease, on the engine with the fewest samples.

The output of the engines becomes events for `core/worker/leases.py`, which never lets more samples
run than all engines have slots. Version labels pass through as the engines report them (I2); the
core maps them to versions. A lease fails, but only once, if its engine gives it up or reports nonsense.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from echo2d.core.base.ids import LeaseId, lease_name, version_label
from echo2d.core.protocol.control_messages import LeaseGranted
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.worker.events import EngineLost, GenerationFailed, SampleProgressed
from echo2d.engines.base import Engine, GenerateRequest, SampleOutput
from echo2d.errors import EngineFault
from echo2d.logs import STORY, say
from echo2d.runtime.worker.stop_strings import ServedTexts, StopWatch

log = logging.getLogger("echo2d.worker")
story = logging.getLogger(STORY)


@dataclass(slots=True)
class _Call:
    engine: int
    samples: int
    task: asyncio.Task[None]


class LeaseRunner:
    """Starts, holds and aborts generation. Its tasks run in the owner's task group.

    emit: called with every SampleProgressed, GenerationFailed and EngineLost.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        tasks: asyncio.TaskGroup,
        emit: Callable[[SampleProgressed | GenerationFailed | EngineLost], None],
        texts: ServedTexts | None = None,
    ) -> None:
        self._texts = texts or ServedTexts()
        self._engines, self._tasks, self._emit = engines, tasks, emit
        self._calls: dict[tuple[LeaseId, int], _Call] = {}
        # The wanted state, and the state that the engines were last told to take.
        self._hold = self._held = False
        # Whether a `_follow` task runs.
        self._holding = False

    def hold(self, *, hold: bool) -> None:
        """Pause all engines (hold) or let them continue. The last call wins."""
        self._hold = hold
        if not self._holding:
            self._holding = True
            self._tasks.create_task(self._follow())

    async def _follow(self) -> None:
        # `hold` may be called again while engines are being told, so compare until both agree.
        while self._held != self._hold:
            self._held = self._hold
            for engine in self._engines:
                try:
                    await (engine.hold() if self._held else engine.release())
                except EngineFault as fault:
                    say(
                        log,
                        logging.WARNING,
                        "engine not held" if self._held else "engine not released",
                        str(fault),
                    )
                    self._report_if_lost(engine, fault)
        self._holding = False

    def start(self, lease: LeaseGranted) -> None:
        key = (lease.lease, lease.attempt)
        assert key not in self._calls
        engine = min(range(len(self._engines)), key=self._running)
        task = self._tasks.create_task(self._generate(lease, self._engines[engine]))
        self._calls[key] = _Call(engine, len(lease.samples), task)

    def abort(self, lease: LeaseId, attempt: int) -> None:
        """Stop generating for this lease and emit nothing more for it; ignored if it has ended."""
        call = self._calls.pop((lease, attempt), None)
        if call is not None:
            call.task.cancel()

    def _running(self, engine: int) -> int:
        return sum(call.samples for call in self._calls.values() if call.engine == engine)

    async def _generate(self, lease: LeaseGranted, engine: Engine) -> None:
        # Engines count the samples of a call from 0; `lease.samples` has their group numbers.
        unfinished = set(range(len(lease.samples)))
        facts = {"group": lease.group, "lease": lease_name(lease.lease), "attempt": lease.attempt}
        say(story, logging.DEBUG, "generating", **facts, samples=",".join(map(str, lease.samples)))
        tokens, labels = 0, set[str]()
        try:
            output = cast("AsyncGenerator[SampleOutput, None]", self._output(lease, engine))
            # `aclosing` ends the engine's request at once when this task is cancelled by `abort`.
            async with aclosing(output):
                async for delta in output:
                    self._progress(lease, delta, unfinished)
                    tokens += len(delta.tokens)
                    labels.update(span.label for span in delta.spans)
            _require_none(unfinished)
            say(
                story,
                logging.DEBUG,
                "generated",
                **facts,
                tokens=tokens,
                versions=",".join(sorted(labels)),
            )
        except EngineFault as fault:
            say(log, logging.WARNING, "generation failed", str(fault), **facts)
            self._emit(GenerationFailed(lease.lease, lease.attempt, str(fault)))
            self._report_if_lost(engine, fault)
        finally:
            self._calls.pop((lease.lease, lease.attempt), None)

    def _output(self, lease: LeaseGranted, engine: Engine) -> AsyncIterator[SampleOutput]:
        if lease.stop_strings:
            return self._generate_watched(lease, engine)
        return engine.generate(_request(lease))

    async def _generate_watched(
        self, lease: LeaseGranted, engine: Engine
    ) -> AsyncIterator[SampleOutput]:
        """Generate each sample with a request of its own, which ends at the lease's stop strings."""
        texts = await self._texts.get()
        outputs: asyncio.Queue[SampleOutput | EngineFault] = asyncio.Queue()

        async def write(index: int) -> None:
            watch = StopWatch(texts, lease)
            output = cast(
                "AsyncGenerator[SampleOutput, None]", engine.generate(_request(lease, index))
            )
            finish = None
            try:
                async with aclosing(output):
                    async for delta in output:
                        found = watch.cut(delta)
                        finish = found.finish
                        outputs.put_nowait(replace(found, sample=index))
                        if finish is not None:
                            return
                raise EngineFault("the engine ended without finishing a sample")  # noqa: TRY301
            except EngineFault as fault:
                outputs.put_nowait(fault)

        writers = [self._tasks.create_task(write(index)) for index in range(len(lease.samples))]
        try:
            finished = 0
            while finished < len(writers):
                found = await outputs.get()
                if isinstance(found, EngineFault):
                    raise found
                finished += found.finish is not None
                yield found
        finally:
            for writer in writers:
                writer.cancel()

    def _report_if_lost(self, engine: Engine, fault: EngineFault) -> None:
        # An engine that still has a label has failed only this call, and can serve the next lease.
        if engine.label is None:
            self._emit(EngineLost(f"an engine no longer serves a version: {fault}"))

    def _progress(self, lease: LeaseGranted, delta: SampleOutput, unfinished: set[int]) -> None:
        if delta.sample not in unfinished:
            raise EngineFault(f"the engine reported sample {delta.sample}, which is not running")
        if delta.finish == "abort":
            raise EngineFault("the engine aborted the request")
        if delta.finish is not None:
            unfinished.discard(delta.sample)
        self._emit(
            SampleProgressed(
                lease.lease,
                lease.attempt,
                lease.samples[delta.sample],
                tuple(delta.tokens),
                tuple(delta.logprobs),
                tuple(delta.spans),
                delta.finish,
                tuple(delta.columns),
            )
        )


def _require_none(unfinished: set[int]) -> None:
    if unfinished:
        raise EngineFault(f"the engine ended without finishing samples {sorted(unfinished)}")


def _request(lease: LeaseGranted, index: int | None = None) -> GenerateRequest:
    """The engine's request for a lease. index: if given, the request is for this sample only."""
    name, seeds = f"{lease.lease}.{lease.attempt}", lease.rng_seeds
    if index is not None:
        name, seeds = f"{name}.{index}", seeds[index : index + 1]
    return GenerateRequest(
        request_id=name,
        prompt=unpack_tokens(lease.prompt).tolist(),
        samples=len(lease.samples) if index is None else 1,
        max_new_tokens=lease.max_new_tokens,
        sampling=lease.sampling,
        stop_token_ids=lease.stop_token_ids,
        rng_seeds=seeds or None,
        written=lease.earlier + lease.written,
        columns=lease.columns,
        label=None if lease.version is None else version_label(*lease.version),
    )
