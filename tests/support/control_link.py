"""The owner of a control link, as a test plays it."""

import asyncio

from echo2d.core.protocol.control_messages import Heartbeat, Hello, ToPeer, Welcome


class Owner:
    """Connects with this hello, and queues everything that the link reports."""

    def __init__(self, hello: Hello) -> None:
        self.heard: asyncio.Queue[object] = asyncio.Queue()
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
        await self.heard.put(reason)
