"""The state of what passes through one peer: links, forms, their stripes, and children's streams.

A stripe's log is its sequence so far: log[n] is the frame with sequence number n. The frame is
held here, or it was lost and will come again. Each child has its own cursor into the log, so that
a slow child never holds up another (I6). At the root of a plan frames are placed late: the root
binds a frame to a stripe when a child of that stripe has caught up and its link has room.

A child with several children tells how far it has passed a stripe on: as far as its median child
was given the stripe, or says so itself. The root binds at most a window ahead of that
(`send_window`). Frames that would wait at a slow relay are thus bound to another stripe, whatever
the planner expected of the relay.
"""

import math
from collections import deque
from collections.abc import Collection

from echo2d.core.base.ids import (
    FRAME_INDEX_BITS,
    FormId,
    FrameId,
    Generation,
    PeerId,
    PlanId,
    SegmentId,
    StripeId,
    frame_id,
    is_table,
)
from echo2d.core.protocol.control_messages import EdgePeer, StripeEdge
from echo2d.core.protocol.peer_messages import (
    FramesPassed,
    StreamEnded,
    StreamOpened,
    stream_after,
)
from echo2d.core.relay.events import DONE, RelayAction, SendFrame, Tell
from echo2d.core.relay.frame_set import FrameSet
from echo2d.core.relay.send_window import PASS_EVERY, PASS_TRICKLE_S, SendWindow
from echo2d.errors import PeerFault

FIRST_TABLE = frame_id(SegmentId(0), 0)
# At the seed one form spreads, older ones drain, and three are for peers that lack its base.
FORMS_MAX = 8
# Frames given to one link ahead of its socket, per child stream. Enough to keep the link busy, and
# few enough that the root binds late.
STREAM_FRAMES_MAX = 4
# A stripe without a window may be ahead of the others by its share of this many bytes of the form.
LEAD_BYTES = 1 << 20
# A stripe of the root stands still when it takes no frame for STILL_S and STILL_GAPS usual gaps.
STILL_S = 0.3
STILL_GAPS = 3.0
# The time between frames that is expected of a new stream. Start-up takes long in a chain.
GAP_START_S = 10.0
# Per frame: the expected gap is about the longest of the last ten.
GAP_DECAY = 0.8


def table_of(frame: FrameId) -> FrameId:
    """The table that holds this frame's digest."""
    return FrameId(frame >> FRAME_INDEX_BITS << FRAME_INDEX_BITS)


class LinkState:
    """An open link: its room, the streams on it, and what the other end has said.

    room: frames that the link still takes. child_streams: stripes that the peer takes from us.
    incoming: stripe streams that we opened. repairs: our repair stream per form.
    wants: (stream, form, frame) that the peer asked for on repair streams.
    has: frames that the peer said it holds. told: how many of a form's arrivals the peer knows of.
    asks: streams that it asked for before the plan came here. heard_at: when it last sent a frame.
    quiet_until: until then it is not asked for repairs.
    """

    __slots__ = (
        "_next_stream",
        "asks",
        "child_streams",
        "has",
        "heard_at",
        "incoming",
        "peer",
        "quiet_until",
        "repairs",
        "room",
        "told",
        "wants",
    )

    def __init__(self, me: PeerId, peer: PeerId) -> None:
        self.peer = peer
        self.room = STREAM_FRAMES_MAX
        self.child_streams: list[ChildStream] = []
        self.incoming: dict[int, StripeState] = {}
        self.repairs: dict[FormId, int] = {}
        self.wants: deque[tuple[int, FormId, FrameId]] = deque()
        self.has: dict[FormId, set[FrameId]] = {}
        self.told: dict[FormId, int] = {}
        self.asks: dict[tuple[FormId, StripeId], StreamOpened] = {}
        self.heard_at = 0.0
        self.quiet_until = 0.0
        self._next_stream = 1 if me < peer else 2

    @property
    def room_max(self) -> int:
        """A peer that takes several stripes from us gets as much of each as other peers do."""
        return STREAM_FRAMES_MAX * max(1, len(self.child_streams))

    def child(self, stream: int) -> "ChildStream | None":
        """The child's stream with this number."""
        return next((child for child in self.child_streams if child.stream == stream), None)

    def new_stream(self) -> int:
        """The number of the next stream that this end opens."""
        number = self._next_stream
        self._next_stream = stream_after(number)
        return number

    def serve(self, out: list[RelayAction]) -> None:
        """Gives the link frames that are ready, one of each stream in turn, while there is room."""
        sent = True
        while sent and self.room > 0:
            sent = False
            for child in self.child_streams:
                if child.ready and self.room > 0:
                    child.send(out)
                    sent = True
        for child in [child for child in self.child_streams if child.stripe.ended]:
            child.close_if_done(out)


