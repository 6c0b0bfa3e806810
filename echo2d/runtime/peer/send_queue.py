"""The send queue of one link: takes frames from memory or disk, and sends them in order.

A queue belongs to one connection and ends with it. When the link has taken all frames, the queue reports
PeerReady, and the relay gives it more. So the relay chooses frames late, and only a few wait. Frames
that are in memory are sent at once, without another task.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from echo2d.core.base.ids import FormId, FrameId, PeerId
from echo2d.core.protocol.peer_messages import StreamEnded
from echo2d.core.relay import events as relay_events
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.net.peer.links import PeerLinks

log = logging.getLogger("echo2d.peer")


class FrameSource(Protocol):
    """Gives the payload of held frames."""

    def in_memory(self, form: FormId, frame: FrameId) -> memoryview | None: ...

    def load(self, form: FormId, frame: FrameId) -> Awaitable[memoryview]: ...


class SendQueue:
    """emit: takes relay events. sent: takes a form, and how many payload bytes of it were sent."""

    def __init__(
        self,
        peer: PeerId,
        links: PeerLinks,
        *,
        holdings: FrameSource,
        emit: Callable[[relay_events.RelayEvent], None],
        sent: Callable[[FormId, int], None],
    ) -> None:
        self._peer, self._links = peer, links
        self._holdings, self._emit, self._sent = holdings, emit, sent
        self._queue: deque[relay_events.SendFrame | relay_events.Tell] = (
            deque()
        )  # bounded by the relay's flow control
        self._loaded: memoryview | None = None  # the payload of the frame at the front
        self._needed = asyncio.Event()  # set while that payload must be loaded
        self._given = False  # whether a frame was put since the last PeerReady

    def put(self, action: relay_events.SendFrame | relay_events.Tell) -> None:
        self._queue.append(action)
        self._given |= isinstance(action, relay_events.SendFrame)
        self._send_waiting()

    def room(self) -> None:
        """Send more: the link has room for a frame again."""
        self._send_waiting()

    async def run(self) -> None:
        """Load frames that are not in memory, until cancelled."""
        while True:
            await self._needed.wait()
            action = self._queue[0]
            assert isinstance(action, relay_events.SendFrame)
            try:
                self._loaded = await self._holdings.load(action.form, action.frame)
            except (IntegrityFault, StoreFault) as fault:
                self._queue.popleft()
                log.warning(
                    "frame lost form=%s frame=%d reason=%s", action.form, action.frame, fault
                )
                self._links.tell(self._peer, StreamEnded(action.stream, "frame lost"))
                ended = StreamEnded(action.stream, "frame lost here")
                self._emit(relay_events.Heard(self._peer, ended))
            self._needed.clear()
            self._send_waiting()

    def _send_waiting(self) -> None:
        while self._queue and not self._needed.is_set():
            action = self._queue[0]
            if isinstance(action, relay_events.Tell):
                self._links.tell(self._peer, action.message)
            elif not self._send(action):
                return
            self._queue.popleft()
        if not self._queue and self._given and self._links.can_send(self._peer):
            self._given = False
            self._emit(relay_events.PeerReady(self._peer))

    def _send(self, action: relay_events.SendFrame) -> bool:
        """Send a frame. False: not yet, because it must be loaded first or the link has no room."""
        payload = None
        if not action.header_only:
            payload = self._loaded or self._holdings.in_memory(action.form, action.frame)
            if payload is None:
                self._needed.set()
                return False
        if not self._links.can_send(self._peer):
            return False
        self._loaded = None
        if (
            self._links.send_frame(
                self._peer, action.stream, action.frame, action.sequence, payload
            )
            and payload
        ):
            self._sent(action.form, len(payload))
        return True
