"""The state of what passes through one peer: links, forms, their stripes, and children's streams.

A stripe's log is its sequence so far: log[n] is the frame with sequence number n. The frame is
held here, or it was lost and will come again. Each child has its own cursor into the log, so that
a slow child never holds up another (I6). At the root of a plan frames are placed late: a frame is
bound to a stripe when it can be sent at once.

A child that has children reports how far it has passed a stripe on: as far as the stripe was given
to its median child, or as far as that child reports itself. The root binds each frame to the stripe
whose relays will pass it on first (`credit`). On a *spare* stripe the root serves every peer
itself. It binds to this stripe only what no relay can take. So a slow relay gets fewer frames
instead of late ones, and its speed need not be known. Not here: which of the waiting frames is sent
next (`outlet`).
"""

import math
from collections import deque

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
from echo2d.core.relay.credit import CREDIT_FRAMES, LARGE_CREDIT_FRAMES, Credit
from echo2d.core.relay.events import DONE, RelayAction, SendFrame, Tell
from echo2d.core.relay.frame_set import FrameSet
from echo2d.errors import PeerFault

FIRST_TABLE = frame_id(SegmentId(0), 0)
# A peer keeps at most this many forms: at the seed one form spreads, older forms drain, and three
# are for peers that lack the base of the first.
STRIPED_FORMS_MAX = 8
# One link has at most this many unsent frames: one is being sent while the next one is chosen.
LINK_FRAMES_MAX = 2
# The expected time between the first frames of a new stream: a chain takes long to start.
GAP_START_S = 10.0
# The expected gap shrinks by this factor per frame, so it is about the longest of the last ten.
GAP_DECAY = 0.8


def table_of(frame: FrameId) -> FrameId:
    """The table that holds this frame's digest."""
    return FrameId(frame >> FRAME_INDEX_BITS << FRAME_INDEX_BITS)


class LinkState:
    """An open link: its room, the streams on it, and what the other end has said."""

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
        "slow",
        "told",
        "unsent",
        "wants",
    )

    def __init__(self, me: PeerId, peer: PeerId) -> None:
        self.peer = peer
        # How many frames were given to the link and may not be sent yet.
        self.unsent = 0
        # Whether the unsent frames have waited too long; the link gets no more before they are
        # sent.
        self.slow = False
        self.child_streams: list[ChildStream] = []  # stripes that the peer takes from us
        self.incoming: dict[int, StripeState] = {}  # stripe streams that we opened
        self.repairs: dict[FormId, int] = {}  # our repair stream per form
        # (stream, form, frame) that the peer asked for on repair streams.
        self.wants: deque[tuple[int, FormId, FrameId]] = deque()
        self.has: dict[FormId, set[FrameId]] = {}  # frames that the peer said it holds
        # How many of each form's arrivals the peer was told of.
        self.told: dict[FormId, int] = {}
        # Streams that the peer asked for before the plan came here.
        self.asks: dict[tuple[FormId, StripeId], StreamOpened] = {}
        self.heard_at = 0.0  # when the peer last sent a frame
        self.quiet_until = 0.0  # until then the peer is not asked for repairs
        self._next_stream = 1 if me < peer else 2

    @property
    def has_room(self) -> bool:
        """Whether the link takes another frame."""
        return self.unsent < LINK_FRAMES_MAX and not self.slow

    def child(self, stream: int) -> "ChildStream | None":
        """The child's stream with this number."""
        return next((child for child in self.child_streams if child.stream == stream), None)

    def new_stream(self) -> int:
        """The number of the next stream that this end opens."""
        number = self._next_stream
        self._next_stream = stream_after(number)
        return number


