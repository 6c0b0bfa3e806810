"""A swarm in virtual time: one real `Relay` per peer, a model of the network, and a stand-in for the coordinator.

Network: each peer's uplink sends one thing after the other, in the order in which they were given; each downlink takes
in what arrives in turn, while it is being sent. A connection keeps its order; a lost packet delays it by one round
trip. A peer that dies takes along what was under way to and from it; its disk stays.

The same scenario gives the same trace, bit for bit. Reads no clock. Not here: bytes, hashing, the control link.
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, assert_never

from blake3 import blake3

from echo2d.core.ids import FRAME_INDEX_BITS, FRAME_INDEX_MAX, FormId, FrameId, PeerId, SegmentId, frame_id, is_table
from echo2d.core.messages import Address, EdgePeer
from echo2d.core.relay import Relay
from echo2d.core.relay_io import (
    Accuse,
    Action,
    CancelHeard,
    CloseStream,
    DeadlinePassed,
    Event,
    ExpectPeer,
    ForgetPeer,
    FormArrived,
    FormComplete,
    FramesFound,
    FrameVerified,
    HaveHeard,
    LinkDown,
    LinkUp,
    OpenStream,
    PeerReady,
    PlanReceived,
    RepairRefused,
    RepairVerified,
    ReportEdgeBroken,
    SendCancel,
    SendFrame,
    SendHave,
    SendWant,
    StreamAsked,
    StreamClosed,
    TableHeld,
    WantHeard,
)
from echo2d.core.topology import Job, PeerFacts, edges_for
from echo2d.core.transfer import Transfer
from echo2d.sim.planner import Planner
from echo2d.sim.scenario import TABLE_ROW_BYTES, Fault, PeerSpec, Scenario

FORM = FormId("f" * 32)
HEADER_BYTES = 16
PACKET_BYTES = 1448
MESSAGE_BYTES = 64  # about what a small message takes
HANDSHAKE_TRIPS = 3  # one-way trips until a link is open at both ends
CHECK_EVERY = 1000  # events between two checks of a relay
DECIDE_S = 0.6  # the coordinator waits so long for more reports of broken edges
TIME_EPSILON_S = 1e-9  # rounding must not make a link look busy that keeps pace exactly

_STAMP = struct.Struct("<dHHI")
_KINDS = {kind: number for number, kind in enumerate(Event.__args__)}


class StuckError(AssertionError):
    """Somebody who is alive did not get everything in time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """t_verify_s: until the last peer that was there from the start, and is still there, held everything.

    arrived_s: when each peer held everything. seed_copies: payload that the seed sent, in forms. duplicates: payload
    frames received twice. trace: digest of everything that happened, in order.
    """

    t_verify_s: float
    bound_s: float
    predicted_s: float
    arrived_s: dict[int, float]
    seed_copies: float
    duplicates: int
    events: int
    generations: int
    trace: str

    @property
    def ratio(self) -> float:
        return self.t_verify_s / self.bound_s


class _Way:
    """One direction of a connection.

    in_order: nothing given later arrives before. last_start: when the last frame given begins to leave.
    unsaid: frames were given since the last PeerReady. repairs: repair streams that the target opened.
    ended: streams that the target has ended, whose frames it drops.
    """

    __slots__ = ("dead", "ended", "in_order", "last_start", "latency", "ready", "repairs", "source", "target", "unsaid")

    def __init__(self, source: "_Node", target: "_Node") -> None:
        self.source = source
        self.target = target
        self.latency = source.spec.latency_s + target.spec.latency_s
        self.dead = False
        self.in_order = 0.0
        self.last_start = 0.0
        self.unsaid = False
        self.repairs: set[int] = set()
        self.ended: set[int] = set()
        self.ready = PeerReady(target.peer)


