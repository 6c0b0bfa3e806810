"""Generates each sample to its end: it sends one request to the server, and another one whenever a refit cuts
the request or the stream breaks off.

The first sample of a call goes ahead. Its first token shows that the server has the prompt's KV
cache, and the other samples then share it. How many samples run at once follows the server's load
(`admission`). A server that keeps KV caches over a refit (`cuts_requests` is false) names the
versions of a request's tokens only when the request ends, and until then the tokens cannot be given
out. So each of these requests is cut some time after the refit, at a moment of its own, and its sample
continues with a new request. The same holds where a run wants the experts of each token, which servers tell only when
a request ends.
Not here: which version is served (the server's own package), and which version wrote a token
(`continuation`).
"""

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from echo2d.core.protocol.experts import EXPERTS
from echo2d.engines.base import FinishReason
from echo2d.engines.server.admission import SampleAdmission
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import Continuation, Foreign, StreamChunk
from echo2d.engines.server.http_client import Lost, ServerClient, ServerRefused
from echo2d.engines.server.recompute import RecomputeMeter
from echo2d.errors import EngineFault

_LOOK_S = 1.0  # seconds between two looks at the server's load
# Most requests in a row that bring no token for one sample. If there are more, another program must be aborting them.
PIECES_FRUITLESS_MAX = 64
# A request that goes on through a refit is cut after at least half of this time and at most all of it. With a
# longer time, more tokens are lost when a worker dies; with a shorter time, KV is computed again more often.
HELD_S_MAX = 120.0

# The same for a request whose tokens are held until it ends, because its server tells their experts only then. The
# coordinator takes a worker that reports nothing for longer than TRIAL_S for idle, and a stop string is looked for in
# reported tokens.
WHOLE_S_MAX = 4.0
# A server may lose an abort that comes before the request has reached its scheduler.
CUT_S_MAX = 10.0

log = logging.getLogger("echo2d.engines")


# Makes the body of the request for the next piece of a sample, from the request's id, the salt of its
# cached prefixes, the label under which it runs, the call and the sample.
RequestBody = Callable[[str, str, str, GenerationCall, SampleState], Mapping[str, Any]]
# Interprets a chunk of the stream of a request under this label. The chunks of a request under an adapter name the base
# that the server had when it began; None: there was no adapter.
ChunkReader = Callable[[Mapping[str, Any], str, str | None], StreamChunk]


