"""The peer links of one process and the forms that it holds: shared by workers and the seed.

    link events --> ReceiveQueue (verify, store) --> relay events --> `emit` --> mailbox --> Relay
    relay actions --> `perform` --> SendQueue (read, send) --> link

The owner hands each relay event to its Relay, calls `noticed` with the event, and then `perform` with
each action of that turn, all without awaiting. So an action is performed on the very connection for
which it was decided. Not here: decisions, signatures, encoding and decoding.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, assert_never

from echo2d.core.base.ids import FormId, PeerId
from echo2d.core.protocol.control_messages import (
    EdgePeer,
    LinkSample,
    TransferReport,
)
from echo2d.core.protocol.peer_messages import (
    FrameReceived,
    FramesHeld,
    FramesWanted,
    LinkEnded,
    LinkEvent,
    LinkOpened,
    StreamEnded,
    StreamOpened,
)
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.busy_meter import BusyMeter
from echo2d.errors import PeerFault, StoreFault
from echo2d.net.control.client import Identity
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.urls import is_loopback
from echo2d.runtime.peer.frame_holdings import FrameHoldings, HoldingsOwner
from echo2d.runtime.peer.receive_queue import ReceiveQueue
from echo2d.runtime.peer.send_queue import SendQueue
from echo2d.store.frames import FrameStore

DIAL_S_MIN = 0.1
# The longest wait between two dials. A peer that comes back is reached within this time.
_DIAL_S_MAX = 5.0

log = logging.getLogger("echo2d.peer")


@dataclass(slots=True)
class _Peer:
    """One connection of a peer. number: 1 for the peer's first connection, and so on."""

    number: int
    receive_queue: ReceiveQueue
    queue: SendQueue
    sending: asyncio.Task[None]


class ReceiverOwner(HoldingsOwner, Protocol):
    """What a `Receiver` needs from the process that owns its links."""

    @property
    def crowded(self) -> bool:
        """Whether too many events wait. Then a link that sends another message is ended."""