class _Node:
    """A peer: its access link, its process (None: not running) and what is on its disk. boots: starts so far."""

    def __init__(self, number: int, spec: PeerSpec) -> None:
        self.number = number
        self.spec = spec
        self.peer = PeerId(f"{number:032x}")
        address = Address(f"peer-{number}", 1) if spec.reachable else None
        self.facts = PeerFacts(self.peer, spec.uplink, spec.downlink, address)
        self.relay: Relay | None = None
        self.disk: Transfer | None = None
        self.boots = 0
        self.expected: dict[PeerId, EdgePeer] = {}
        self.ways: dict[PeerId, _Way] = {}
        self.alarm: float | None = None
        self.up_free = 0.0
        self.up_s = 1 / spec.uplink
        self.down_free = 0.0
        self.down_s = 1 / spec.downlink
        self.sent_bytes = 0
        self.arrived_s: float | None = None

    def kept(self, segment: int) -> tuple[FrameId, ...]:
        """The frames of this segment on disk, its table first; none without the table."""
        if self.disk is None or not self.disk.holds(FrameId(segment << FRAME_INDEX_BITS)):
            return ()
        return tuple(frame for frame in sorted(self.disk.arrivals) if frame >> FRAME_INDEX_BITS == segment)

    def note_ended(self, by: PeerId, stream: int) -> None:
        """Frames that still come to `by` on this stream are dropped there."""
        if by in self.ways:
            self.ways[by].ended.add(stream)

    def note_repair(self, by: PeerId, stream: int) -> None:
        """The stream to `by` carries single frames."""
        if by in self.ways:
            self.ways[by].repairs.add(stream)


