"""Downloads over HTTP, for `baselines`: from relays, as in prime-rl's SHARDCAST, or from one object store.

A version is served in parts, which are byte ranges; a manifest has the SHA-256 of each. The seed is the origin. A relay
takes all parts from the origin, and serves each part once it has verified it. The other peers draw a relay for each
part, by the rate and success that they have measured. Without relays all peers take all parts from the origin, as from
an object store. This is faster than SHARDCAST: a relay holds a request until it has the part, where SHARDCAST polls a
list (every 30 s unless configured otherwise); a part has 256 KiB, not 50 MB; checksums are of parts, not of the whole
file; connections are kept.
"""

import asyncio
import hashlib
import os
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from echo2d_lab.bench.broadcast.rivals.node import RivalNode, RivalOffer, obey

STORE = "object-store"  # the settings without relays
# 8 peers on links of 50 Mbit/s took 4.3 times the bound with two relays and ten streams of 1 MiB, 3.3 with three relays
# and three or four streams of 256 KiB.
PART_BYTES = 256 << 10
STREAMS = 4  # requests of one peer at a time
RETRIES_MAX = 5
RECENT = 0.3  # weight of the newest rate or success in its moving mean
HEAL = 0.01  # with each part the success of every relay rises by this, so that a bad one is tried again
KEEP_S = 3600.0  # an idle connection stays open for this many seconds


def relay_numbers(uplinks: Sequence[float]) -> tuple[int, ...]:
    """The relays: the fastest peers, in the number with which the broadcast ends first.

    The origin feeds the relays, and they feed all other peers. Of two numbers that end at the same time, the larger one
    is taken: its relays have uplink to spare. uplinks: of the origin, then of each peer; 0: it cannot be dialled.
    """
    origin, *peers = uplinks
    fastest = sorted(range(1, len(uplinks)), key=lambda number: -uplinks[number])
    best, least_s = 1, float("inf")
    for count in range(1, len(peers) + 1):
        rate = sum(uplinks[number] for number in fastest[:count])
        if uplinks[fastest[count - 1]] == 0:
            break
        seconds = max(count / origin, (len(peers) - count) / rate)
        if seconds <= least_s:
            best, least_s = count, seconds
    return tuple(sorted(fastest[:best]))


def part_range(part: int, size: int) -> tuple[int, int]:
    """The first byte of a part, and the end of it."""
    return part * PART_BYTES, min(size, (part + 1) * PART_BYTES)


