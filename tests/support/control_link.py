"""A worker without an engine on a real control link: it sends the messages that the test chooses."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.protocol.control_messages import Heartbeat, Hello, ToPeer, Welcome
from echo2d.net.control.client import Identity, enrol
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.this_build import THIS_BUILD
from tests.support import hello

# The first hello of a worker, which knows neither the run nor an address of its own.
HELLO = replace(hello.HELLO, run_id=None, listen=None, build=THIS_BUILD)


class Owner:
    """Owns a link: connects with this hello, and queues what the link reports."""

    def __init__(self, hello: Hello = HELLO) -> None:
        self.heard: asyncio.Queue[ToPeer] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self._hello = hello

    def hello(self) -> Hello:
        return self._hello

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(3)

    async def connected(self, welcome: Welcome) -> None:
        await self.heard.put(welcome)

    async def received(self, message: ToPeer) -> None:
        await self.heard.put(message)

    async def disconnected(self, reason: str) -> None:
        await self.ended.put(reason)

    async def hears(self, kind: type) -> Any:
        """The next message of this kind; messages of other kinds are skipped."""
        while not isinstance(message := await self.heard.get(), kind):
            pass
        return message


def worker_token(
    run_dir: Path, url: str, name: str = "box", *, out: Path | None = None
) -> TokenFile:
    """A token for one worker, in a file. Blocking."""
    path = out or run_dir / f"{name}.token"
    create_token(run_dir, name, role="worker", url=url, out=path, max_workers=1, expires="1h")
    return read_token_file(path)


async def enrolled(run_dir: Path, url: str, name: str = "box") -> Identity:
    """A worker that the coordinator has enrolled."""
    token = await asyncio.to_thread(worker_token, run_dir, url, name)
    identity = Identity.of(url, token, Ed25519PrivateKey.generate())
    await enrol(url, token, identity, rng=random.Random(1), patience_s=1.0)
    return identity