class World:
    """Plays one scenario. check_every: events between two checks of a relay (all are checked at the end)."""

    def __init__(self, scenario: Scenario, *, check_every: int = CHECK_EVERY) -> None:
        self._scenario = scenario
        self._check_every = check_every
        self._random = random.Random(scenario.rng_seed)
        self._segments = tuple(scenario.segments())
        self._encoded = 0
        self._nodes = [_Node(number, spec) for number, spec in enumerate(scenario.peers)]
        self._by_peer = {node.peer: node for node in self._nodes}
        job = Job(FORM, scenario.wire_bytes, scenario.frame_bytes)
        self._planner = Planner(job, scenario.shape, scenario.chains)
        self._waiting: set[int] = set()  # peers alive without the whole form
        self._to_come = 0  # starts and deaths
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._now = 0.0
        self._events = 0
        self._ready: list[_Way] = []
        self._trace = blake3()

    def run(self) -> Outcome:
        """Until everyone alive holds everything. StuckError, naming the rng_seed, if that does not come."""
        present = [node for node in self._nodes if node.spec.joins_at_s == 0]
        for node in present:
            self._boot(node)
        for node in self._nodes:
            if node.spec.joins_at_s > 0:
                self._to_come += 1
                self._later(node.spec.joins_at_s, self._come, node)
        for fault in self._scenario.faults:
            self._to_come += 1
            self._later(fault.at_s, self._die, self._nodes[fault.peer], fault)
        self._tell(self._planner.start(present[0].facts, [node.facts for node in present[1:]]))
        self._encode(self._nodes[0].boots)
        while self._waiting or self._to_come:
            if not self._heap or self._heap[0][0] > self._scenario.limit_s:
                self._stuck()
            self._now, _, act, arguments = heappop(self._heap)
            act(*arguments)
        return self._outcome()

    def _outcome(self) -> Outcome:
        for node in self._nodes:
            if node.relay is not None:
                node.relay.check()
        plan = self._planner.plan
        assert plan is not None
        arrived = {node.number: node.arrived_s for node in self._nodes[1:] if node.arrived_s is not None}
        counted = [node for node in self._nodes[1:] if node.spec.joins_at_s == 0 and node.relay is not None]
        relays = [node.relay for node in self._nodes if node.relay is not None]
        transfers = [transfer for relay in relays if (transfer := relay.transfer(FORM)) is not None]
        return Outcome(
            t_verify_s=max((arrived[node.number] for node in counted), default=0.0),
            bound_s=plan.bound_s,
            predicted_s=plan.predicted_s,
            arrived_s=arrived,
            seed_copies=self._nodes[0].sent_bytes / self._scenario.wire_bytes,
            duplicates=sum(transfer.duplicates for transfer in transfers),
            events=self._events,
            generations=self._planner.generations,
            trace=self._trace.hexdigest(),
        )

    def _stuck(self) -> None:
        left = ", ".join(map(str, sorted(self._waiting)))
        raise StuckError(
            f"rng_seed={self._scenario.rng_seed}: peers {left} do not hold everything at {self._now:.1f} s"
        )

    # the loop

    def _later(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self._push(self._now + delay, act, *arguments)

    def _push(self, at: float, act: Callable[..., None], *arguments: Any) -> None:
        self._pushed += 1
        heappush(self._heap, (at, self._pushed, act, arguments))

    def _feed(self, node: _Node, event: Event) -> None:
        """Lets the relay handle the event, and after it the PeerReady events that its frames bring about at once."""
        self._handle(node, event)
        while self._ready:
            self._say_ready(self._ready.pop())

    def _handle(self, node: _Node, event: Event) -> None:
        relay = node.relay
        if relay is None:
            return
        actions = relay.handle(event, now=self._now)
        self._events += 1
        self._trace.update(_STAMP.pack(self._now, node.number, _KINDS[type(event)], len(actions)))
        for action in actions:
            self._perform(node, action)
        self._set_alarm(node, relay)
        if self._events % self._check_every == 0:
            self._check_one()

    def _check_one(self) -> None:
        relay = self._nodes[self._events // self._check_every % len(self._nodes)].relay
        if relay is not None:
            relay.check()

    def _set_alarm(self, node: _Node, relay: Relay) -> None:
        wake_at = relay.wake_at()
        if wake_at != node.alarm:
            node.alarm = wake_at
            if wake_at is not None:
                self._push(wake_at, self._ring, node, relay, wake_at)

    def _ring(self, node: _Node, relay: Relay, alarm: float) -> None:
        if node.relay is relay and node.alarm == alarm:
            self._feed(node, DeadlinePassed())

    def _perform(self, node: _Node, action: Action) -> None:
        match action:
            case SendFrame():
                self._send_frame(node, action)
            case OpenStream(peer, stream, form, plan, generation, stripe, sequence):
                asked = StreamAsked(node.peer, stream, form, plan, generation, stripe, sequence)
                self._send(node, peer, MESSAGE_BYTES, asked)
            case CloseStream(peer, stream, reason):
                self._by_peer[peer].note_ended(node.peer, stream)
                self._send(node, peer, MESSAGE_BYTES, StreamClosed(node.peer, stream, reason))
            case SendHave(peer, form, frames):
                self._send(node, peer, MESSAGE_BYTES + 4 * len(frames), HaveHeard(node.peer, form, frames))
            case SendWant(peer, stream, form, frames):
                self._by_peer[peer].note_repair(node.peer, stream)
                self._send(node, peer, MESSAGE_BYTES + 4 * len(frames), WantHeard(node.peer, stream, form, frames))
            case SendCancel(peer, form, frames):
                self._send(node, peer, MESSAGE_BYTES + 4 * len(frames), CancelHeard(node.peer, form, frames))
            case ExpectPeer(edge):
                node.expected[edge.peer] = edge
                self._connect(node, self._by_peer[edge.peer])
            case ForgetPeer(peer):
                del node.expected[peer]
                self._disconnect(node, self._by_peer[peer])
            case ReportEdgeBroken():
                self._later(self._control_s(node), self._reported, node.peer, action)
            case FormArrived():
                self._waiting.discard(node.number)
                node.arrived_s = self._now if node.arrived_s is None else node.arrived_s
            case Accuse():
                raise AssertionError("nobody sends wrong frames here")
            case _:
                assert_never(action)

    # the network

    def _send_frame(self, node: _Node, action: SendFrame) -> None:
        way = node.ways.get(action.peer)
        if way is None or way.dead:
            return
        size = HEADER_BYTES
        if not action.header_only:
            size += self._frame_bytes(action.frame)
            node.sent_bytes += size
        way.last_start = max(self._now, node.up_free)
        if not way.unsaid:
            way.unsaid = True
            self._ready.append(way)
        self._transmit(way, size, action)

    def _say_ready(self, way: _Way) -> None:
        """The last frame given has begun to leave, or will: only then the source may give more."""
        if way.dead:
            return
        if way.last_start > self._now + TIME_EPSILON_S:
            self._push(way.last_start, self._say_ready_alone, way)
        else:
            way.unsaid = False
            self._handle(way.source, way.ready)

    def _say_ready_alone(self, way: _Way) -> None:
        self._say_ready(way)
        while self._ready:
            self._say_ready(self._ready.pop())

    def _send(self, node: _Node, peer: PeerId, size: int, event: Event) -> None:
        way = node.ways.get(peer)
        if way is not None and not way.dead:
            self._transmit(way, size, event)

    def _transmit(self, way: _Way, size: int, what: SendFrame | Event) -> None:
        """The uplink's turn comes, then the way through the network; in order with what went this way before."""
        source = way.source
        source.up_free = max(self._now, source.up_free) + size * source.up_s
        at = source.up_free + way.latency
        loss = way.target.spec.loss
        if loss and self._random.random() < 1 - (1 - loss) ** (1 + size // PACKET_BYTES):
            at += 2 * way.latency
        way.in_order = at = max(at, way.in_order)
        self._push(at, self._arrive, way, size, what)

    def _arrive(self, way: _Way, size: int, what: SendFrame | Event) -> None:
        """The last byte is at the target's downlink, which takes it in at its own rate."""
        target = way.target
        done = target.down_free + size * target.down_s
        if done > self._now + TIME_EPSILON_S:
            target.down_free = done
            self._push(done, self._deliver, way, what)
        else:
            target.down_free = self._now
            self._deliver(way, what)

    def _deliver(self, way: _Way, what: SendFrame | Event) -> None:
        if way.dead:
            return
        if not isinstance(what, SendFrame):
            self._feed(way.target, what)
        elif what.stream not in way.ended:
            self._deliver_frame(way, what)

    def _deliver_frame(self, way: _Way, sent: SendFrame) -> None:
        """The target verifies the frame and stores it; a table tells it of the segment's frames."""
        target, source, frame = way.target, way.source.peer, sent.frame
        if is_table(frame) and not sent.header_only:
            segment = frame >> FRAME_INDEX_BITS
            self._feed(target, TableHeld(FORM, SegmentId(segment), self._segments[segment]))
        if sent.stream not in way.repairs:
            self._feed(target, FrameVerified(source, sent.stream, FORM, frame, sent.sequence, sent.header_only))
        elif sent.header_only:
            self._feed(target, RepairRefused(source, FORM, frame))
        else:
            self._feed(target, RepairVerified(source, FORM, frame))

    def _frame_bytes(self, frame: FrameId) -> int:
        sizes = self._segments[frame >> FRAME_INDEX_BITS]
        index = frame & FRAME_INDEX_MAX
        return sizes[index - 1] if index else TABLE_ROW_BYTES * (1 + len(sizes))

    # connections

    def _connect(self, one: _Node, other: _Node) -> None:
        if self._agree(one, other):
            trip = one.spec.latency_s + other.spec.latency_s
            self._later(HANDSHAKE_TRIPS * trip, self._open, one, other, one.boots, other.boots)

    def _agree(self, one: _Node, other: _Node) -> bool:
        """Whether each expects the other, by the same secret, and somebody dials."""
        mine, theirs = one.expected.get(other.peer), other.expected.get(one.peer)
        if one.relay is None or other.relay is None or mine is None or theirs is None:
            return False
        return mine.secret == theirs.secret and (mine.dial or theirs.dial)

    def _open(self, one: _Node, other: _Node, *boots: int) -> None:
        if boots != (one.boots, other.boots) or not self._agree(one, other):
            return
        for node, peer in ((one, other.peer), (other, one.peer)):
            if peer in node.ways and not node.ways[peer].dead:
                return
        for node, peer in ((one, other.peer), (other, one.peer)):
            if peer in node.ways:
                self._drop(node, node.ways[peer])
        one.ways[other.peer] = _Way(one, other)
        other.ways[one.peer] = _Way(other, one)
        self._feed(one, LinkUp(other.peer))
        self._feed(other, LinkUp(one.peer))

    def _disconnect(self, node: _Node, other: _Node) -> None:
        """Closes the connection; the other end sees it one trip later."""
        way = node.ways.get(other.peer)
        if way is not None and not way.dead:
            back = other.ways[node.peer]
            way.dead = back.dead = True
            self._later(0.0, self._drop, node, way)
            self._later(way.latency, self._drop, other, back)

    def _drop(self, node: _Node, way: _Way) -> None:
        if node.ways.get(way.target.peer) is way:
            del node.ways[way.target.peer]
            self._feed(node, LinkDown(way.target.peer, "closed"))

    # lives

    def _boot(self, node: _Node) -> None:
        """The process starts, and finds its disk as it was."""
        node.boots += 1
        node.relay = Relay(node.peer)
        if node.number:
            self._waiting.add(node.number)
        for segment, sizes in enumerate(self._segments):
            frames = node.kept(segment)
            if frames:
                self._feed(node, TableHeld(FORM, SegmentId(segment), sizes))
                self._feed(node, FramesFound(FORM, frames[1:]))
        if self._encoded == len(self._segments):
            self._hear_later(node, FormComplete(FORM, self._encoded))

    def _come(self, node: _Node) -> None:
        """The process starts, and the coordinator takes it in."""
        self._to_come -= 1
        self._boot(node)
        if node.number == 0:
            others = [other.facts for other in self._nodes[1:] if other.relay is not None]
            self._tell(self._planner.start(node.facts, others))
            self._encode(node.boots)
        else:
            self._tell(self._planner.came(node.facts))

    def _die(self, node: _Node, fault: Fault) -> None:
        self._to_come -= 1
        if node.relay is None:
            return  # dead already, or not there yet
        self._kill(node, fault)
        if fault.back_s is not None:
            self._to_come += 1
            self._push(max(self._now, fault.back_s), self._come, node)

    def _kill(self, node: _Node, fault: Fault) -> None:
        assert node.relay is not None
        node.disk = node.relay.transfer(FORM)
        node.relay = node.alarm = None
        self._waiting.discard(node.number)
        for peer, way in node.ways.items():
            way.dead = True
            back = self._by_peer[peer].ways.get(node.peer)
            if back is not None:
                back.dead = True
                if not fault.silent:
                    self._later(self._scenario.detect_s, self._drop, back.source, back)
        node.ways = {}
        node.expected = {}
        noticed = self._scenario.silence_s if fault.silent else self._scenario.detect_s
        if node.number:
            self._later(noticed, self._gone, node, node.boots)

    def _encode(self, boots: int) -> None:
        """The seed's next segments are ready: all at once, or one after the other while the seed lives."""
        seed = self._nodes[0]
        while boots == seed.boots and seed.relay is not None and self._encoded < len(self._segments):
            sizes = self._segments[self._encoded]
            if self._scenario.encode_rate is not None:
                self._later(sum(sizes) / self._scenario.encode_rate, self._encoded_one, boots)
                return
            self._add_segment(seed, sizes)

    def _encoded_one(self, boots: int) -> None:
        seed = self._nodes[0]
        if boots == seed.boots and seed.relay is not None:
            self._add_segment(seed, self._segments[self._encoded])
            self._encode(boots)

    def _add_segment(self, seed: _Node, sizes: tuple[int, ...]) -> None:
        segment = SegmentId(self._encoded)
        self._encoded += 1
        self._feed(seed, TableHeld(FORM, segment, sizes))
        self._feed(seed, FramesFound(FORM, tuple(frame_id(segment, index + 1) for index in range(len(sizes)))))
        if self._encoded == len(self._segments):
            for node in self._nodes:
                self._hear_later(node, FormComplete(FORM, self._encoded))

    # the coordinator

    def _control_s(self, node: _Node) -> float:
        return node.spec.latency_s + self._scenario.peers[0].latency_s

    def _hear_later(self, node: _Node, event: Event) -> None:
        """The coordinator tells this peer, if it is still the same process when that arrives."""
        self._later(self._control_s(node), self._hear, node, node.boots, event)

    def _hear(self, node: _Node, boots: int, event: Event) -> None:
        if node.boots == boots:
            self._feed(node, event)

    def _tell(self, peers: set[PeerId]) -> None:
        plan = self._planner.plan
        assert plan is not None
        for peer in sorted(peers):
            self._hear_later(self._by_peer[peer], PlanReceived(edges_for(plan, peer, self._planner.secret)))

    def _gone(self, node: _Node, boots: int) -> None:
        if node.boots == boots:
            self._tell(self._planner.went(node.peer))

    def _reported(self, reporter: PeerId, report: ReportEdgeBroken) -> None:
        if self._planner.broken(reporter, report):
            self._later(DECIDE_S, self._decide)

    def _decide(self) -> None:
        self._tell(self._planner.decide())
