"""The network of the simulation: access links, connections, and what travels over them.

Each peer's uplink sends frames and messages one after the other, in the order in which they were given to it. Each
downlink receives them one after the other, and begins while they are still being sent. A connection keeps their order;
a lost packet delays the connection by one round trip.
"""

import random
from collections.abc import Callable

from echo2d.core.base.ids import (
    FRAME_INDEX_BITS,
    FRAME_INDEX_MAX,
    FormId,
    FrameId,
    PeerId,
    SegmentId,
    is_table,
)
from echo2d.core.protocol.control_messages import Address, EdgePeer
from echo2d.core.relay.events import (
    FrameRejected,
    FrameVerified,
    LinkDown,
    LinkUp,
    PeerReady,
    RelayEvent,
    RepairRefused,
    RepairVerified,
    SendFrame,
    TableHeld,
)
from echo2d.core.relay.frame_set import FrameSet
from echo2d.core.relay.relay import Relay
from echo2d.core.topology.link_meters import LinkMeter
from echo2d.core.topology.plan import PeerFacts
from echo2d.plan.kernel.scenario import TABLE_ROW_BYTES, PeerSpec
from echo2d.plan.kernel.virtual_clock import Clock

FORM = FormId("f" * 32)
# If both ends of a link have the same rate, rounding must not make the link look busy.
TIME_EPSILON_S = 1e-9


class ConnectionPipe:
    """One direction of a connection."""

    __slots__ = (
        "dead",
        "ended",
        "in_order",
        "last_start",
        "latency",
        "meter",
        "ready",
        "repairs",
        "source",
        "target",
        "unsaid",
    )

    def __init__(self, source: "Node", target: "Node") -> None:
        self.source = source
        self.target = target
        self.latency = source.spec.latency_s + target.spec.latency_s
        self.dead = False
        self.in_order = 0.0  # time of the last arrival; nothing that is sent later arrives earlier
        self.last_start = 0.0  # time at which the last frame begins to leave
        self.meter = LinkMeter()  # what the target measures
        self.unsaid = False  # whether frames were given since the last PeerReady
        self.repairs: set[int] = set()  # repair streams that the target opened
        self.ended: set[int] = set()  # streams that the target has ended, whose frames it drops
        self.ready = PeerReady(target.peer)


class Node:
    """A peer: its access link, its process (`relay`; None: not running) and what is on its disk.

    boots: how often the process was started. facts: what the planner knows about the peer.
    """

    def __init__(self, number: int, spec: PeerSpec) -> None:
        self.number = number
        self.spec = spec
        self.peer = PeerId(f"{number:032x}")
        address = Address(f"peer-{number}", 1) if spec.reachable else None
        self.facts = PeerFacts(
            self.peer, spec.uplink, spec.downlink, address, latency_s=spec.latency_s
        )
        self.relay: Relay | None = None
        self.disk: FrameSet | None = None
        self.boots = 0
        self.expected: dict[PeerId, EdgePeer] = {}
        self.ways: dict[PeerId, ConnectionPipe] = {}
        self.alarm: float | None = None
        self.up_free = 0.0
        self.up_s = 1 / spec.uplink
        self.down_free = 0.0
        self.down_s = 1 / spec.downlink
        self.sent_bytes = 0
        self.sent_frames = 0
        self.arrived_s: float | None = None

    def kept(self, segment: int) -> tuple[FrameId, ...]:
        """The frames of this segment on disk, the table first; empty if the table is missing."""
        if self.disk is None or not self.disk.holds(FrameId(segment << FRAME_INDEX_BITS)):
            return ()
        return tuple(
            frame for frame in sorted(self.disk.arrivals) if frame >> FRAME_INDEX_BITS == segment
        )

    def note_ended(self, by: PeerId, stream: int) -> None:
        """Record that `by` has ended this stream: `by` drops the frames that still arrive on it."""
        if by in self.ways:
            self.ways[by].ended.add(stream)

    def note_repair(self, by: PeerId, stream: int) -> None:
        """Record that `by` has opened this stream for repairs: the stream carries single frames."""
        if by in self.ways:
            self.ways[by].repairs.add(stream)


