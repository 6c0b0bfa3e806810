"""Which server there is, and which version it serves.

    nothing --start it or attach--> serving v --swap--> serving v+1
       ^                               |
       +----- doubt, death, close -----+

After any doubt nothing is served until a version is loaded again (I3): a managed server is ended and started anew, one
at a URL gets the next version over whatever it has. A server that died is noticed by the request that finds it dead.
Not here: requests, and what a refit asks of the server (`weight_update`).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echo2d.engines.base import RefitReport
from echo2d.engines.layout import SnapshotLayout
from echo2d.engines.server.admission import ServerLoad
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang import weight_update
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.compat import Dialect
from echo2d.engines.sglang.files import list_files, read_model, require_unchanged
from echo2d.engines.sglang.launch import Launch
from echo2d.engines.sglang.weight_update import Doubtful, RefitMode, WeightUpdate
from echo2d.errors import EngineFault

START_S_MAX = 900.0  # of a large model from a slow disk, with kernels to compile
START_LOOK_S = 0.25

log = logging.getLogger("echo2d.engines")


@dataclass(frozen=True, slots=True)
class Running:
    """A server that somebody else started, for this engine alone."""

    url: str
    api_key: str = ""
    admin_key: str = ""


class Serving:
    """See the module docstring. nothing, measured: are told when nothing is served any more, and how full a server is.

    layout: of the version served last. updates: how many were asked for: tokens of a request that began before the last
    one may be of another version than that request's.
    """

    def __init__(
        self,
        where: Launch | Running,
        mode: RefitMode,
        *,
        nothing: Callable[[], None],
        measured: Callable[[ServerLoad], None],
    ) -> None:
        self._where = where
        self.mode: RefitMode = mode
        self._nothing = nothing
        self._measured = measured
        self.label: str | None = None
        self.layout: SnapshotLayout | None = None
        self.server: SglangClient | None = None
        self.process: ServerProcess | None = None
        self.updates = 0
        self._dialect: Dialect | None = None
        self._running = False
        self._held = False
        self._quiet = asyncio.Event()  # no refit is under way, and it is not held
        self._quiet.set()
        self._refits = asyncio.Lock()
        self._examining = asyncio.Lock()

    @property
    def quiet(self) -> bool:
        """No refit is under way, and it is not held."""
        return self._quiet.is_set()

    @property
    def cuts_requests(self) -> bool:
        """A refit ends the requests that run."""
        return self.mode != "in_place"

    def start(self) -> None:
        self._running = True

    async def close(self) -> None:
        self._running = False
        self._serve_nothing()
        if self.server is not None and self.process is None:
            with suppress(EngineFault):
                await self.server.abort_all()
        await self._leave_server()

    def require_running(self) -> None:
        if not self._running:
            raise EngineFault("the engine is not running")

    async def refit(self, snapshot: Path, label: str) -> RefitReport:
        """Files are checked before the server sees them: it may die of what it cannot read."""
        async with self._refits:
            self.require_running()
            snapshot = await asyncio.to_thread(snapshot.absolute)
            layout = await asyncio.to_thread(read_model, snapshot)
            files = await asyncio.to_thread(list_files, snapshot)
            same = self.layout is not None and layout.config == self.layout.config
            if self.layout is not None and same:
                layout.require_tensors_of(self.layout)
            order = WeightUpdate(snapshot, label, files, self.mode)
            if isinstance(self._where, Launch) and (
                self.process is None or self.process.ended or not same
            ):
                report = await self._launch(self._where, order)
            elif self.layout is not None and not same:
                raise EngineFault("another model than the server has: it has to be started with it")
            else:
                report = await self._swap(await self._attached(), order)
            self.layout = layout
            return report

    async def hold(self) -> None:
        """As a refit begins: requests are cut, and go on as new ones."""
        async with self._refits:
            if self._held or self.server is None or self.label is None:
                return
            self._quiet.clear()
            try:
                await weight_update.stop(self.server, self.mode)
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
            try:
                if self.server is not None:
                    await weight_update.go_on(self.server)
            except Doubtful as fault:
                await self.doubt(str(fault))
                raise
            finally:
                self._quiet.set()

    # --- for requests

    async def served(self) -> tuple[SglangClient, str]:
        """Once no refit is under way."""
        await self._quiet.wait()
        if self.server is None or self.label is None:
            raise EngineFault("no version is served")
        return self.server, self.label

    async def examine(self, server: SglangClient) -> None:
        """A request was lost: is the server still what it was? A refit under way finds that out itself."""
        async with self._examining:
            if server is not self.server or self.label is None or not self.quiet:
                return
            try:
                model = await server.model()
                await server.load()  # which its scheduler answers: it may hang while HTTP does not
            except EngineFault as fault:
                reason = str(fault)
            else:
                reason = (
                    ""
                    if model.get("weight_version") == self.label
                    else "it serves another version now"
                )
            if reason and self.quiet:
                await self.doubt(reason)

    async def doubt(self, reason: str) -> None:
        """Nobody knows what the server's weights are."""
        log.warning("the SGLang server is in doubt, nothing is served: %s", reason)
        self._serve_nothing()
        if self.process is not None:
            await self._leave_server()

    # --- inside

    async def _launch(self, where: Launch, order: WeightUpdate) -> RefitReport:
        """A new server with this version."""
        began = _now()
        self._serve_nothing()
        await self._leave_server()
        self.require_running()
        self.layout = None
        process = self.process = ServerProcess(where)
        try:
            await process.start(order.snapshot, order.label)
            server = self.server = SglangClient(
                process.url, api_key=process.api_key, admin_key=process.admin_key
            )
            await self._until_ready(process, server, order)
            await process.started()
            self._dialect = await server.probe()
            await weight_update.identify(server, order)
            await require_unchanged(order)
            await self._measure(server)
        except BaseException:
            await asyncio.shield(self._leave_server())
            raise
        self._say_dialect(self._dialect)
        self.label = order.label
        return RefitReport(order.label, _now() - began)

    async def _until_ready(
        self, process: ServerProcess, server: SglangClient, order: WeightUpdate
    ) -> None:
        deadline = _now() + START_S_MAX + order.timeout_s
        while not await server.ready():
            if process.ended or not self._running:
                words = await asyncio.to_thread(process.last_words)
                raise EngineFault(
                    f"the SGLang server ended while it started: {words} (see {process.log})"
                )
            if _now() > deadline:
                raise EngineFault(
                    f"the SGLang server is not ready after {START_S_MAX:g} s (see {process.log})"
                )
            await asyncio.sleep(START_LOOK_S)

    async def _attached(self) -> SglangClient:
        """The server at the URL, or the one that was started."""
        if self.server is None:
            assert isinstance(self._where, Running)
            server = SglangClient(
                self._where.url, api_key=self._where.api_key, admin_key=self._where.admin_key
            )
            try:
                self._dialect = await server.probe()
                await self._measure(server)
            except BaseException:
                await server.close()
                raise
            self.server = server
            self._say_dialect(self._dialect)
        return self.server

    async def _swap(self, server: SglangClient, order: WeightUpdate) -> RefitReport:
        """See `weight_update`. Whatever ends it in the middle leaves nothing served."""
        assert self._dialect is not None
        began, done = _now(), False
        self._quiet.clear()
        try:
            try:
                if not self._held:
                    await weight_update.stop(server, order.mode)
            except Doubtful:
                raise
            except EngineFault:
                done = True  # as before
                raise
            self.updates += 1
            await weight_update.update(server, self._dialect, order)
            await require_unchanged(order)
            self.label = order.label
            if not self._held:
                await weight_update.go_on(server)
            done = True
            return RefitReport(order.label, _now() - began)
        except Doubtful as fault:
            await self.doubt(str(fault))
            raise
        finally:
            if not done:
                self._serve_nothing()
            if not self._held:
                self._quiet.set()

    def _serve_nothing(self) -> None:
        self.label = None
        self._nothing()

    async def _leave_server(self) -> None:
        server, self.server = self.server, None
        process, self.process = self.process, None
        if process is not None:
            await process.stop()
        if server is not None:
            await server.close()

    async def _measure(self, server: SglangClient) -> None:
        self._measured(await server.load())

    def _say_dialect(self, dialect: Dialect) -> None:
        if not dialect.tried:
            log.warning("SGLang %s is newer than what echo2d was tried with", dialect.version)


def _now() -> float:
    return asyncio.get_running_loop().time()