class ChildStream:
    """One child's stream of one stripe."""

    __slots__ = (
        "cursor",
        "first",
        "has",
        "link",
        "passed",
        "queued",
        "stream",
        "stripe",
        "waiting",
    )

    def __init__(self, stripe: "StripeState", link: LinkState, stream: int, first: int) -> None:
        self.stripe = stripe
        self.link = link
        self.stream = stream
        self.first = first
        self.cursor = first  # the sequence number that the child gets next
        # How far the child reports to have passed the stripe on; None: it reports nothing.
        self.passed: int | None = None
        # How many frames the child, or a peer below it, has yet to pass on.
        self.waiting = 0
        self.queued = False  # whether the stream waits in the outlet
        self.has = link.has.setdefault(stripe.state.form, set())  # frames that it holds already
        stripe.child_streams[link.peer] = self
        stripe.served = True
        link.child_streams.append(self)

    @property
    def is_open(self) -> bool:
        return self.stripe.child_streams.get(self.link.peer) is self

    @property
    def ready(self) -> bool:
        """Whether the frame at the cursor is known and held."""
        stripe = self.stripe
        return (
            self.cursor < len(stripe.log)
            and stripe.log[self.cursor] not in stripe.state.transfer.lost
        )

    @property
    def reached(self) -> int:
        """The sequence number that the stripe has reached through this child."""
        return self.cursor if self.passed is None else self.passed

    def passed_on(self, sequence: int, waiting: int) -> None:
        """Record how far the child has passed the stripe on, and how many frames wait there.

        PeerFault: it did not get that much.
        """
        if sequence + waiting > self.cursor or min(sequence, waiting) < 0:
            raise PeerFault(
                f"frame number {sequence} of a stripe passed on, where {self.cursor} is next"
            )
        if self.passed is None:
            # Until now the child counted as a peer without children, which has nothing to pass on.
            self.stripe.credit = Credit(sequence, self.stripe.credit.frames)
        self.passed = max(sequence, self.passed or 0)
        self.waiting = waiting

    def send(self, now: float, out: list[RelayAction]) -> None:
        """Gives the frame at the cursor to the link. Call it only if the link has room."""
        stripe, link, sequence = self.stripe, self.link, self.cursor
        frame = stripe.log[sequence]
        header_only = frame in self.has
        out.append(
            SendFrame(link.peer, self.stream, stripe.state.form, frame, sequence, header_only)
        )
        self.cursor = sequence + 1
        link.unsent += 1
        stripe.moved(now, out)
        self.close_if_done(out)

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
        del self.stripe.child_streams[self.link.peer]
        if self.stripe.told is not None:
            self.stripe.tell_passed(out)


