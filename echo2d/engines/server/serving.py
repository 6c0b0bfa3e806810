"""Keeps one server and knows which version it serves: its weights, or an adapter beside them.

    nothing --start it or attach--> serving v --swap--> serving v+1
       ^                               |
       +----- doubt, death, close -----+

After any doubt nothing is served until a refit succeeds (I3). A server that was started here is
ended, and the next refit starts a new one; a server at a URL gets the next version, whichever version it has.
There is no heartbeat: the server is examined when a request gets no answer (`examine`).

A base model gets the label `base-<digest>`, under which no request runs. Adapters come beside it without a pause
(`engines/server/adapters`); a load that fails leaves the adapter before it served.

Not here: requests (`engine`), and the calls that make up a refit (`Updates`).
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from echo2d.core.base.flags import quantization_of
from echo2d.engines.adapter import AdapterLayout, adapter_layout
from echo2d.engines.base import AdapterBase, RefitReport
from echo2d.engines.layout import SnapshotLayout, read_layout
from echo2d.engines.server.adapters import ServedAdapters
from echo2d.engines.server.admission import ServerLoad
from echo2d.engines.server.calls import SampleState
from echo2d.engines.server.http_client import Lost, ServerClient
from echo2d.engines.server.launch import AdapterNeeds, Running, ServerLaunch
from echo2d.engines.server.memory import ServerMemory
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.server.recompute import RecomputeMeter
from echo2d.engines.server.weight_files import list_files, read_model, require_unchanged
from echo2d.engines.server.weight_update import (
    Doubtful,
    RefitMode,
    Updates,
    WeightUpdate,
    load_s_max,
)
from echo2d.errors import EngineFault

# A large model may come from a slow disk, and kernels may have to be compiled.
START_S_MAX = 900.0

log = logging.getLogger("echo2d.engines")


class Serving:
    """See the module docstring.

    quantized_as: what the worker says of the weights. connect: makes a client from a URL, an API key and an admin key.
    updates: how a server is refitted. adapter_refusal: why it cannot serve an adapter, or empty. nothing: called when
    no version is served any more. measured: called with a server's load. running: returns the samples that the server
    works on. recompute: measures what is computed again.
    """

    def __init__(
        self,
        where: ServerLaunch | Running,
        mode: RefitMode,
        quantized_as: str,
        *,
        connect: Callable[[str, str, str], ServerClient],
        updates: Updates,
        adapter_refusal: Callable[[AdapterLayout], str],
        nothing: Callable[[], None],
        measured: Callable[[ServerLoad], None],
        running: Callable[[], Sequence[SampleState]],
        recompute: RecomputeMeter,
    ) -> None:
        self._where = where
        self.mode: RefitMode = mode
        self._quantized_as = quantized_as
        self._connect, self._steps, self._adapter_refusal = connect, updates, adapter_refusal
        self._nothing = nothing
        self._measured = measured
        self._samples_running = running
        self._recompute = recompute
        # Samples whose KV cache was dropped when generation last stopped.
        self._cut: Sequence[SampleState] = ()
        self.label: str | None = None
        # The label of the server's weights: `label`, or that of the base of the adapters.
        self.weights: str | None = None
        self.adapters = ServedAdapters(where.folder / "adapters")
        # Those for adapters, with which the server was started, and what the adapters so far need.
        self._flags: Sequence[str] = ()
        self._needs = AdapterNeeds()
        # How many adapters it last had too little room for.
        self._too_many = 0
        self.layout: SnapshotLayout | None = None  # layout of the weights loaded last
        self.server: ServerClient | None = None
        self.process: ServerProcess | None = None
        self._memory = ServerMemory()
        # Whether the words of the version that was written last were read back. Until then nothing is given out.
        self._verified = asyncio.Event()
        self._verified.set()
        # How many updates were asked for. If the number grew since a request began, the request's tokens may be
        # of another version than at its beginning.
        self.updates = 0
        self._running = False
        self._held = False
        self._quiet = asyncio.Event()  # see `quiet`
        self._quiet.set()
        self._refits = asyncio.Lock()
        self._examining = asyncio.Lock()
        self._leaving = asyncio.Lock()  # a new server starts once the old one has ended

    @property
    def quiet(self) -> bool:
        """Whether neither a refit nor a hold stops generation."""
        return self._quiet.is_set()

    @property
    def cuts_requests(self) -> bool:
        """Whether a refit ends the running requests."""
        return self.mode != "in_place"

    def start(self) -> None:
        self._running = True

    async def close(self) -> None:
        self._running = False
        self._serve_nothing()
        # A server that was not started here stays alive, so its requests must be ended.
        if self.server is not None and self.process is None:
            with suppress(EngineFault):
                await self.server.abort_all()
        await self._leave_server()

    def require_running(self) -> None:
        if not self._running:
            raise EngineFault("the engine is not running")

    def certain(self, label: str, updates: int) -> bool:
        """Whether no other version can have written a token of a request that began under `label`, after so many
        updates.
        """
        own = self.label if self.adapters.newest is None else label
        return (own, self.updates) == (label, updates)

    async def refit(self, snapshot: Path, label: str, base: AdapterBase | None) -> RefitReport:
        """Serve `snapshot` as `label`. EngineFault: the old version is served, or none."""
        async with self._refits:
            self.require_running()
            # The files are checked first, because a file that the server cannot read may end it.
            snapshot = await asyncio.to_thread(snapshot.absolute)
            if base is None:
                if self.adapters.newest is not None:
                    self._serve_nothing()
                await asyncio.to_thread(self.adapters.clear)
                return await self._load(snapshot, label, serve=True)
            return await self._add(snapshot, label, base)

    @property
    def held(self) -> frozenset[str]:
        """The labels that requests may name."""
        whole = frozenset() if self.label is None else frozenset({self.label})
        return self.adapters.held or whole

    @property
    def base(self) -> str | None:
        """What chunks name in place of the adapter; None: no adapter is served."""
        return None if self.adapters.newest is None else self.weights

    def outdated(self, label: str) -> bool:
        return self.adapters.outdated(label)

    def lacks_room(self, label: str) -> bool:
        """Whether the server can load this adapter only if it drops another one."""
        room = None if self.server is None else self.server.adapters_max
        return room is not None and not self.adapters.holds(label) and self.adapters.full(room)

    async def drop_adapters(self, used: Collection[str]) -> None:
        """Unload the adapters that are not held; requests need those in `used`."""
        async with self._refits:
            await self._unload(self.adapters.unneeded(used))

    async def _unload(self, labels: Sequence[str]) -> None:
        """Unload adapters. One whose call is not answered is kept, because the server may have it."""
        for label in labels:
            self.adapters.unloading(label)
            with suppress(EngineFault):
                if self.server is not None:
                    await self.server.unload_adapter(label)
                await asyncio.to_thread(shutil.rmtree, self.adapters.forget(label), True)

    async def hold(self) -> None:
        """Stop generation as a refit does; cut requests continue as new ones after `release`."""
        async with self._refits:
            if self._held or self.server is None or self.label is None:
                return
            self._quiet.clear()
            try:
                await self._stop(self.server)
                self._held = True
            except Doubtful as fault:
                await self.doubt(str(fault))
                raise
            finally:
                if not self._held:
                    self._quiet.set()

    async def release(self) -> None:
        async with self._refits:
            if not self._held:
                return
            self._held = False
            self._count_cut()
            try:
                if self.server is not None:
                    await self._steps.go_on(self.server)
            except Doubtful as fault:
                await self.doubt(str(fault))
                raise
            finally:
                self._quiet.set()

    # --- for requests

    async def served(self, named: str | None) -> tuple[ServerClient, str]:
        """Wait until generation is not stopped; return the client, and the label under which a request runs that names
        this one, or none. EngineFault: nothing is served, or that version was dropped.
        """
        await self._quiet.wait()
        if self.server is None or self.label is None:
            raise EngineFault("no version is served")
        if not (named in (None, self.label) or self.adapters.holds(named)):
            raise EngineFault(f"version {named} is not held")
        return self.server, named or self.label

    async def verified(self) -> None:
        """Wait until the version that was written into memory last was read back. EngineFault: it is another one."""
        await self._verified.wait()
        if self.label is None:
            raise EngineFault("no version is served")

    async def examine(self, server: ServerClient) -> None:
        """After a lost request, check that the server lives and still serves this version.

        During a refit or a hold it does nothing, because their calls find a lost server too.
        """
        async with self._examining:
            if server is not self.server or self.label is None or not self.quiet:
                return
            try:
                found = await server.weights()
                # The server's scheduler answers this call. It may hang while HTTP does not.
                await server.load()
                lost = [
                    label for label in self.adapters.held if not await server.has_adapter(label)
                ]
            except EngineFault as fault:
                reason = str(fault)
            else:
                expected = self.weights
                reason = "" if found == expected else f"it serves {found!r}, not {expected!r}"
                for label in self.adapters.held.intersection(lost):
                    reason = reason or f"it has lost the adapter {label!r}"
            if reason and self.quiet:
                await self.doubt(reason)

    async def doubt(self, reason: str) -> None:
        """Serve nothing, because the server's weights are unknown (I3)."""
        log.warning("the server's weights are unknown, nothing is served: %s", reason)
        self._serve_nothing()
        if self.process is not None:
            # The task of a sample may be cancelled here, because all samples have ended.
            await asyncio.shield(self._leave_server())

    # --- inside

    async def _load(
        self, snapshot: Path, label: str, flags: Sequence[str] = (), *, serve: bool
    ) -> RefitReport:
        """Load the weights of a whole model under a label, and serve them or, as the base of an adapter, not.

        A server that was started here is started again for another base, because a server with adapters may keep
        some weights of the base before.
        """
        layout = await asyncio.to_thread(read_model, snapshot)
        files = await asyncio.to_thread(list_files, snapshot)
        same = self.layout is not None and layout.config == self.layout.config
        if self.layout is not None and same:
            layout.require_tensors_of(self.layout)
        order = WeightUpdate(snapshot, label, files, self.mode)
        stale = self.process is None or self.process.ended or flags != self._flags
        if isinstance(self._where, ServerLaunch) and (stale or not (same and serve)):
            where = replace(self._where, arguments=[*self._where.arguments, *flags])
            report = await self._launch(where, order, serve=serve)
            self._flags = flags
        elif self.layout is not None and not same:
            raise EngineFault(
                "config.json differs from that of the model that the server has; "
                "restart the server with the new model"
            )
        else:
            server = await self._attached()
            await server.require_refit(layout.tensors.keys(), None if serve else snapshot)
            report = await self._swap(server, order, serve=serve)
        self.layout, self.weights = layout, label
        if serve:
            self.label = label
        return report

    async def _add(self, snapshot: Path, label: str, base: AdapterBase) -> RefitReport:
        """Serve an adapter beside its base, which is loaded first if the server has other weights."""
        weights, report = f"base-{base.digest[:12]}", RefitReport(label, 0.0)
        adapter = None
        if not (self.adapters.holds(label) and await self._has(weights)):
            layout = await asyncio.to_thread(read_layout, snapshot, base)
            adapter = adapter_layout(layout)
            if refusal := self._adapter_refusal(adapter):
                raise EngineFault(refusal)
            model = await asyncio.to_thread(read_model, base.directory)
            adapter.require_fits(layout.tensors, model)
            report = replace(await self._load_base(adapter, base, weights), label=label)
        server = self.server
        assert server is not None
        base = self._fitted(server, base)
        if adapter is not None:
            kept = await asyncio.to_thread(self.adapters.copy, snapshot, label, adapter)
            size = await asyncio.to_thread(lambda: sum(f.stat().st_size for f in kept.iterdir()))
            self._require(server, weights)
            await server.load_adapter(label, kept, timeout_s=load_s_max(size))
        self._require(server, weights)
        self.adapters.serve(label, base)
        self.label = label
        return replace(report, held_max=base.held_max)

    async def _load_base(
        self, adapter: AdapterLayout, base: AdapterBase, weights: str
    ) -> RefitReport:
        """Load an adapter's base, unless the server has it and room for the adapter."""
        flags = self._flags
        if isinstance(self._where, ServerLaunch):
            # Only an adapter that needs more than all before it restarts the server.
            self._needs = self._needs.grown(adapter, base.adapters_max)
            flags = self._where.adapter_flags(self._needs)
        if flags == self._flags and await self._has(weights):
            return RefitReport(weights, 0.0)
        self._serve_nothing()
        await self._unload(self.adapters.unneeded(()))
        await asyncio.to_thread(self.adapters.clear)
        return await self._load(base.directory, weights, flags, serve=False)

    def _require(self, server: ServerClient, weights: str) -> None:
        """EngineFault: a lost request has shown meanwhile that the server is gone, or has other weights."""
        if self.server is not server or self.weights != weights:
            raise EngineFault("the server was lost while it got an adapter")

    def _fitted(self, server: ServerClient, base: AdapterBase) -> AdapterBase:
        """The base, with so small a staleness and so few kept adapters that the server has room for all of them and the
        next one.
        """
        room = server.adapters_max
        if room is None or base.adapters_max <= room:
            return base
        if room < 2:
            raise EngineFault(
                f"the server holds {room} adapter at once, and a refit needs 2: give it {base.adapters_max} "
                "(--max-loras, --max-loras-per-batch)"
            )
        held_max = min(base.held_max, room - 1)
        staleness_max = min(base.staleness_max, room - 1 - held_max)
        if base.adapters_max != self._too_many:
            self._too_many = base.adapters_max
            log.warning(
                "the server holds %d adapters: requests are cut after %d versions, and not after %d; %d versions are "
                "held at once, and not %d (--max-loras, --max-loras-per-batch)",
                *(room, staleness_max, base.staleness_max, held_max, base.held_max),
            )
        kept = self.adapters.latest(base.kept, held_max - 1)
        return replace(base, staleness_max=staleness_max, held_max=held_max, kept=kept)

    async def _has(self, weights: str) -> bool:
        """Whether the server lives and has these weights. The operator may have restarted it."""
        ended = self.process is not None and self.process.ended
        if ended or self.server is None or self.weights != weights:
            return False
        return await self.server.weights() == weights

    async def _launch(
        self, where: ServerLaunch, order: WeightUpdate, *, serve: bool
    ) -> RefitReport:
        """Start a new server with this version, and end the old one if there is one."""
        began = _now()
        self._serve_nothing()
        await self._leave_server()
        self.require_running()
        self.layout = None
        process = self.process = ServerProcess(where)
        try:
            await process.start(order.snapshot, order.label)
            server = self.server = self._connect(process.url, process.api_key, process.admin_key)
            await self._until_ready(process, server, order)
            await process.started()
            await self._probe(server)
            await self._steps.started(server, order)
            if serve and not await self._open_memory(server, order):
                await self._steps.stop(server, self.mode)
                await self._steps.update(server, order)
                await self._steps.go_on(server)
            await require_unchanged(order)
            await self._measure(server)
        except BaseException:
            # Also after a cancellation: an unused server would keep the GPU's memory.
            await asyncio.shield(self._leave_server())
            raise
        return RefitReport(order.label, _now() - began)

    async def _until_ready(
        self, process: ServerProcess, server: ServerClient, order: WeightUpdate
    ) -> None:
        deadline = _now() + START_S_MAX + order.timeout_s
        while not await server.ready():
            if process.ended or not self._running:
                words = await asyncio.to_thread(process.last_words)
                raise EngineFault(
                    f"the {process.kind} server ended while it started: {words} (see {process.log})"
                )
            if _now() > deadline:
                raise EngineFault(
                    f"the {process.kind} server is not ready after {START_S_MAX:g} s (see {process.log})"
                )
            await asyncio.sleep(0.25)

    async def _probe(self, server: ServerClient) -> None:
        """EngineFault: echo2d cannot use it, or its weights are quantized and the worker does not say so."""
        await server.probe()
        # Names may differ from those of flags.
        found, said = quantization_of(server.quantization, server.kv_dtype), self._quantized_as
        if bool(found) != bool(said):
            raise EngineFault(
                f"the server quantizes to {found or 'nothing'} and worker.engine_args says {said or 'nothing'}; write "
                "--quantization KIND and --kv-cache-dtype KIND there as the server has them, or leave them out"
            )

    async def _attached(self) -> ServerClient:
        """Return the client of the server at the URL.

        A server that serves no version is probed again, because its operator may have started another one there.
        """
        if self.server is None or (self.label is None and isinstance(self._where, Running)):
            assert isinstance(self._where, Running)
            where, (before, self.server) = self._where, (self.server, None)
            server = before or self._connect(where.url, where.api_key, where.admin_key)
            try:
                await self._probe(server)
                await self._measure(server)
            except BaseException as error:
                await server.close()
                if isinstance(error, Lost):
                    raise Lost(f"worker.engine_url: no server answers: {error}") from error
                raise
            self.server = server
        return self.server

    async def _swap(self, server: ServerClient, order: WeightUpdate, *, serve: bool) -> RefitReport:
        """Refit the running server. If it ends halfway, nothing is served."""
        staged = serve and await self._memory.prepare(order)
        began, done = _now(), False
        self._quiet.clear()
        try:
            try:
                if not self._held:
                    await self._stop(server)
            except Doubtful:
                raise
            except EngineFault:
                # The server refused the pause and continues as before.
                done = True
                raise
            # From here on new tokens may come from either version.
            self.updates += 1
            written = await self._replace(server, order, staged=staged, serve=serve)
            await require_unchanged(order)
            if written:
                self._verified.clear()
            if not self._held:
                await self._steps.go_on(server)
            pause_s = _now() - began
            if written:
                await self._read_back(server, order)
            done = True
            self._count_cut()
            tokens, recompute_s = self._recompute.take()
            return RefitReport(order.label, pause_s, tokens, recompute_s)
        except Doubtful as fault:
            await self.doubt(str(fault))
            raise
        finally:
            if not done:
                self._serve_nothing()
            self._verified.set()
            if not self._held:
                self._quiet.set()

    async def _replace(
        self, server: ServerClient, order: WeightUpdate, *, staged: bool, serve: bool
    ) -> bool:
        """Give a paused server the version. Whether it was written into memory, and is still to be read back."""
        call = partial(self._steps.call_inside, server, order)
        if staged and await self._memory.apply(order, call):
            return True
        await self._steps.update(server, order)
        if serve and not await self._open_memory(server, order):
            await self._steps.update(server, order)
        return False

    async def _read_back(self, server: ServerClient, order: WeightUpdate) -> None:
        """Compare the server's memory with the version, while requests run.

        Doubtful: the memory has other words, or the server was lost meanwhile.
        """
        self.label = self.weights = order.label
        if not self._held:
            self._quiet.set()
        await self._memory.check(order)
        if self.server is not server or self.label != order.label:
            raise Doubtful("the server was lost while its memory was read back")

    async def _open_memory(self, server: ServerClient, order: WeightUpdate) -> bool:
        """Have later versions written into the memory of a server that has just loaded `order`, and generates nothing.

        False: it cannot be done, and `order` must be loaded again.
        """
        private = self._where.private if isinstance(self._where, Running) else None
        private = private if self.process is None else self.process.private
        # Quantized weights are not those of the files.
        if private is None or server.quantization:
            return True
        call = partial(self._steps.call_inside, server)
        return await self._memory.open(private, order, call)

    async def _stop(self, server: ServerClient) -> None:
        """Stop generation, and remember the samples whose KV cache that drops."""
        self._recompute.interrupted()
        running = self._samples_running() if self.cuts_requests else ()
        await self._steps.stop(server, self.mode)
        self._cut = running

    def _count_cut(self) -> None:
        """Count the tokens whose KV the last stop dropped.

        The cut requests have ended by now, so their last tokens count, and samples that finished
        meanwhile do not.
        """
        cut, self._cut = self._cut, ()
        self._recompute.dropped(sum(sample.context_tokens for sample in cut if sample.goes_on))

    def _serve_nothing(self) -> None:
        self.label = self.weights = None
        self.adapters.serve_none()
        self._nothing()

    async def _leave_server(self) -> None:
        async with self._leaving:
            server, self.server = self.server, None
            self._memory.gone()
            process, self.process = self.process, None
            if process is not None:
                await process.stop()
            if server is not None:
                await server.close()

    async def _measure(self, server: ServerClient) -> None:
        self._measured(await server.load())


def _now() -> float:
    return asyncio.get_running_loop().time()
