"""Generates each sample to its end: with one request to the server, and another one wherever a
refit cut it or its stream broke off.

The first sample of a call goes ahead. Its first token shows that the prompt's KV cache is there,
and the other samples then share it. How many samples run at once follows the server's load
(`admission`). Not here: which version is served (the server's own package), and which version wrote
a token (`continuation`).
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Protocol

from echo2d.engines.base import FinishReason
from echo2d.engines.server.admission import SampleAdmission, ServerLoad
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import Continuation, Foreign, StreamChunk
from echo2d.engines.server.http_client import Lost
from echo2d.errors import EngineFault

LOOK_S = 1.0  # between two looks at the server's load
# Requests in a row without a token for one sample: then something else aborts our requests.
PIECES_FRUITLESS_MAX = 64

log = logging.getLogger("echo2d.engines")


# The body of the request for one more piece of a sample: request id, label served, call, sample.
RequestBody = Callable[[str, str, GenerationCall, SampleState], Mapping[str, Any]]


class GeneratingServer(Protocol):
    """What the loop asks of a server. Methods raise EngineFault, and `Lost` for no answer."""

    def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]: ...

    async def abort(self, rid: str) -> None: ...

    async def load(self) -> ServerLoad: ...


class ServerVersions(Protocol):
    """Which server there is, and which version it serves (label; None: nothing).

    updates: how many were asked for. quiet: no refit is under way, and it is not held.
    cuts_requests: a refit ends the requests that run.
    """

    @property
    def server(self) -> GeneratingServer | None: ...

    @property
    def label(self) -> str | None: ...

    @property
    def updates(self) -> int: ...

    @property
    def quiet(self) -> bool: ...

    @property
    def cuts_requests(self) -> bool: ...

    async def served(self) -> tuple[GeneratingServer, str]:
        """The server and its label, once no refit is under way."""

    async def examine(self, server: Any) -> None:
        """A request was lost: find out whether the server is still what it was."""

    async def doubt(self, reason: str) -> None:
        """Nobody knows any more what the server's weights are: stop serving."""


class SamplingLoop:
    """body, read: how the server is asked for a sample, and what a chunk of its stream means."""

    def __init__(
        self,
        serving: ServerVersions,
        room: SampleAdmission,
        *,
        body: RequestBody,
        read: Callable[[Mapping[str, Any]], StreamChunk],
    ) -> None:
        self._serving = serving
        self._room = room
        self._body = body
        self._read = read
        self._looked_at = float("-inf")
        self._numbers = count()
        self._nonce = secrets.token_hex(6)

    async def write(self, call: GenerationCall, sample: SampleState) -> None:
        """Generate one sample to its end."""
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

    async def _piece(self, call: GenerationCall, sample: SampleState) -> FinishReason | None:
        """Send one request to the server; None: the sample needs another one."""
        async with self._inside():
            server, label = await self._serving.served()
            if call.aborted:
                return "abort"
            piece = Continuation(label)
            try:
                await self._stream(server, call, sample, piece, self._serving.updates)
            except Lost as fault:
                # The server was examined: if it still serves, the sample goes on from what it has.
                log.info("a request was lost: %s", fault)
                piece.finish = "abort"
        # A server may end a request early: at an end token of the model that the request does not
        # name, for one. The sample goes on until its own tokens say that it is finished.
        if (finish := sample.finish()) is not None:
            return finish
        sample.fruitless += 1
        if sample.fruitless > PIECES_FRUITLESS_MAX:
            raise EngineFault("the server aborts or loses every request at once")
        return "abort" if call.aborted else None

    async def _stream(
        self,
        server: GeneratingServer,
        call: GenerationCall,
        sample: SampleState,
        piece: Continuation,
        updates: int,
    ) -> None:
        """Read one request's stream.

        updates: how many updates had been asked for before the request began. Its tokens are
        certain until another one is asked for.
        """
        serving = self._serving
        rid = f"{self._nonce}{next(self._numbers):015d}"
        call.rids[sample.index] = rid
        told = False
        try:
            async for chunk in server.generate(self._body(rid, piece.label, call, sample)):
                tokens = piece.take(
                    self._read(chunk),
                    certain=(piece.label, updates) == (serving.label, serving.updates),
                )
                sample.extend(tokens)
                if piece.finish is not None:
                    return
                if tokens:
                    call.begun.set()
                    call.stream.put(sample.buffer.take())
                if not told and (call.aborted or self._uncut(piece)):
                    told = True
                    await server.abort(rid)
            raise Lost("the server ended a stream in the middle")  # noqa: TRY301
        except Foreign as fault:
            if server is serving.server:
                await serving.doubt(str(fault))
            raise
        except Lost:
            await serving.examine(server)
            raise
        finally:
            del call.rids[sample.index]
            call.cached_tokens += piece.cached_tokens
            if piece.finish is None and server is serving.server:
                with suppress(EngineFault):
                    await server.abort(rid)

    def _uncut(self, piece: Continuation) -> bool:
        """Whether a request survived a refit. Its abort makes the server name its versions."""
        return not piece.certain and self._serving.quiet and self._serving.cuts_requests

    @asynccontextmanager
    async def _inside(self) -> AsyncIterator[None]:
        """Wait for a place among the running samples, and hold it."""
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
        """Ask the server for its load, at most once every LOOK_S."""
        server, now = self._serving.server, asyncio.get_running_loop().time()
        if server is None or now < self._looked_at + LOOK_S or not self._serving.quiet:
            return
        self._looked_at = now
        with suppress(EngineFault):
            self._room.look(await server.load())
