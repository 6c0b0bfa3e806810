"""A hostile client of the Tinker API, in a process of its own: python -m tests.support.tinker_hostile URL KEY

It says "ready" when it has a model. For each line with a number of seconds it does harm for so long, and prints how
often each kind of call had each status, as JSON. It never asks for a result. The kinds, in turn:

    never polls   a good forward_backward with the next number
    gap           4 MiB under a number that leaves a gap before it
    1 GB          a body that says it has 1 GB; a MiB of it is sent
    wrong data    a good head, and data that are no datum: the learner must read them to see that
    no protobuf   no head either
"""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from echo2d.net.tinker.routes import PREFIX
from echo2d.tinker import messages_pb2 as pb
from tests.support.tinker_http import HttpClient

# So it sends at most 10 MB/s over loopback, and asks for about as many turns as an honest client.
CALLS_PER_S = 10.0
GAP, GAP_BYTES = 1000, 4 << 20
SAID_BYTES, SENT_BYTES_MAX = 1 << 30, 1 << 20
ROW = (list(range(5, 13)), {"target_tokens": np.arange(6, 14), "weights": np.ones(8)})
LONG = pb.TrainingDatum(chunks=[pb.InputChunk(text=pb.Text(tokens=bytes(GAP_BYTES)))])
NO_DATUM = b"\x1a\x02\xff\xff"


class Hostile:
    def __init__(self, client: HttpClient, url: str, key: str) -> None:
        self._client, self._key = client, key
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._far = itertools.count(GAP, 2)
        self._kinds = self._bodies()

    async def attack(self, seconds: float) -> Counter[str]:
        statuses: Counter[str] = Counter()
        ends_at = time.monotonic() + seconds
        while (began_at := time.monotonic()) < ends_at:
            name, body = next(self._kinds)
            status = await (self._huge() if body is None else self._send(body))
            statuses[f"{name} {status}"] += 1
            await asyncio.sleep(max(0.0, began_at + 1.0 / CALLS_PER_S - time.monotonic()))
        return statuses

    def _bodies(self) -> Iterator[tuple[str, bytes | None]]:
        """Kinds and bodies; None: 1 GB."""
        while True:
            yield "never polls", self._client.body([ROW])
            yield "gap", self._call(next(self._far), data=[LONG]).SerializeToString()
            yield "1 GB", None
            number = self._client.numbered()["seq_id"]
            yield "wrong data", self._call(number).SerializeToString() + NO_DATUM
            yield "no protobuf", b"\xff" * 64

    def _call(self, number: int, **more: Any) -> pb.ForwardBackwardCall:
        return pb.ForwardBackwardCall(
            model=self._client.model, number=number, loss="cross_entropy", **more
        )

    async def _send(self, body: bytes) -> int:
        async with self._client._send("forward_backward", body) as answer:
            await answer.read()
            return int(answer.status)

    async def _huge(self) -> int:
        """Send the head of a large body and a part of it, as far as the server lets it come, and read the status."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(
                f"POST {PREFIX}/forward_backward HTTP/1.1\r\nHost: {self._host}\r\nX-API-Key: {self._key}\r\n"
                f"Content-Length: {SAID_BYTES}\r\n\r\n".encode()
            )
            writer.write(bytes(SENT_BYTES_MAX))
            return int((await reader.readline()).split()[1])
        finally:
            writer.transport.abort()


async def main(url: str, key: str) -> None:
    async with aiohttp.ClientSession() as http:
        hostile = Hostile(await HttpClient(http, url, key).open(), url, key)
        print("ready", flush=True)  # noqa: T201 - for the test
        while seconds := await asyncio.to_thread(sys.stdin.readline):
            statuses = await hostile.attack(float(seconds))
            print(json.dumps(statuses), flush=True)  # noqa: T201 - for the test


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