class ChildStream:
    """One child's stream of one stripe.

    cursor: the sequence number that it gets next. has: frames that it holds already.
    window: how far it has passed the stripe on, and how much may be bound for it.
    """

    __slots__ = ("cursor", "first", "has", "link", "stream", "stripe", "window")

    def __init__(self, stripe: "StripeState", link: LinkState, stream: int, first: int) -> None:
        self.stripe = stripe
        self.link = link
        self.stream = stream
        self.first = first
        self.cursor = first
        self.window = SendWindow(first)
        self.has = link.has.setdefault(stripe.state.form, set())
        stripe.child_streams[link.peer] = self
        link.child_streams.append(self)

    @property
    def ready(self) -> bool:
        """Whether the frame at the cursor is known and held."""
        stripe = self.stripe
        return (
            self.cursor < len(stripe.log)
            and stripe.log[self.cursor] not in stripe.state.transfer.lost
        )

    @property
    def is_open(self) -> bool:
        """Whether the child may have more: it has passed on enough of what it got."""
        return self.window.limit is None or self.cursor < self.window.limit

    @property
    def reached(self) -> int:
        """The sequence number that the stripe has reached by way of this child."""
        return self.window.said if self.window.heard else self.cursor

    def passed_on(self, sequence: int, now: float) -> None:
        """The child says how far it has passed it on. PeerFault: it did not get that much."""
        if sequence > self.cursor:
            raise PeerFault(
                f"frame number {sequence} of a stripe passed on, where {self.cursor} is next"
            )
        self.window.passed_on(sequence, now)

    def send(self, out: list[RelayAction]) -> None:
        """Gives the frame at the cursor to the link. Only where the link has room."""
        stripe, link, sequence = self.stripe, self.link, self.cursor
        frame = stripe.log[sequence]
        header_only = frame in self.has
        out.append(
            SendFrame(link.peer, self.stream, stripe.state.form, frame, sequence, header_only)
        )
        self.cursor = sequence + 1
        link.room -= 1
        if self.cursor % PASS_EVERY == 0:
            stripe.tell_passed(out)

    def close_if_done(self, out: list[RelayAction]) -> None:
        """Ends the stream if its stripe has ended and the child has all of it."""
        if self.stripe.ended and self.cursor >= len(self.stripe.log):
            self.close(DONE, out)

    def close(self, reason: str, out: list[RelayAction]) -> None:
        out.append(Tell(self.link.peer, StreamEnded(self.stream, reason)))
        self.drop(out)

    def drop(self, out: list[RelayAction]) -> None:
        """Forgets the stream: it has ended, or its link is down."""
        self.link.child_streams.remove(self)
        self.link.room = min(self.link.room, self.link.room_max)
        del self.stripe.child_streams[self.link.peer]
        if self.stripe.told is not None:
            self.stripe.tell_passed(out)


