"""Simulates links between peers. Real relays pass forms of one segment and one frame over them.

A message arrives in order after a drawn time, unless the link breaks before. As on a real link,
frames that arrive after the end of their stream are dropped. Not here: many frames, limited rates and
loss (`echo2d.plan.broadcast`), which would only hide the faults of the run.
"""

import random
from typing import Any, Protocol, assert_never

from echo2d.core.base.ids import FormId, FrameId, PeerId, SegmentId, frame_id, is_table
from echo2d.core.protocol.control_messages import EdgePeer
from echo2d.core.protocol.peer_messages import FramesWanted, StreamEnded
from echo2d.core.relay import events as relay_events
from echo2d.plan.kernel.virtual_clock import Clock

SEGMENT = SegmentId(0)
SIZES = (1000,)  # bytes of each frame of a segment
FRAMES = tuple(frame_id(SEGMENT, index) for index in range(1 + len(SIZES)))
HANDSHAKE_S = 0.2
FRAME_S = (0.01, 0.4)  # smallest and largest time of one hop
# An end notices within this time that a link broke.
NOTICE_S = 1.0


class Relaying(Protocol):
    """A process with a relay: the seed or a worker."""

    peer: PeerId
    up: bool
    boots: int
    blocked_until: float
    closed: bool

    def relayed(self, event: relay_events.RelayEvent) -> None: ...

    def call(self, boot: int, act: Any, *arguments: Any) -> None: ...


class _Way:
    """One direction of a link.

    ended: streams that the target has ended. repairs: streams with single frames.
    """

    def __init__(self, source: Relaying, target: Relaying) -> None:
        self.source, self.target = source, target
        self.boots = (source.boots, target.boots)
        self.in_order = 0.0
        self.dead = False
        self.ended: set[int] = set()
        self.repairs: set[int] = set()