class SimNetwork:
    """Connections between nodes. deliver(node, event) is called with each event at a node."""

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        segments: tuple[tuple[int, ...], ...],
        deliver: Callable[[Node, RelayEvent], None],
    ) -> None:
        self._clock = clock
        self._random = chance
        self._segments = segments
        self._deliver_to = deliver
        self._ready: list[ConnectionPipe] = []

    def say_ready(self) -> None:
        """Call this after the actions of a relay. Every connection that still has room then reports that."""
        while self._ready:
            self._say_ready(self._ready.pop())

    def send_frame(self, node: Node, action: SendFrame) -> None:
        """Give the frame to the node's connection, if there is one."""
        way = node.ways.get(action.peer)
        if way is None or way.dead:
            return
        size = 16  # the head of a frame
        if not action.header_only:
            size += self._frame_bytes(action.frame)
            node.sent_bytes += size
            node.sent_frames += 1
        now = self._clock.now
        way.last_start = max(now, node.up_free)
        if not way.unsaid:
            way.unsaid = True
            self._ready.append(way)
        every = node.spec.corrupts_every
        bad = not action.header_only and every > 0 and node.sent_frames % every == 0
        self._transmit(
            way,
            size,
            FrameRejected(node.peer, action.stream, FORM, action.frame) if bad else action,
        )

    def _say_ready(self, way: ConnectionPipe) -> None:
        """Allow the source to give more frames once the last given frame has begun to leave."""
        if way.dead:
            return
        if way.last_start > self._clock.now + TIME_EPSILON_S:
            self._clock.at(way.last_start, self._say_ready, way)
        else:
            way.unsaid = False
            self._deliver_to(way.source, way.ready)

    def send(self, node: Node, peer: PeerId, event: RelayEvent, items: int = 0) -> None:
        """Give a message to the node's connection, if there is one. The peer handles the message as this event."""
        way = node.ways.get(peer)
        if way is not None and not way.dead:
            # A small message takes about 64 bytes, and 4 more for each frame that it names.
            self._transmit(way, 64 + 4 * items, event)

    def _transmit(self, way: ConnectionPipe, size: int, what: SendFrame | RelayEvent) -> None:
        """Send `what` through the uplink and then through the network. It arrives after everything that was sent on
        this connection before.
        """
        source = way.source
        source.up_free = max(self._clock.now, source.up_free) + size * source.up_s
        at = source.up_free + way.latency
        loss = way.target.spec.loss
        if loss and self._random.random() < 1 - (1 - loss) ** (1 + size // 1448):
            at += 2 * way.latency
        way.in_order = at = max(at, way.in_order)
        self._clock.at(at, self._arrive, way, size, what)

    def _arrive(self, way: ConnectionPipe, size: int, what: SendFrame | RelayEvent) -> None:
        """The last byte has reached the target's downlink, which receives at its own rate."""
        if way.dead:
            return
        target = way.target
        done = target.down_free + size * target.down_s
        if done > self._clock.now + TIME_EPSILON_S:
            target.down_free = done
            self._clock.at(done, self._deliver, way, what)
        else:
            target.down_free = self._clock.now
            self._deliver(way, what)

    def _deliver(self, way: ConnectionPipe, what: SendFrame | RelayEvent) -> None:
        if way.dead:
            return
        if isinstance(what, SendFrame | FrameRejected) and what.stream in way.ended:
            return
        if isinstance(what, SendFrame):
            self._deliver_frame(way, what)
        else:
            self._deliver_to(way.target, what)

    def _deliver_frame(self, way: ConnectionPipe, sent: SendFrame) -> None:
        """The target verifies the frame and stores it; a table names the segment's frames."""
        target, source, frame = way.target, way.source.peer, sent.frame
        if not sent.header_only:
            way.meter.count(self._frame_bytes(frame), self._clock.now)
        if is_table(frame) and not sent.header_only:
            segment = frame >> FRAME_INDEX_BITS
            self._deliver_to(target, TableHeld(FORM, SegmentId(segment), self._segments[segment]))
        if sent.stream not in way.repairs:
            self._deliver_to(
                target,
                FrameVerified(source, sent.stream, FORM, frame, sent.sequence, sent.header_only),
            )
        elif sent.header_only:
            self._deliver_to(target, RepairRefused(source, FORM, frame))
        else:
            self._deliver_to(target, RepairVerified(source, FORM, frame))

    def _frame_bytes(self, frame: FrameId) -> int:
        sizes = self._segments[frame >> FRAME_INDEX_BITS]
        index = frame & FRAME_INDEX_MAX
        return sizes[index - 1] if index else TABLE_ROW_BYTES * (1 + len(sizes))

    def connect(self, one: Node, other: Node) -> None:
        """Open a connection a moment later, if both ends still want it then."""
        if self._agree(one, other):
            trip = one.spec.latency_s + other.spec.latency_s
            # A link is open at both ends after three one-way trips.
            self._clock.after(3 * trip, self._open, one, other, one.boots, other.boots)

    def _agree(self, one: Node, other: Node) -> bool:
        """Whether each node expects the other, by the same secret, and one of them dials."""
        mine, theirs = one.expected.get(other.peer), other.expected.get(one.peer)
        if one.relay is None or other.relay is None or mine is None or theirs is None:
            return False
        return mine.secret == theirs.secret and (mine.dial or theirs.dial)

    def _open(self, one: Node, other: Node, *boots: int) -> None:
        if boots != (one.boots, other.boots) or not self._agree(one, other):
            return
        for node, peer in ((one, other.peer), (other, one.peer)):
            if peer in node.ways and not node.ways[peer].dead:
                return
        for node, peer in ((one, other.peer), (other, one.peer)):
            if peer in node.ways:
                self.drop(node, node.ways[peer])
        one.ways[other.peer] = ConnectionPipe(one, other)
        other.ways[one.peer] = ConnectionPipe(other, one)
        self._deliver_to(one, LinkUp(other.peer))
        self._deliver_to(other, LinkUp(one.peer))

    def disconnect(self, node: Node, other: Node) -> None:
        """Close the connection; the other end notices one trip later."""
        way = node.ways.get(other.peer)
        if way is not None and not way.dead:
            back = other.ways[node.peer]
            way.dead = back.dead = True
            self._clock.after(0.0, self.drop, node, way)
            self._clock.after(way.latency, self.drop, other, back)

    def drop(self, node: Node, way: ConnectionPipe) -> None:
        """Let the node notice that this connection is gone, unless it already has."""
        if node.ways.get(way.target.peer) is way:
            del node.ways[way.target.peer]
            self._deliver_to(node, LinkDown(way.target.peer, "closed"))