class Receiver:
    """Listens, dials, sends and receives while `run` runs.

    no_tls: whether links may leave this host without TLS. busy: the relay's meter. receive_only: the other peers are
    not told which frames are held here, and get none of them. uplink_limit: the most bytes/s of all links together.
    """

    def __init__(
        self,
        identity: Identity,
        store: FrameStore,
        owner: ReceiverOwner,
        *,
        no_tls: bool,
        busy: BusyMeter,
        receive_only: bool = False,
        uplink_limit: float | None = None,
    ) -> None:
        self._me, self._receive_only = identity.peer, receive_only
        self._off_loopback = no_tls or identity.tls is not None
        self._owner, self._emit = owner, owner.emit
        self._busy = busy
        self.holdings = FrameHoldings(store, owner)
        self.links = PeerLinks(
            run_id=identity.run_id,
            me=identity.peer,
            on_event=self._on_link,
            on_ready=self._on_ready,
            tls=identity.tls,
            uplink_limit=uplink_limit,
        )
        self._peers: dict[PeerId, _Peer] = {}
        self._opened: dict[PeerId, int] = {}  # connections so far; a run has some hundred peers
        self._noticed: dict[PeerId, int] = {}  # how many of them the relay knows
        self._dialling: dict[PeerId, asyncio.Task[None]] = {}
        # For each peer that is dialled here: set when the link to it has ended.
        self._lost: dict[PeerId, asyncio.Event] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._sent: dict[FormId, int] = {}
        # The form whose frames were sent or received last. None: there were none since the last report.
        self._moved: FormId | None = None
        # Payload bytes of all forms since the start.
        self.received_bytes, self.sent_bytes = 0, 0

    async def run(self) -> None:
        """Work until cancelled, and then close the links."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.holdings.write_behind())
            try:
                while True:
                    # Report every second: older rates are of no use to the planner.
                    await asyncio.sleep(1.0)
                    self._report()
            finally:
                await self.links.close("shutting down")

    @property
    def link_count(self) -> int:
        return len(self._peers)

    # --- relay

    def noticed(self, event: object) -> None:
        """Record that the relay has handled this event."""
        if isinstance(event, relay_events.LinkUp):
            self._noticed[event.peer] = self._noticed.get(event.peer, 0) + 1

    def blame(self, event: object, fault: PeerFault) -> None:
        """End the link of this event's peer, which broke the protocol. An event without a peer raises the fault."""
        peer = getattr(event, "peer", None)
        if peer is None:
            raise fault
        log.warning("peer dropped peer=%s reason=%s", peer, fault)
        self.links.end(peer, str(fault))

    def perform(self, action: relay_events.LinkAction) -> None:
        """Perform an action of the relay. Call it only after `run` has begun."""
        match action:
            case relay_events.ExpectPeer(edge):
                self._expect(edge)
            case relay_events.ForgetPeer(peer):
                self._stop_dialling(peer)
                self.links.forget(peer)
            case _:
                here = self._peers.get(action.peer)
                if here is not None and here.number == self._noticed.get(action.peer):
                    self._perform_on(here, action)

    def _perform_on(self, here: _Peer, action: relay_events.LinkAction) -> None:
        match action:
            case relay_events.SendFrame():
                here.queue.put(action)
            case relay_events.Tell(peer, StreamEnded(stream)) if not self._is_mine(peer, stream):
                here.queue.put(action)  # after the stream's frames that wait in this queue
            case relay_events.Tell(_, FramesHeld()) if self._receive_only:
                pass
            case relay_events.Tell(peer, message):
                if isinstance(message, StreamOpened):
                    here.receive_queue.stripes.add(message.stream)
                elif isinstance(message, StreamEnded):
                    here.receive_queue.end(message.stream)
                self.links.tell(peer, message)
            case relay_events.ExpectPeer() | relay_events.ForgetPeer():
                raise AssertionError("not an action on a link")
            case _:
                assert_never(action)

    def _is_mine(self, peer: PeerId, stream: int) -> bool:
        """Whether this end opened the stream."""
        return (stream % 2 == 1) == (self._me < peer)

    # --- links

    def _on_link(self, peer: PeerId, event: LinkEvent) -> None:
        if isinstance(event, FrameReceived):
            self._moved = event.form
            self.received_bytes += 0 if event.payload is None else len(event.payload)
            self._peers[peer].receive_queue.put(event, now=asyncio.get_running_loop().time())
            return
        if self._owner.crowded and not isinstance(event, LinkOpened | LinkEnded):
            self.links.end(peer, "sends more than can be handled")
            return
        match event:
            case LinkOpened():
                self._on_opened(peer)
            case LinkEnded(reason):
                self._on_ended(peer, reason)
            case StreamEnded():
                self._peers[peer].receive_queue.put(event, now=asyncio.get_running_loop().time())
            case StreamOpened(stream) | FramesWanted(stream) if self._receive_only:
                self.links.tell(peer, StreamEnded(stream, "receives only"))
            case _:
                self._emit(relay_events.Heard(peer, event))

    def _on_opened(self, peer: PeerId) -> None:
        assert self._tasks is not None
        number = self._opened[peer] = self._opened.get(peer, 0) + 1
        receive_queue = ReceiveQueue(peer, self.links, self.holdings, emit=self._emit)
        queue = SendQueue(
            peer, self.links, holdings=self.holdings, emit=self._emit, sent=self._count_sent
        )
        self._tasks.create_task(receive_queue.run())
        self._peers[peer] = _Peer(
            number, receive_queue, queue, self._tasks.create_task(queue.run())
        )
        self._emit(relay_events.LinkUp(peer))

    def _on_ended(self, peer: PeerId, reason: str) -> None:
        here = self._peers.pop(peer)
        here.receive_queue.close()
        here.sending.cancel()
        if peer in self._lost:
            self._lost[peer].set()
        self._emit(relay_events.LinkDown(peer, reason))

    def _on_ready(self, peer: PeerId) -> None:
        if peer in self._peers:
            self._peers[peer].queue.room()

    # --- dialling

    def _expect(self, edge: EdgePeer) -> None:
        self.links.expect(edge.peer, edge.secret)
        self._stop_dialling(edge.peer)
        if edge.dial and edge.address is not None:
            assert self._tasks is not None
            self._lost[edge.peer] = asyncio.Event()
            self._dialling[edge.peer] = self._tasks.create_task(
                self._dial(edge, self._lost[edge.peer])
            )

    def _stop_dialling(self, peer: PeerId) -> None:
        self._lost.pop(peer, None)
        task = self._dialling.pop(peer, None)
        if task is not None:
            task.cancel()

    async def _dial(self, edge: EdgePeer, lost: asyncio.Event) -> None:
        """Keep a link to the peer until cancelled. Without TLS, dial only loopback, unless --no-tls allows more."""
        assert edge.address is not None
        host, port = edge.address.host, edge.address.port
        if not self._off_loopback and not is_loopback(host):
            log.warning(
                "not dialled peer=%s address=%s: off loopback only with TLS, or --no-tls",
                edge.peer,
                host,
            )
            return
        delay_s = DIAL_S_MIN
        while True:
            try:
                lost.clear()
                await self.links.dial(edge.peer, host, port)
                if edge.peer in self._peers:
                    delay_s = DIAL_S_MIN
                    await lost.wait()
            except PeerFault as fault:
                log.info("dial failed peer=%s reason=%s", edge.peer, fault)
                delay_s = min(2 * delay_s, _DIAL_S_MAX)
            await asyncio.sleep(delay_s)

    # --- deleting forms

    async def forget(self, form: FormId) -> None:
        """Delete a form; its late frames are dropped."""
        self._sent.pop(form, None)
        try:
            await self.holdings.forget(form)
        except StoreFault as fault:
            # The form only takes space, and that does no harm until the space is needed.
            log.warning("form not deleted form=%s reason=%s", form, fault)

    # --- reports

    def _report(self) -> None:
        """Report the progress of the form that moved last, if one has moved since the last report."""
        form, self._moved = self._moved, None
        if form is not None:
            payload_bytes, sent_bytes = self.holdings.payload_bytes(form), self._sent.get(form, 0)
            busy_s = self._busy.take(asyncio.get_running_loop().time())
            self._owner.tell(
                TransferReport(
                    form,
                    payload_bytes,
                    tuple(self._link_samples()),
                    sent_bytes,
                    busy_s,
                    self.holdings.duplicates(form),
                )
            )

    def _link_samples(self) -> Iterator[LinkSample]:
        for peer, here in self._peers.items():
            payload_bytes, seconds = here.receive_queue.meter.take()
            if payload_bytes:
                yield LinkSample(peer, payload_bytes, seconds)

    def _count_sent(self, form: FormId, payload_bytes: int) -> None:
        self._moved = form
        self.sent_bytes += payload_bytes
        self._sent[form] = self._sent.get(form, 0) + payload_bytes