class StripeState:
    """This peer's place in one stripe's tree."""

    __slots__ = (
        "bound_bytes",
        "broken",
        "child_streams",
        "children",
        "credit",
        "ended",
        "gap_s",
        "last_at",
        "log",
        "logged",
        "number",
        "parent",
        "served",
        "spare",
        "state",
        "stream",
        "told",
        "weight",
    )

    def __init__(self, state: "FormState", edge: StripeEdge) -> None:
        self.state = state
        self.number = edge.stripe
        # spare above 0: the root binds to this stripe what no other takes, at most this share of the
        # bytes. weight above 0: the stripe's part of the bytes.
        self.spare, self.weight = edge.spare, edge.weight
        self.parent = edge.parent
        self.children = frozenset(edge.children)
        self.log: list[FrameId] = []  # the sequence so far
        self.logged: set[FrameId] = set()  # the frames in the log
        self.child_streams: dict[PeerId, ChildStream] = {}
        self.stream: int | None = None  # the open stream from the parent
        self.ended = False  # whether the log is complete
        # Whether the stream is gone or stalled, and the coordinator was told.
        self.broken = False
        self.last_at = 0.0  # when the stripe last moved on
        # The time within which the next frame is expected.
        self.gap_s = GAP_START_S if edge.parent is not None else 0.0
        # Only the root uses `credit` and `bound_bytes`.
        self.credit = Credit(frames=CREDIT_FRAMES if edge.weight == 0 else LARGE_CREDIT_FRAMES)
        self.served = False  # whether a child has come
        self.bound_bytes = 0
        # The sequence number up to which we told the parent that we passed the stripe on; None: we
        # have told nothing.
        self.told: int | None = None

    @property
    def takes_next(self) -> bool:
        """At the root: whether a child has caught up, and its link has room."""
        end = len(self.log)
        return any(
            child.cursor == end and child.link.has_room for child in self.child_streams.values()
        )

    def has_credit(self, now: float) -> bool:
        """At the root: whether another frame may be bound."""
        return self.credit.allows(len(self.log), now)

    @property
    def is_relayed(self) -> bool:
        """Whether a child passes the stripe on to its own children."""
        return any(child.passed is not None for child in self.child_streams.values())

    @property
    def order(self) -> tuple[float, int, StripeId]:
        """At the root: a sort key. The next frame goes to the stripe with the smallest key."""
        end = len(self.log)
        behind = self.bound_bytes / self.weight if self.weight else self.credit.backlog_s(end)
        return behind, end, self.number

    @property
    def passed(self) -> int:
        """How far the stripe was passed on here: given to the median child, and passed on by every child
        that passes it on further.

        The whole log if the stripe has no children; nothing while the first child has not come yet.
        """
        cursors = sorted(child.reached for child in self.child_streams.values())
        if not cursors:
            return 0 if self.children and not self.served else len(self.log)
        told = (child.passed for child in self.child_streams.values() if child.passed is not None)
        return min([cursors[len(cursors) // 2], *told])

    @property
    def _waiting(self) -> int:
        """How many frames wait: for the median child here, or at the child with the most waiting."""
        children = self.child_streams.values()
        cursors = sorted(child.cursor for child in children) or [len(self.log)]
        given = min(cursors[len(cursors) // 2], len(self.log))
        return max([len(self.log) - given, *(child.waiting for child in children)])

    def moved(self, now: float, out: list[RelayAction]) -> None:
        """Record that a child was given more, or reports that it has passed more on."""
        if self.parent is None:
            below = max((child.waiting for child in self.child_streams.values()), default=0)
            self.credit.passed_on(self.passed, below, now)
        else:
            self.tell_passed(out)

    def tell_passed(self, out: list[RelayAction], *, at_once: bool = False) -> None:
        """Tells the parent how far the stripe was passed on. With a single stripe this is of no use
        to the root.
        """
        if self.parent is None or self.stream is None or len(self.state.stripes) == 1:
            return
        passed = min(self.passed, len(self.log))
        if at_once or (self.told is not None and passed > self.told):
            self.told = passed
            # A child that came from another parent may have more of the stripe than we have.
            waiting = min(self._waiting, len(self.log) - passed)
            out.append(Tell(self.parent, FramesPassed(self.stream, passed, waiting)))

    def progress(self, now: float) -> None:
        """Record that a frame came from the parent, or was bound at the root."""
        self.gap_s = max(now - self.last_at, self.gap_s * GAP_DECAY)
        self.last_at = now
        self.broken = False

    def append(self, frame: FrameId, out: list[RelayAction]) -> None:
        """Adds the next frame."""
        self.log.append(frame)
        self.logged.add(frame)
        if not self.child_streams and self.told is not None:
            self.tell_passed(out)

    def end(self, out: list[RelayAction]) -> None:
        """Record that no more frames come. Children that have the whole stripe are told now, others later."""
        self.ended = True
        self.stream = None
        self.broken = False
        for child in list(self.child_streams.values()):
            child.close_if_done(out)


class FormState:
    """One form as it passes through this peer."""

    __slots__ = (
        "arrived",
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
        # Whether everything that was here before is known, so that frames may be asked for.
        self.searched = searched
        # Whether the search needs the first table, which may be asked for; it ends at search_until.
        self.by_table = by_table
        self.search_until = math.inf
        self.transfer = FrameSet()
        self.plan: PlanId | None = None
        self.generation = Generation(0)
        self.stripes: dict[StripeId, StripeState] = {}
        self.peers: dict[PeerId, EdgePeer] = {}
        # Peers that hold the whole form, according to the coordinator.
        self.sources: set[PeerId] = set()
        self.denied: set[PeerId] = set()  # sources that sent nothing under this plan
        # When a source last sent a frame, or was first asked.
        self.fetched_at = 0.0
        self.is_root = False  # whether this peer binds the frames to stripes
        self.bound = 0  # how many of the arrivals are bound
        self.arrived = False  # whether FormArrived was emitted
        self.gone_at = math.inf  # when lost frames count as gone for good

    @property
    def ended(self) -> bool:
        return all(stripe.ended for stripe in self.stripes.values())

    @property
    def fetches(self) -> bool:
        """Whether sources still bring what is missing; stripes are followed after that."""
        return bool(self.sources) and not self.transfer.complete

    @property
    def needs_table(self) -> bool:
        """Whether the search waits for the first table."""
        return self.by_table and not self.searched and not self.transfer.knows(FIRST_TABLE)

    @property
    def has_spare(self) -> bool:
        return any(stripe.spare for stripe in self.stripes.values())

    @property
    def in_end_game(self) -> bool:
        """Whether the root has bound every frame, so that the frames missing here wait at relays.

        Only with a spare stripe, on which the root may send to every peer.
        """
        return (
            self.has_spare
            and not self.ended
            and any(stripe.ended for stripe in self.stripes.values())
        )

    def bind(
        self, now: float, out: list[RelayAction], *, spare: bool = False
    ) -> StripeState | None:
        """At the root: binds the next frame and returns its stripe; None: no stripe takes it now.

        spare: it binds to the spare stripe; otherwise to the stripe with the shortest backlog that has
        credit.
        """
        if not self._skip_tables():
            return None
        able = self._may_spare if spare else self._has_credit
        stripes = self.stripes.values()
        ready = [stripe for stripe in stripes if stripe.takes_next and able(stripe, now)]
        if not ready:
            return None
        # Stripes whose relays report come first, so the star comes last among the spare stripes.
        stripe = min(ready, key=lambda one: (not one.is_relayed, *one.order))
        self._bind_next(stripe, now, out)
        return stripe

    def _has_credit(self, stripe: StripeState, now: float) -> bool:
        # A single stripe gets all that its links take.
        return not stripe.spare and (len(self.stripes) == 1 or stripe.has_credit(now))

    def _may_spare(self, stripe: StripeState, now: float) -> bool:
        has_share = stripe.bound_bytes <= stripe.spare * self.transfer.known_bytes
        return stripe.spare > 0 and has_share and (not stripe.is_relayed or stripe.has_credit(now))

    def end_if_bound(self, out: list[RelayAction]) -> None:
        """At the root: ends the stripes when everything is bound."""
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
        stripe.bound_bytes += self.transfer.size(frame)
        stripe.credit.bound(len(stripe.log), now)

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
            assert child.passed is None or child.passed <= child.cursor