class Source:
    """A server from which this peer fetches, with its measured rate and success."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.rate: float | None = None
        self._success = 1.0

    def weight(self, usual: float) -> float:
        """usual: the rate that is assumed for a source that has not been measured."""
        return (usual if self.rate is None else self.rate) * self._success

    def note(self, rate: float | None) -> None:
        """rate: bytes/s of a part; None: it failed."""
        self._success += RECENT * ((rate is not None) - self._success)
        if rate is not None:
            self.rate = rate if self.rate is None else self.rate + RECENT * (rate - self.rate)

    def heal(self) -> None:
        self._success = min(1.0, self._success + HEAL)


class Holding:
    """One version at one node. sums: checksums of the parts. there: for each part, whether it is verified."""

    def __init__(self, offer: RivalOffer) -> None:
        self.size = offer.size
        self.sums: tuple[str, ...] = ()
        self.known = asyncio.Event()
        self.there = [asyncio.Event() for _ in range(-(-offer.size // PART_BYTES))]


class HttpTree:
    """One node: server, client or both."""

    def __init__(self, node: RivalNode) -> None:
        self._node = node
        relays = () if node.settings == STORE else relay_numbers(node.uplinks)
        self._serves = node.is_seed or node.number in relays
        sources = relays if relays and not self._serves else (0,)
        self._sources = [Source(node.addresses[number]) for number in sources]
        self._holdings: dict[int, Holding] = {}
        self._random = random.Random(node.number)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start())

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def prepare(self, offer: RivalOffer) -> None:
        self._run(self._prepare(offer))

    def fetch(self, offer: RivalOffer) -> None:
        self._run(self._fetch(offer))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        self._session = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEEP_S),
            timeout=ClientTimeout(total=None),
        )
        app = web.Application()
        app.router.add_get("/{version}/sums", self._answer_sums)
        app.router.add_get("/{version}", self._answer_part)
        self._runner = web.AppRunner(app, keepalive_timeout=KEEP_S, access_log=None)
        await self._runner.setup()
        if self._serves:
            await web.TCPSite(self._runner, self._node.address, self._node.port).start()

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _prepare(self, offer: RivalOffer) -> None:
        self._holdings = {offer.version: Holding(offer)}
        file, holding = self._node.file(offer.version), self._holdings[offer.version]
        if self._node.is_seed:
            content = memoryview(file.read_bytes())
            ranges = [part_range(part, offer.size) for part in range(len(holding.there))]
            holding.sums = tuple(hashlib.sha256(content[a:b]).hexdigest() for a, b in ranges)
            for event in (holding.known, *holding.there):
                event.set()
        else:
            file.touch()
            os.truncate(file, offer.size)

    # --- the server

    async def _answer_sums(self, request: web.Request) -> web.Response:
        holding = self._holdings[int(request.match_info["version"])]
        await holding.known.wait()
        return web.json_response(holding.sums)

    async def _answer_part(self, request: web.Request) -> web.Response:
        version, wanted = int(request.match_info["version"]), request.http_range
        await self._holdings[version].there[wanted.start // PART_BYTES].wait()
        with self._node.file(version).open("rb") as file:
            data = os.pread(file.fileno(), wanted.stop - wanted.start, wanted.start)
        return web.Response(status=206, body=data)

    # --- the client

    async def _fetch(self, offer: RivalOffer) -> None:
        holding = self._holdings[offer.version]
        url = f"http://{self._sources[0].address}:{self._node.port}/{offer.version}/sums"
        async with self._session.get(url) as answer:
            holding.sums = tuple(await answer.json())
        holding.known.set()
        parts = iter(range(len(holding.there)))
        with self._node.file(offer.version).open("r+b") as file:
            async with asyncio.TaskGroup() as group:
                for _ in range(STREAMS):
                    group.create_task(self._stream(offer, holding, parts, file.fileno()))

    async def _stream(self, offer: RivalOffer, holding: Holding, parts: Any, file: int) -> None:
        """One of the STREAMS; each takes the next part of all."""
        for part in parts:
            for _ in range(RETRIES_MAX):
                source = self._draw()
                data = await self._get(source, offer, part)
                if data is not None and hashlib.sha256(data).hexdigest() == holding.sums[part]:
                    break
                source.note(None)
            else:
                raise RuntimeError(f"part {part} has failed {RETRIES_MAX} times")
            os.pwrite(file, data, part * PART_BYTES)
            holding.there[part].set()

    def _draw(self) -> Source:
        for each in self._sources:
            each.heal()
        usual = max((each.rate or 0.0 for each in self._sources), default=0.0) or 1.0
        weights = [each.weight(usual) for each in self._sources]
        return self._random.choices(self._sources, weights)[0]

    async def _get(self, source: Source, offer: RivalOffer, part: int) -> bytes | None:
        """A part; None: the request failed. The rate counts from the answer's first byte, because before it the server
        waits for the part.
        """
        begin, end = part_range(part, offer.size)
        url = f"http://{source.address}:{self._node.port}/{offer.version}"
        try:
            async with self._session.get(
                url, headers={"Range": f"bytes={begin}-{end - 1}"}
            ) as answer:
                began_at = time.monotonic()
                data = await answer.read()
        except ClientError:
            return None
        if answer.status != 206 or len(data) != end - begin:
            return None
        source.note(len(data) / max(1e-3, time.monotonic() - began_at))
        return data


if __name__ == "__main__":
    own = RivalNode.of_arguments()
    tree = HttpTree(own)
    obey(own, tree)
    tree.close()