class SimPeerLinks:
    """All links. Blocked peers neither send nor receive; messages under way to them wait."""

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        self._clock = clock
        self._random = chance
        self._peers: dict[PeerId, Relaying] = {}
        self._expected: dict[tuple[PeerId, PeerId], EdgePeer] = {}
        self._ways: dict[tuple[PeerId, PeerId], _Way] = {}
        # (peer, other): the link between them broke, and `peer` does not know it yet.
        self._unnoticed: set[tuple[PeerId, PeerId]] = set()

    def add(self, peer: Relaying) -> None:
        self._peers[peer.peer] = peer

    def perform(self, source: Relaying, action: relay_events.LinkAction) -> None:
        """Perform an action of a peer's relay."""
        me = source.peer
        match action:
            case relay_events.SendFrame():
                self._send_frame(source, action)
            case relay_events.Tell(peer, message):
                back = self._ways.get((peer, me))
                if back is not None and isinstance(message, StreamEnded):
                    back.ended.add(message.stream)
                elif back is not None and isinstance(message, FramesWanted):
                    back.repairs.add(message.stream)
                self._send(me, peer, relay_events.Heard(me, message))
            case relay_events.ExpectPeer(edge):
                self._expected[me, edge.peer] = edge
                self._connect_later(me, edge.peer)
            case relay_events.ForgetPeer(peer):
                self._expected.pop((me, peer), None)
                self._break(me, peer)
            case _:
                assert_never(action)

    def died(self, peer: PeerId) -> None:
        """Break the links of a process that has died."""
        for pair in [pair for pair in self._expected if pair[0] == peer]:
            del self._expected[pair]
        self._unnoticed = {pair for pair in self._unnoticed if pair[0] != peer}
        self.cut(peer)

    def cut(self, peer: PeerId) -> None:
        """Break all links of this peer. Ends that still expect a link dial again."""
        for pair in [pair for pair in self._ways if pair[0] == peer]:
            self._break(*pair)

    # --- inside

    def _send(
        self, me: PeerId, peer: PeerId, event: relay_events.RelayEvent, delay_s: float = 0.02
    ) -> None:
        way = self._ways.get((me, peer))
        if way is not None:
            way.in_order = max(way.in_order, self._clock.now + delay_s)
            self._clock.at(way.in_order, self._arrive, way, event)

    def _send_frame(self, source: Relaying, action: relay_events.SendFrame) -> None:
        way = self._ways.get((source.peer, action.peer))
        if way is not None:
            way.in_order = max(way.in_order, self._clock.now) + self._random.uniform(*FRAME_S)
            self._clock.at(way.in_order, self._arrive, way, action)
            # The line accepts the frame at once.
            self._clock.after(0.0, source.call, way.boots[0], self._room, way)

    def _arrive(self, way: _Way, what: relay_events.RelayEvent | relay_events.SendFrame) -> None:
        blocked_until = max(way.source.blocked_until, way.target.blocked_until)
        if self._clock.now < blocked_until and not way.dead:
            self._clock.at(blocked_until, self._arrive, way, what)
            return
        way.target.call(way.boots[1], self._deliver, way, what)

    def _deliver(self, way: _Way, what: relay_events.RelayEvent | relay_events.SendFrame) -> None:
        if way.dead:
            return
        if not isinstance(what, relay_events.SendFrame):
            way.target.relayed(what)
            return
        if what.stream not in way.ended:
            self._deliver_frame(way, what)

    def _room(self, way: _Way) -> None:
        if not way.dead:
            way.source.relayed(relay_events.PeerReady(way.target.peer))

    def _deliver_frame(self, way: _Way, sent: relay_events.SendFrame) -> None:
        source, form, frame = way.source.peer, sent.form, sent.frame
        if is_table(frame) and not sent.header_only:
            way.target.relayed(relay_events.TableHeld(form, SEGMENT, SIZES))
        if sent.stream not in way.repairs:
            verified = relay_events.FrameVerified(
                source, sent.stream, form, frame, sent.sequence, sent.header_only
            )
            way.target.relayed(verified)
        elif sent.header_only:
            way.target.relayed(relay_events.RepairRefused(source, form, frame))
        else:
            way.target.relayed(relay_events.RepairVerified(source, form, frame))

    def _connect_later(self, one: PeerId, other: PeerId) -> None:
        self._clock.after(HANDSHAKE_S, self._connect, one, other)

    def _connect(self, one: PeerId, other: PeerId) -> None:
        """Connect two peers if both expect each other under one secret and can be reached.

        Otherwise the end that dials tries again later.
        """
        mine, theirs = self._expected.get((one, other)), self._expected.get((other, one))
        if mine is None or (one, other) in self._ways:
            return
        ends = self._peers[one], self._peers[other]
        agreed = theirs is not None and theirs.secret == mine.secret
        closed = self._peers[other if mine.dial else one].closed
        noticed = not self._unnoticed & {(one, other), (other, one)}
        ready = all(end.up and self._clock.now >= end.blocked_until for end in ends)
        if agreed and noticed and ready and not closed:
            for source, target in (ends, ends[::-1]):
                self._ways[source.peer, target.peer] = _Way(source, target)
            for source, target in (ends, ends[::-1]):
                source.call(source.boots, source.relayed, relay_events.LinkUp(target.peer))
        elif mine.dial:
            self._clock.after(self._random.uniform(0.5, 2.0), self._connect, one, other)

    def _break(self, one: PeerId, other: PeerId) -> None:
        for source, target in ((one, other), (other, one)):
            way = self._ways.pop((source, target), None)
            if way is not None:
                way.dead = True
                self._unnoticed.add((source, target))
                self._clock.after(self._random.uniform(0.0, NOTICE_S), self._notice, way)

    def _notice(self, way: _Way) -> None:
        """Tell an end that its link broke. A paused end notices it later, a dead one never."""
        if way.source.up and way.source.boots == way.boots[0]:
            way.source.call(way.boots[0], self._broken, way)
        else:
            self._unnoticed.discard((way.source.peer, way.target.peer))

    def _broken(self, way: _Way) -> None:
        self._unnoticed.discard((way.source.peer, way.target.peer))
        way.source.relayed(relay_events.LinkDown(way.target.peer, "reset"))
        self._connect_later(way.source.peer, way.target.peer)


def held(form: FormId) -> tuple[relay_events.RelayEvent, ...]:
    """Return the events for a relay that has a complete form on its disk."""
    return relay_events.TableHeld(form, SEGMENT, SIZES), relay_events.FramesFound(form, FRAMES[1:])


def whole(frames: set[FrameId]) -> bool:
    return frames.issuperset(FRAMES)
