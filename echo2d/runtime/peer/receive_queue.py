"""The receive queue of one link: frames wait here until they are verified, stored and reported.

Events of one stream are reported in the order in which its frames arrived, and a frame is reported as
verified only if it verifies. A frame whose digest is not signed yet waits, because the root may arrive
over another connection; if this end has ended the stream, the frame is dropped. While much waits, the
link is not read. A queue belongs to one connection: frames that verify after the connection is closed are
reported as found.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import FormId, FrameId, PeerId, is_table, segment_of
from echo2d.core.protocol.peer_messages import FrameReceived, StreamEnded
from echo2d.core.relay import events as relay_events
from echo2d.core.topology.link_meters import LinkMeter
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.net.peer.links import PeerLinks
from echo2d.runtime.peer.frame_holdings import FrameHoldings

# When this much payload waits to be verified, the link is not read until half of it has been handled.
WAITING_BYTES_MAX = 4 << 20
# This much is verified and stored at a time: a change of threads costs as much as hashing 256 KiB.
_BATCH_BYTES_MAX = 2 << 20
# A frame that cannot be verified after this time is dropped, because other frames wait behind it.
ROOT_WAIT_S = 10.0

log = logging.getLogger("echo2d.peer")


class ReceiveQueue:
    """stripes: streams that this end opened for stripes; its other streams are for repair."""

    def __init__(
        self,
        peer: PeerId,
        links: PeerLinks,
        holdings: FrameHoldings,
        *,
        emit: Callable[[relay_events.RelayEvent], None],
    ) -> None:
        self._peer, self._links, self._holdings = peer, links, holdings
        self._emit = emit
        self._queue: deque[FrameReceived | StreamEnded] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._changed = asyncio.Event()
        self._closed = False
        self.stripes: set[int] = set()
        # The newest streams that this end has ended.
        self._ended: dict[int, None] = {}
        self.meter = LinkMeter()

    def put(self, event: FrameReceived | StreamEnded, *, now: float) -> None:
        payload = event.payload if isinstance(event, FrameReceived) else None
        if payload is not None:
            self.meter.count(payload.nbytes, now)
        if not self._queue and self._take_at_once(event):
            return
        self._queue.append(event)
        if payload is not None:
            self._waiting_bytes += payload.nbytes
        if self._waiting_bytes > WAITING_BYTES_MAX and not self._paused:
            self._paused = True
            self._links.pause(self._peer)
        self._changed.set()

    def end(self, stream: int) -> None:
        """Record that this end has ended the stream: frames that still arrive on it do not wait for a root."""
        self._ended[stream] = None
        # Remember 256 streams: the number of a stream is used again only after many more.
        keep_newest(self._ended, 256)
        self._holdings.ring()

    def close(self) -> None:
        """Record that the connection is closed; frames that arrived over it are still verified and kept."""
        self._closed = True
        self._changed.set()

    async def run(self) -> None:
        """Handle frames until the connection is closed and nothing waits."""
        while self._queue or not self._closed:
            if self._queue:
                await self._take()
            else:
                self._changed.clear()
                await self._changed.wait()

    def _take_at_once(self, event: FrameReceived | StreamEnded) -> bool:
        """Handle an event that needs no waiting: a stream's end, a header only, a short frame.

        False: the event is none of these.
        """
        if isinstance(event, StreamEnded):
            self._report(relay_events.Heard(self._peer, event))
        elif event.payload is None:
            self._on_empty(event)
        elif self._holdings.takes_at_once(event.form, event.frame, event.payload.nbytes):
            good = self._holdings.put_at_once(event.form, event.frame, event.payload)
            self._verified(event) if good else self._rejected(event)
        else:
            return False
        return True

    async def _take(self) -> None:
        """Handle the events at the front that can be handled together."""
        first = self._queue[0]
        if isinstance(first, StreamEnded) or first.payload is None:
            self._take_at_once(first)
            self._done(1)
        elif not await self._wait_until_known(first):
            self._done(1)
        elif is_table(first.frame):
            await self._on_table(first, bytes(first.payload))
        else:
            await self._on_payloads(first.form)

    def _on_empty(self, frame: FrameReceived) -> None:
        if frame.stream in self.stripes:
            self._verified(frame)
        else:
            self._report(relay_events.RepairRefused(self._peer, frame.form, frame.frame))

    async def _wait_until_known(self, frame: FrameReceived) -> bool:
        """Wait until the frame can be verified. False: it must be dropped."""
        try:
            async with asyncio.timeout(ROOT_WAIT_S):
                while not self._holdings.knows(frame.form, frame.frame):
                    if self._holdings.dropped(frame.form) or frame.stream in self._ended:
                        return False
                    await self._holdings.changed()
        except TimeoutError:
            lacking = "root" if self._holdings.index(frame.form) is None else "table"
            reason = f"no {lacking} names frames that arrived {ROOT_WAIT_S:.0f} s ago"
            log.warning("frames dropped form=%s peer=%s: %s", frame.form, self._peer, reason)
            if lacking == "root":
                self._holdings.drop(frame.form)
            else:
                self._holdings.give_up(frame.form, reason)
            return False
        return True

    async def _on_table(self, frame: FrameReceived, data: bytes) -> None:
        try:
            await self._holdings.put_table(frame.form, segment_of(frame.frame), data)
        except IntegrityFault:
            self._rejected(frame)
        except StoreFault as fault:
            self._holdings.give_up(frame.form, str(fault))
        else:
            self._verified(frame)
        self._done(1)

    async def _on_payloads(self, form: FormId) -> None:
        batch: list[FrameReceived] = []
        payloads: list[tuple[FrameId, memoryview]] = []
        size = 0
        for event in self._queue:
            if not isinstance(event, FrameReceived) or event.form != form or event.payload is None:
                break
            if (
                is_table(event.frame)
                or not self._holdings.knows(form, event.frame)
                or size >= _BATCH_BYTES_MAX
            ):
                break
            batch.append(event)
            payloads.append((event.frame, event.payload))
            size += event.payload.nbytes
        try:
            bad = await self._holdings.put_frames(form, payloads)
        except StoreFault as fault:
            self._holdings.give_up(form, str(fault))
        else:
            for event in batch:
                self._rejected(event) if event.frame in bad else self._verified(event)
        self._done(len(batch))

    def _verified(self, frame: FrameReceived) -> None:
        if self._closed:
            if frame.payload is not None:
                self._emit(relay_events.FramesFound(frame.form, (frame.frame,)))
        elif frame.stream in self.stripes:
            header_only = frame.payload is None
            self._emit(
                relay_events.FrameVerified(
                    self._peer, frame.stream, frame.form, frame.frame, frame.sequence, header_only
                )
            )
        else:
            self._emit(relay_events.RepairVerified(self._peer, frame.form, frame.frame))

    def _rejected(self, frame: FrameReceived) -> None:
        self._report(relay_events.FrameRejected(self._peer, frame.stream, frame.form, frame.frame))

    def _report(self, event: relay_events.RelayEvent) -> None:
        if not self._closed:
            self._emit(event)

    def _done(self, count: int) -> None:
        for _ in range(count):
            event = self._queue.popleft()
            if isinstance(event, FrameReceived) and event.payload is not None:
                self._waiting_bytes -= event.payload.nbytes
        if self._paused and self._waiting_bytes <= WAITING_BYTES_MAX // 2 and not self._closed:
            self._paused = False
            self._links.resume(self._peer)