class StripeState:
    """This peer's place in one stripe's tree.

    log: the sequence so far. logged: the frames in the log. stream: the open stream from the
    parent. ended: the log is complete. broken: the stream is gone or stalled, and the coordinator
    was told. last_at: when the stripe last moved on. gap_s: the time within which the next frame is
    expected. load: at the root, the bytes bound divided by the weight. told: the sequence number
    up to which we told the parent that we passed the stripe on; None: we told nothing.
    """

    __slots__ = (
        "broken",
        "child_streams",
        "children",
        "ended",
        "gap_s",
        "last_at",
        "load",
        "log",
        "logged",
        "number",
        "parent",
        "state",
        "stream",
        "told",
        "weight",
    )

    def __init__(self, state: "FormState", edge: StripeEdge) -> None:
        self.state = state
        self.number = edge.stripe
        self.weight = edge.weight
        self.parent = edge.parent
        self.children = frozenset(edge.children)
        self.log: list[FrameId] = []
        self.logged: set[FrameId] = set()
        self.child_streams: dict[PeerId, ChildStream] = {}
        self.stream: int | None = None
        self.ended = False
        self.broken = False
        self.last_at = 0.0
        self.gap_s = GAP_START_S if edge.parent is not None else 0.0
        self.load = 0.0
        self.told: int | None = None

    def takes_next(self, now: float) -> bool:
        """At the root: whether a child has caught up, may have more, and its link has room."""
        end = len(self.log)
        free = (
            self.state.blind or len(self.state.stripes) == 1 or now >= self.last_at + PASS_TRICKLE_S
        )
        child_streams = (
            child
            for child in self.child_streams.values()
            if child.cursor == end and child.link.room > 0
        )
        return any(free or child.is_open for child in child_streams)

    @property
    def is_watched(self) -> bool:
        """At the root: whether a child tells how far it has passed the stripe on."""
        return any(child.window.limit is not None for child in self.child_streams.values())

    @property
    def is_open(self) -> bool:
        """At the root: whether a child may have more."""
        return any(child.is_open for child in self.child_streams.values())

    def stands_still(self, now: float) -> bool:
        """At the root: whether the stripe has taken no frame for longer than usual."""
        return now - self.last_at >= max(STILL_S, STILL_GAPS * self.gap_s)

    @property
    def passed(self) -> int:
        """How far it was passed on here: to the median child.

        The whole log where there is no child.
        """
        cursors = sorted(child.reached for child in self.child_streams.values())
        return cursors[len(cursors) // 2] if cursors else len(self.log)

    def tell_passed(self, out: list[RelayAction], *, at_once: bool = False) -> None:
        """Tells the parent how far it was passed on, if that helps: with one stripe it does not."""
        if self.parent is None or self.stream is None or len(self.state.stripes) == 1:
            return
        passed = min(self.passed, len(self.log))
        if at_once or (self.told is not None and passed >= self.told + PASS_EVERY):
            self.told = passed
            out.append(Tell(self.parent, FramesPassed(self.stream, passed)))

    def progress(self, now: float) -> None:
        """A frame came from the parent, or was bound at the root."""
        self.gap_s = max(now - self.last_at, self.gap_s * GAP_DECAY)
        self.last_at = now
        self.broken = False

    def append(self, frame: FrameId, out: list[RelayAction]) -> None:
        """Adds the next frame, and gives it to children that have caught up and have room."""
        sequence = len(self.log)
        self.log.append(frame)
        self.logged.add(frame)
        for child in self.child_streams.values():
            if child.cursor == sequence and child.ready and child.link.room > 0:
                child.send(out)
        if not self.child_streams and self.told is not None:
            self.tell_passed(out)

    def end(self, out: list[RelayAction]) -> None:
        """No more frames come. Children that have all of it are told now, the others later."""
        self.ended = True
        self.stream = None
        self.broken = False
        for child in list(self.child_streams.values()):
            child.close_if_done(out)


class FormState:
    """One form as it passes through this peer.

    plan: None until one comes. is_root: this peer places the frames in the sequences.
    bound: how many of the arrivals are placed. arrived: FormArrived was emitted.
    searched: all that was here before is known, so frames may be asked for. by_table: the search
    needs the first table, which may be asked for; it is given up at search_until.
    blind: this plan is to find out what each uplink can do, so each child gets all it takes.
    gone_at: when lost frames count as gone for good. sources: peers that hold everything, as the
    coordinator says. denied: sources that sent nothing under this plan. fetched_at: when a source
    last sent a frame, or was first asked.
    """

    __slots__ = (
        "arrived",
        "blind",
        "bound",
        "by_table",
        "denied",
        "fetched_at",
        "form",
        "generation",
        "gone_at",
        "is_root",
        "peers",
        "plan",
        "search_until",
        "searched",
        "sources",
        "stripes",
        "transfer",
    )

    def __init__(self, form: FormId, *, searched: bool = True, by_table: bool = False) -> None:
        self.form = form
        self.searched = searched
        self.by_table = by_table
        self.search_until = math.inf
        self.transfer = FrameSet()
        self.plan: PlanId | None = None
        self.generation = Generation(0)
        self.stripes: dict[StripeId, StripeState] = {}
        self.peers: dict[PeerId, EdgePeer] = {}
        self.sources: set[PeerId] = set()
        self.denied: set[PeerId] = set()
        self.fetched_at = 0.0
        self.is_root = self.blind = False
        self.bound = 0
        self.arrived = False
        self.gone_at = math.inf

    @property
    def ended(self) -> bool:
        return all(stripe.ended for stripe in self.stripes.values())

    @property
    def fetches(self) -> bool:
        """Whether sources bring what is missing; stripes are followed after that."""
        return bool(self.sources) and not self.transfer.complete

    @property
    def needs_table(self) -> bool:
        """Whether the search waits for the first table."""
        return self.by_table and not self.searched and not self.transfer.knows(FIRST_TABLE)

    def bind(self, now: float, out: list[RelayAction]) -> None:
        """At the root: binds frames to stripes with a child that has caught up and has room.

        The stripe furthest behind its weight comes first. A stripe whose children do not tell how
        far they passed it on may be LEAD_BYTES ahead of the others. A stripe that stands still
        holds up no other (I6), and does not catch up on missed turns when it goes on.
        """
        while self._skip_tables():
            moving = [stripe for stripe in self.stripes.values() if not stripe.stands_still(now)]
            ready = [stripe for stripe in self.stripes.values() if stripe.takes_next(now)]
            due = [place for stripe in ready if (place := _place(stripe, moving)) is not None]
            if not due:
                break
            load, _, number = min(due)
            self.stripes[number].load = load
            self._bind_next(self.stripes[number], now, out)
        if self.transfer.complete and self.bound == len(self.transfer.arrivals) and not self.ended:
            for stripe in self.stripes.values():
                stripe.end(out)

    def _skip_tables(self) -> bool:
        """Moves on to the next payload frame to bind; False if there is none now.

        Tables are bound together with the first payload frame that needs them.
        """
        arrivals, lost = self.transfer.arrivals, self.transfer.lost
        while self.bound < len(arrivals) and is_table(arrivals[self.bound]):
            self.bound += 1
        return self.bound < len(arrivals) and arrivals[self.bound] not in lost

    def _bind_next(self, stripe: StripeState, now: float, out: list[RelayAction]) -> None:
        stripe.progress(now)
        frame = self.transfer.arrivals[self.bound]
        self.bound += 1
        table = table_of(frame)
        if table not in stripe.logged:
            stripe.append(table, out)
        stripe.append(frame, out)
        stripe.load += self.transfer.size(frame) / stripe.weight
        for child in stripe.child_streams.values():
            child.window.bound(child.cursor, now)

    def check(self) -> None:
        """Asserts that logs hold only held or lost frames, each payload frame after its table.

        At the root each payload frame is bound at most once.
        """
        self.transfer.check()
        for stripe in self.stripes.values():
            self._check_stripe(stripe)
        if self.is_root:
            payload = [
                frame
                for stripe in self.stripes.values()
                for frame in stripe.log
                if not is_table(frame)
            ]
            assert len(set(payload)) == len(payload)
            assert set(payload) == {
                frame for frame in self.transfer.arrivals[: self.bound] if not is_table(frame)
            }

    def _check_stripe(self, stripe: StripeState) -> None:
        assert stripe.state is self
        assert len(stripe.logged) == len(stripe.log)
        before: set[FrameId] = set()
        for frame in stripe.log:
            assert self.transfer.holds(frame) or frame in self.transfer.lost
            assert is_table(frame) or table_of(frame) in before
            before.add(frame)
        assert before == stripe.logged
        assert not (stripe.ended and stripe.stream is not None)
        for peer, child in stripe.child_streams.items():
            assert peer == child.link.peer
            assert peer in stripe.children
            assert child in child.link.child_streams
            assert child.cursor == child.first or child.cursor <= len(stripe.log)
            assert child.first <= child.window.said <= child.cursor


def _place(
    stripe: StripeState, moving: Collection[StripeState]
) -> tuple[float, float, StripeId] | None:
    """At the root: the sort key of the stripe's turn, least first; None: not its turn.

    moving: those of all stripes that do not stand still.
    """
    others = [one for one in moving if one is not stripe]
    able = [one for one in others if one.is_open]
    others = able if stripe.is_watched else able or others
    if not others:
        return stripe.load, stripe.load, stripe.number
    least = min(one.load for one in others)
    load = stripe.load if stripe in moving else max(stripe.load, least)
    return None if load > least + LEAD_BYTES else (load, stripe.load, stripe.number)