class ServerVersions(Protocol):
    """Which server is in use, and which version it serves."""

    @property
    def server(self) -> ServerClient | None: ...

    @property
    def base(self) -> str | None:
        """What chunks name in place of the adapter; None: no adapter is served."""

    @property
    def updates(self) -> int:
        """How many updates were asked for."""

    @property
    def quiet(self) -> bool:
        """Whether neither a refit nor a hold stops generation."""

    @property
    def cuts_requests(self) -> bool:
        """Whether a refit ends the running requests."""

    def certain(self, label: str, updates: int) -> bool:
        """Whether only the version of this label can have written the tokens of a request that began under it, when
        so many updates had been asked for.
        """

    def outdated(self, label: str) -> bool:
        """Whether a request must not go on under this label, although the server would."""

    async def served(self, named: str | None) -> tuple[ServerClient, str]:
        """The server, and the label under which a request runs that names this one, or none; once no refit is under
        way. EngineFault: there is none.
        """

    async def verified(self) -> None:
        """Wait until the weights were read back, if they were written into memory. EngineFault: they are others."""

    async def examine(self, server: Any) -> None:
        """After a lost request, find out whether the server still serves the same version."""

    async def doubt(self, reason: str) -> None:
        """Stop serving, because the server's weights are unknown."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that the server works on."""

    label: str
    sample: SampleState
    limit: asyncio.Timeout  # ends a request that does not end by itself
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SamplingLoop:
    """Generates samples. body: makes a request. read: interprets a chunk of the request's stream."""

    def __init__(
        self,
        serving: ServerVersions,
        room: SampleAdmission,
        recompute: RecomputeMeter,
        *,
        body: RequestBody,
        read: ChunkReader,
    ) -> None:
        self._serving = serving
        self._room = room
        self._recompute = recompute
        self._body = body
        self._read = read
        self._looked_at = float("-inf")
        # The requests that the server works on, by id.
        self._open: dict[str, _Open] = {}
        self._numbers = count()
        self._nonce = secrets.token_hex(6)

    @property
    def labels(self) -> set[str]:
        """The labels under which requests run."""
        return {each.label for each in self._open.values()}

    async def cut_outdated(self) -> None:
        """Cut the requests that must not go on under their label, as `cut` does."""
        await self.cut(self._outdated)

    async def cut(self, chosen: Callable[[SampleState, str], bool]) -> None:
        """Cut the requests that are chosen by sample and label. Returns once they have ended; while generation is
        stopped, a server may end none before it goes on.
        """
        cut = {rid: each for rid, each in self._open.items() if chosen(each.sample, each.label)}
        server = self._serving.server
        for rid, each in cut.items():
            each.sample.cut = True
            if server is not None:
                with suppress(EngineFault):
                    await server.abort(rid)
        if not self._serving.quiet:
            return
        for each in cut.values():
            if not each.ended.is_set():
                each.limit.reschedule(asyncio.get_running_loop().time() + CUT_S_MAX)
        for each in cut.values():
            await each.ended.wait()

    async def write(self, call: GenerationCall, sample: SampleState) -> None:
        """Generate one sample to its end."""
        finish: FinishReason | None = None
        try:
            if sample.index:
                await call.begun.wait()
            while finish is None:
                finish = await self._piece(call, sample)
        except EngineFault as fault:
            log.info("a sample was aborted: %s", fault)
            finish = "abort"
        finally:
            if sample.index == 0:
                call.begun.set()
        call.stream.put(sample.buffer.take(finish))

    async def _piece(self, call: GenerationCall, sample: SampleState) -> FinishReason | None:
        """Send one request to the server; None: the sample needs another one."""
        async with self._inside():
            # Whether this request starts together with requests that resume interrupted samples.
            resumes = not self._serving.quiet
            server, label = await self._serving.served(sample.named)
            if call.aborted:
                return "abort"
            whole = EXPERTS in call.request.columns and server.tells_experts
            # In the end, tokens without their experts are better than none.
            piece = Continuation(label, whole=whole, again=whole and sample.rewritten < 3)
            updates = self._serving.updates
            try:
                async with asyncio.timeout(None) as limit:
                    await self._stream(
                        server, call, sample, piece, updates, resumes=resumes, limit=limit
                    )
            except (Lost, TimeoutError) as fault:
                # `_stream` had the server examined. If it still serves, the sample goes on from its
                # output so far.
                log.info("a request was lost: %s", fault)
                piece.finish = "abort"
        # A server may end a request early, for example at an end token of the model that the request
        # does not name. The sample goes on until its own tokens say that it is finished.
        if (finish := sample.finish()) is not None:
            return finish
        call.put(sample)
        sample.rewritten += piece.rewritten
        sample.fruitless += 1
        if sample.fruitless > PIECES_FRUITLESS_MAX:
            raise EngineFault("the server aborts or loses every request at once")
        return "abort" if call.aborted else None

    async def _stream(
        self,
        server: ServerClient,
        call: GenerationCall,
        sample: SampleState,
        piece: Continuation,
        updates: int,
        *,
        resumes: bool,
        limit: asyncio.Timeout,
    ) -> None:
        """Read one request's stream. TimeoutError: `limit` was set, and is over.

        updates: how many updates had been asked for before the request began. Its tokens are certain until
        another update is asked for. Only requests that began between the same two updates share cached
        prefixes, because one version computed their KV. The label is not enough, because a version may be
        served twice, with another version in between.
        resumes: whether generation was stopped when the request came.
        """
        serving, clock = self._serving, asyncio.get_running_loop()
        number = next(self._numbers)
        rid = f"{self._nonce}{number:015d}"
        # The golden ratio's multiples, modulo 1, spread evenly.
        patience = (1.0 + number * 0.618033988749895 % 1.0) / 2.0  # share of the longest time
        call.rids[sample.index] = rid
        ending, held_since = False, math.inf
        salt = f"{updates} {piece.label}"
        if resumes or sample.cut:
            self._recompute.sent(rid, sample.context_tokens, now=clock.time())
        sample.cut = False
        this, base = _Open(piece.label, sample, limit), serving.base
        self._open[rid] = this
        try:
            async for chunk in server.generate(self._body(rid, salt, piece.label, call, sample)):
                told = self._read(chunk, piece.label, base)
                if told.tokens:
                    self._recompute.wrote(rid, now=clock.time())
                    call.begun.set()
                # The weights may still be read back from the server's memory.
                await serving.verified()
                tokens = piece.take(told, certain=serving.certain(piece.label, updates))
                sample.extend(tokens)
                if piece.finish is not None:
                    return
                now = clock.time()
                if piece.begun:
                    call.put(sample)
                held_since = min(held_since, now) if piece.holds else held_since
                overdue = now > held_since + patience * (WHOLE_S_MAX if piece.whole else HELD_S_MAX)
                if not ending and (call.aborted or self._must_cut(sample, piece, overdue=overdue)):
                    ending = True
                    # The server keeps the KV cache of a request that ends only for its experts.
                    sample.cut = not piece.certain or self._outdated(sample, piece.label)
                    await server.abort(rid)
            raise Lost("the server ended a stream in the middle")  # noqa: TRY301
        except Foreign as fault:
            if server is serving.server:
                await serving.doubt(str(fault))
            raise
        except (Lost, ServerRefused):
            await serving.examine(server)
            raise
        finally:
            del call.rids[sample.index], self._open[rid]
            this.ended.set()
            self._recompute.gone(rid, now=clock.time())
            if sample.cut and sample.goes_on:
                self._recompute.dropped(sample.context_tokens)
            call.cached_tokens += piece.cached_tokens
            if piece.finish is None and server is serving.server:
                with suppress(EngineFault):
                    await server.abort(rid)

    def _outdated(self, sample: SampleState, label: str) -> bool:
        """Whether a request of this sample must not go on under its label."""
        return sample.named is None and self._serving.outdated(label)

    def _must_cut(self, sample: SampleState, piece: Continuation, *, overdue: bool) -> bool:
        """Whether to end a request, so that the server names the versions and the columns of its tokens.

        overdue: it has held tokens for its share of HELD_S_MAX.
        """
        serving = self._serving
        # A server that cuts no requests may go on under another version than the named one.
        cuts = serving.cuts_requests or sample.named is not None
        outdated = self._outdated(sample, piece.label)
        return serving.quiet and (overdue or outdated or (cuts and not piece.certain))

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
        """Ask the server for its load, at most once every _LOOK_S."""
        server, now = self._serving.server, asyncio.get_running_loop().time()
        if server is None or now < self._looked_at + _LOOK_S or not self._serving.quiet:
            return
        self._looked_at = now
        with suppress(EngineFault):
            self._room.look(await server.load())
