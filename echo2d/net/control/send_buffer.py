"""The sending half of a control link, at both ends: a bounded queue and the task that sends it."""

import asyncio
import contextlib
from typing import Any, Protocol

from echo2d.core.base.codec import MESSAGE_BYTES_MAX

# The leases of all slots of a big worker fit at once. If more waits, the other end is too slow.
QUEUE_BYTES_MAX = 16 * MESSAGE_BYTES_MAX
# Up to this many bytes are sent under one timer, because most messages cost far less than a timer.
_BATCH_BYTES_MAX = 64 << 10
SEND_TIMEOUT_S = 20.0  # one message or batch, when the other end does not read
CLOSE_TIMEOUT_S = 5.0


class Socket(Protocol):
    """What the client's and the server's WebSocket of aiohttp have in common."""

    def send_bytes(self, data: bytes) -> Any: ...

    def close(self) -> Any: ...


class SendBuffer:
    """The queue of messages to send. If it is too full, the link is closed (`slow`)."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queued_bytes = 0
        self.slow = False

    def put(self, data: bytes) -> None:
        if self._queued_bytes + len(data) > QUEUE_BYTES_MAX:
            self.slow = True
            self.finish()
        if not self.slow:
            self._queued_bytes += len(data)
            self._queue.put_nowait(data)

    def finish(self) -> None:
        """Close the link once everything queued so far has been sent."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        """Send until finished, slow or disconnected, then close the socket."""
        with contextlib.suppress(ConnectionError):
            await self._send_all()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.close()

    async def _send_all(self) -> None:
        while not self.slow and (batch := await self._next_batch()):
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    for data in batch:
                        await self._socket.send_bytes(data)
            except TimeoutError:
                self.slow = True
            self._queued_bytes -= sum(map(len, batch))

    async def _next_batch(self) -> list[bytes]:
        """Wait for messages, and take those that wait. An empty batch: `finish` was called."""
        batch: list[bytes] = []
        room = _BATCH_BYTES_MAX
        while room > 0 and not (batch and self._queue.empty()):
            data = await self._queue.get()
            if data is None:
                self._queue.put_nowait(None)  # for the next call
                break
            batch.append(data)
            room -= len(data)
        return batch
