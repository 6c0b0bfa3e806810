"""SglangEngine, the event loop's side: requests in, deltas out; which version is served.

    nothing --start it or attach--> serving v --swap--> serving v+1
       ^                               |
       +----- doubt, death, close -----+

Each sample is a chain of pieces (`piece.py`): one request to the server, and another one where a refit cut it. The
first sample of a request goes ahead; once its first token shows that the prompt's KV is there, the others share it.
After any doubt nothing is served until a version is loaded again (I3): a managed server is ended and started anew, one
at a URL gets the next version over whatever it has. A server that died is noticed by the request that finds it dead.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from echo2d.engines.base import AdapterBase, EngineLoad, FinishReason, GenerateRequest, RefitReport, SampleDelta
from echo2d.engines.layout import Layout
from echo2d.engines.sglang import swap
from echo2d.engines.sglang.calls import Call, Sample, request_body
from echo2d.engines.sglang.dialect import Dialect
from echo2d.engines.sglang.files import limits_of, list_files, read_model, require_unchanged
from echo2d.engines.sglang.piece import Foreign, Piece
from echo2d.engines.sglang.process import Launch, ServerProcess
from echo2d.engines.sglang.room import Room
from echo2d.engines.sglang.swap import Doubtful, Order, RefitMode
from echo2d.engines.sglang.wire import Lost, Server
from echo2d.engines.stream import SAMPLES_OPEN_MAX, RequestStream, check_request
from echo2d.errors import EngineFault

START_S_MAX = 900.0  # of a large model from a slow disk, with kernels to compile
START_LOOK_S = 0.25
LOOK_S = 1.0  # between two looks at the server's load
PIECES_FRUITLESS_MAX = 64  # in a row for one sample: somebody else aborts what is asked here

log = logging.getLogger("echo2d.engines")


@dataclass(frozen=True, slots=True)
class Running:
    """A server that somebody else started, for this engine alone."""

    url: str
    api_key: str = ""
    admin_key: str = ""


class SglangEngine:
    """`where`: how to start a server, or one that runs. `slots`: samples at once at most; fewer when it is full."""

    def __init__(
        self,
        where: Launch | Running,
        *,
        slots: int = 64,
        refit_mode: RefitMode = "retract",
        rng_seed: int | None = None,
    ) -> None:
        self._where = where
        self._mode: RefitMode = refit_mode
        self._seeds = Random(secrets.randbits(64) if rng_seed is None else rng_seed)
        self._room = Room(slots)
        self._looked_at = float("-inf")
        self._numbers = count()
        self._nonce = secrets.token_hex(6)
        self._calls: dict[str, Call] = {}
        self._process: ServerProcess | None = None
        self._server: Server | None = None
        self._dialect: Dialect | None = None
        self._layout: Layout | None = None
        self._label: str | None = None
        self._updating = False  # an update may have been asked for: no token is certain
        self._running = False
        self._held = False
        self._quiet = asyncio.Event()  # no refit is under way, and it is not held
        self._quiet.set()
        self._refits = asyncio.Lock()
        self._examining = asyncio.Lock()

    @property
    def label(self) -> str | None:
        return self._label

    @property
    def server(self) -> Server | None:
        """What it speaks to; None: nothing yet, or not any more."""
        return self._server

    @property
    def process(self) -> ServerProcess | None:
        """The server it started."""
        return self._process

    async def start(self) -> None:
        """A server is started by the first refit: it needs a model."""
        self._running = True

    async def close(self) -> None:
        self._running = False
        self._serve_nothing()
        if self._server is not None and self._process is None:
            with suppress(EngineFault):
                await self._server.abort_all()
        await self._leave_server()

    # --- versions

    async def refit(self, snapshot: Path, label: str, base: AdapterBase | None = None) -> RefitReport:
        """Files are checked before the server sees them: it may die of what it cannot read."""
        if base is not None:
            raise EngineFault("adapters are served by the torch engine only")
        async with self._refits:
            self._require_running()
            snapshot = await asyncio.to_thread(snapshot.absolute)
            layout = await asyncio.to_thread(read_model, snapshot)
            files = await asyncio.to_thread(list_files, snapshot)
            same = self._layout is not None and layout.config == self._layout.config
            if self._layout is not None and same:
                layout.require_tensors_of(self._layout)
            order = Order(snapshot, label, files, self._mode)
            if isinstance(self._where, Launch) and (self._process is None or self._process.ended or not same):
                report = await self._launch(self._where, order)
            elif self._layout is not None and not same:
                raise EngineFault("another model than the server has: it has to be started with it")
            else:
                report = await self._swap(await self._attached(), order)
            self._layout = layout
            return report

    async def _launch(self, where: Launch, order: Order) -> RefitReport:
        """A new server with this version."""
        began = _now()
        self._serve_nothing()
        await self._leave_server()
        self._layout = None
        process = self._process = ServerProcess(where)
        try:
            await process.start(order.snapshot, order.label)
            server = self._server = Server(process.url, api_key=process.api_key, admin_key=process.admin_key)
            await self._until_ready(process, server, order)
            await process.started()
            self._dialect = await server.probe()
            await swap.identify(server, order)
            await require_unchanged(order)
            await self._measure(server)
        except BaseException:
            await asyncio.shield(self._leave_server())
            raise
        self._say_dialect(self._dialect)
        self._label = order.label
        return RefitReport(order.label, _now() - began)

    async def _until_ready(self, process: ServerProcess, server: Server, order: Order) -> None:
        deadline = _now() + START_S_MAX + order.timeout_s
        while not await server.ready():
            if process.ended or not self._running:
                words = await asyncio.to_thread(process.last_words)
                raise EngineFault(f"the SGLang server ended while it started: {words} (see {process.log})")
            if _now() > deadline:
                raise EngineFault(f"the SGLang server is not ready after {START_S_MAX:g} s (see {process.log})")
            await asyncio.sleep(START_LOOK_S)

    async def _attached(self) -> Server:
        """The server at the URL, or the one that was started."""
        if self._server is None:
            assert isinstance(self._where, Running)
            server = Server(self._where.url, api_key=self._where.api_key, admin_key=self._where.admin_key)
            try:
                self._dialect = await server.probe()
                await self._measure(server)
            except BaseException:
                await server.close()
                raise
            self._server = server
            self._say_dialect(self._dialect)
        return self._server

    async def _swap(self, server: Server, order: Order) -> RefitReport:
        """See `swap.py`. Whatever ends it in the middle leaves nothing served."""
        assert self._dialect is not None
        began, done = _now(), False
        self._quiet.clear()
        try:
            try:
                if not self._held:
                    await swap.stop(server, order.mode)
            except Doubtful:
                raise
            except EngineFault:
                done = True  # as before
                raise
            self._updating = True
            await swap.update(server, self._dialect, order)
            await require_unchanged(order)
            self._label = order.label
            if not self._held:
                await swap.go_on(server)
            done = True
            return RefitReport(order.label, _now() - began)
        except Doubtful as fault:
            await self._doubt(str(fault))
            raise
        finally:
            if not done:
                self._serve_nothing()
            self._updating = False
            if not self._held:
                self._quiet.set()

    async def hold(self) -> None:
        """As a refit begins: requests are cut, and go on as new ones."""
        async with self._refits:
            if self._held or self._server is None or self._label is None:
                return
            self._quiet.clear()
            try:
                await swap.stop(self._server, self._mode)
                self._held = True
            except Doubtful as fault:
                await self._doubt(str(fault))
                raise
            finally:
                if not self._held:
                    self._quiet.set()

    async def release(self) -> None:
        async with self._refits:
            if not self._held:
                return
            self._held = False
            try:
                if self._server is not None:
                    await swap.go_on(self._server)
            except Doubtful as fault:
                await self._doubt(str(fault))
                raise
            finally:
                self._quiet.set()

    async def _doubt(self, reason: str) -> None:
        """Nobody knows what the server's weights are."""
        log.warning("the SGLang server is in doubt, nothing is served: %s", reason)
        self._serve_nothing()
        if self._process is not None:
            await self._leave_server()

    def _serve_nothing(self) -> None:
        self._label = None
        for call in self._calls.values():
            call.aborted = True
            call.begun.set()
            call.stream.abort()

    async def _leave_server(self) -> None:
        server, self._server = self._server, None
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        if server is not None:
            await server.close()

    async def _measure(self, server: Server) -> None:
        self._room.look(await server.load())

    def _say_dialect(self, dialect: Dialect) -> None:
        if not dialect.tried:
            log.warning("SGLang %s is newer than what echo2d was tried with", dialect.version)

    # --- requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleDelta]:
        call, eos = self._admit(request)
        try:
            async with asyncio.TaskGroup() as tasks:
                call.outputs = [Sample(call, index, eos) for index in range(request.samples)]
                written = [tasks.create_task(self._write(call, sample)) for sample in call.outputs]
                while (delta := await call.stream.get()) is not None:
                    yield delta
                for task in written:
                    task.cancel()
        except* GeneratorExit:  # the group wraps what its consumer's closing means
            pass
        finally:
            del self._calls[request.request_id]

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is None or self._server is None:
            return
        call.aborted = True
        call.begun.set()
        for sample in call.outputs:
            if sample.index not in call.rids:  # it waits for a place or for a refit
                call.stream.put(sample.buffer.take("abort"))
        for rid in list(call.rids.values()):
            with suppress(EngineFault):
                await self._server.abort(rid)

    async def load(self) -> EngineLoad:
        return EngineLoad(self._room.inside, self._room.waiting, self._room.slots)

    async def tensor_digests(self) -> Mapping[str, bytes] | None:
        """None: SGLang does not give its weights back, and its checksums are of tensors that it made of the files'."""
        if self._label is None:
            raise EngineFault("no version is served")
        return None

    def _require_running(self) -> None:
        if not self._running:
            raise EngineFault("the engine is not running")

    def _admit(self, request: GenerateRequest) -> tuple[Call, frozenset[int]]:
        self._require_running()
        if self._label is None or self._layout is None:
            raise EngineFault("no version is served")
        if request.request_id in self._calls:
            raise EngineFault(f"request {request.request_id} is running already")
        if sum(call.stream.samples_open for call in self._calls.values()) + request.samples > SAMPLES_OPEN_MAX:
            raise EngineFault(f"more than {SAMPLES_OPEN_MAX} samples are running or waiting")
        vocab_size, context_max = limits_of(self._layout)
        check_request(request, vocab_size=vocab_size, context_max=context_max)
        seed = self._seeds.getrandbits(31) if request.rng_seed is None else request.rng_seed
        call = Call(request, RequestStream(request.samples), seed)
        self._calls[request.request_id] = call
        return call, self._layout.eos_token_ids

    async def _write(self, call: Call, sample: Sample) -> None:
        """One sample to its end."""
        finish: FinishReason | None = None
        try:
            if sample.index:
                await call.begun.wait()
            while finish is None:
                finish = await self._piece(call, sample)
        except EngineFault as fault:
            log.info("sample given up: %s", fault)
            finish = "abort"
        finally:
            if sample.index == 0:
                call.begun.set()
        call.stream.put(sample.buffer.take(finish))

    async def _piece(self, call: Call, sample: Sample) -> FinishReason | None:
        """One request to the server; None: the sample goes on with another one."""
        async with self._inside():
            server, label = await self._served()
            if call.aborted:
                return "abort"
            piece = Piece(label)
            await self._stream(server, call, sample, piece)
        if piece.finish != "abort":
            return piece.finish
        sample.fruitless += 1
        if sample.fruitless > PIECES_FRUITLESS_MAX:
            raise EngineFault("SGLang aborts every request at once")
        return "abort" if call.aborted else sample.finish()

    async def _stream(self, server: Server, call: Call, sample: Sample, piece: Piece) -> None:
        rid = f"{self._nonce}{next(self._numbers):015d}"
        call.rids[sample.index] = rid
        told = False
        try:
            async for chunk in server.stream(request_body(rid, piece.label, call, sample)):
                tokens = piece.take(chunk, certain=piece.label == self._label and not self._updating)
                sample.extend(tokens)
                if piece.finish is not None:
                    return
                if tokens:
                    call.begun.set()
                    call.stream.put(sample.buffer.take())
                if not told and (call.aborted or self._uncut(piece)):
                    told = True
                    await server.abort(rid)
            raise Lost("SGLang ended a stream in the middle")  # noqa: TRY301 - as if the connection had broken
        except Foreign as fault:
            if server is self._server:
                await self._doubt(str(fault))
            raise
        except Lost:
            await self._examine(server)
            raise
        finally:
            del call.rids[sample.index]
            call.cached_tokens += piece.cached_tokens
            if piece.finish is None and server is self._server:
                with suppress(EngineFault):
                    await server.abort(rid)

    def _uncut(self, piece: Piece) -> bool:
        """It got past a refit: the server is asked to say now who wrote its tokens."""
        return not (piece.certain or self._updating or self._mode == "in_place")

    async def _served(self) -> tuple[Server, str]:
        """Once no refit is under way."""
        await self._quiet.wait()
        if self._server is None or self._label is None:
            raise EngineFault("no version is served")
        return self._server, self._label

    async def _examine(self, server: Server) -> None:
        """A request was lost: is the server still what it was? A refit under way finds that out itself."""
        async with self._examining:
            if server is not self._server or self._label is None or not self._quiet.is_set():
                return
            try:
                model = await server.model()
                await server.load()  # which its scheduler answers: it may hang while HTTP does not
            except EngineFault as fault:
                reason = str(fault)
            else:
                reason = "" if model.get("weight_version") == self._label else "it serves another version now"
            if reason and self._quiet.is_set():
                await self._doubt(reason)

    @asynccontextmanager
    async def _inside(self) -> AsyncIterator[None]:
        """A place among the samples that run."""
        entered = asyncio.Event()
        self._room.enter(entered.set)
        try:
            await self._look()
            await entered.wait()
            yield
        finally:
            if entered.is_set():
                self._room.leave()
            else:
                self._room.give_up(entered.set)

    async def _look(self) -> None:
        """How full the server is, now and then."""
        server, now = self._server, _now()
        if server is None or now < self._looked_at + LOOK_S or not self._quiet.is_set():
            return
        self._looked_at = now
        with suppress(EngineFault):
            await self._measure(server)

    async def check(self) -> None:
        self._room.check()
        assert self._label is None or self._server is not None
        assert self._room.inside <= sum(call.stream.samples_open for call in self._calls.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
