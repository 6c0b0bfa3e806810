"""What goes out over one link: frames are read from memory or disk and sent as the link has room, in order.

A lane belongs to one connection; with the connection it ends. When it has sent all frames it was given and the link
has room, it says so (PeerReady), and the relay gives it the next few: so frames are bound late and nothing queues up.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from echo2d.core import relay_io
from echo2d.core.ids import FormId, FrameId, PeerId
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.net.peers import PeerLinks

log = logging.getLogger("echo2d.runtime.lanes")


class Lane:
    """`load` gets a held frame; `emit` takes relay events; `sent` is told of payload bytes that went out."""

    def __init__(
        self,
        peer: PeerId,
        links: PeerLinks,
        *,
        load: Callable[[FormId, FrameId], Awaitable[memoryview]],
        emit: Callable[[relay_io.Event], None],
        sent: Callable[[FormId, int], None],
    ) -> None:
        self._peer, self._links = peer, links
        self._load, self._emit, self._sent = load, emit, sent
        self._queue: deque[relay_io.SendFrame | relay_io.CloseStream] = deque()  # bounded by the relay's flow control
        self._changed = asyncio.Event()

    def put(self, action: relay_io.SendFrame | relay_io.CloseStream) -> None:
        self._queue.append(action)
        self._changed.set()

    def room(self) -> None:
        """The link has room for a frame again."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while self._queue:
                await self._perform(self._queue.popleft())
            if self._links.can_send(self._peer):
                self._emit(relay_io.PeerReady(self._peer))
                await self._until(lambda: bool(self._queue))
            else:
                await self._until(lambda: bool(self._queue) or self._links.can_send(self._peer))

    async def _perform(self, action: relay_io.SendFrame | relay_io.CloseStream) -> None:
        if isinstance(action, relay_io.CloseStream):
            self._links.end_stream(self._peer, action.stream, action.reason)
            return
        try:
            payload = None if action.header_only else await self._load(action.form, action.frame)
        except (IntegrityFault, StoreFault) as fault:
            log.warning("frame lost form=%s frame=%d reason=%s", action.form, action.frame, fault)
            self._links.end_stream(self._peer, action.stream, "frame lost")
            self._emit(relay_io.StreamClosed(self._peer, action.stream, "frame lost here"))
            return
        await self._until(lambda: self._links.can_send(self._peer))
        if self._links.send_frame(self._peer, action.stream, action.frame, action.sequence, payload) and payload:
            self._sent(action.form, len(payload))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
