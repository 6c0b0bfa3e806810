"""The relay of one peer: takes stripes of frames from its parents and passes them on to children.

The root of a plan binds frames to stripes as its links get room. Every other peer repeats each
stripe in sequence. In every stripe the table of a segment precedes the segment's payload. One
stripe at a peer that is not the root:

    no stream --(link up to the parent, newer generation, or LINK_S passed)--> following
                 actions: Tell FramesHeld, Tell StreamOpened
    following --(StreamEnded DONE)--> ended
    following --(link down, stream ended, bad frame)--> no stream, broken: report, repair
    following --(no frame in STALL_GAPS expected gaps)--> following, broken: report, repair
    ended     --(all stripes ended, nothing for LINK_S, frames missing)--> ended: report, repair
    broken    --(a stream opens, a frame comes)--> not broken

If part of a form may already be on this machine, the relay neither follows nor repairs it before its
FormSearched, so that nothing that is already here comes over a link. A frame that was held and lost
is asked for at once, and children wait for it. A PeerFault is raised before anything changes, so
that a peer cannot leave the relay in a broken state.

Not here: payload, hashing and disk (the runtime, see `events`), what the disk shows
(`disk_frames`), plans (`topology/plan`), opening and judging streams (`streams`), sequences
(`stripes`), single frames (`frame_repair`).
"""

from collections import deque
from collections.abc import Collection
from typing import assert_never

from echo2d.core.base.ids import FormId, FrameId, PeerId
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges, StripeEdge
from echo2d.core.protocol.peer_messages import (
    FramesCancelled,
    FramesHeld,
    FramesPassed,
    FramesWanted,
    RelayMessage,
    StreamEnded,
    StreamOpened,
)
from echo2d.core.relay.busy_meter import BusyMeter
from echo2d.core.relay.disk_frames import (
    CHILD_GONE_S,
    Finding,
    give_up_gone,
    searched,
    take,
)
from echo2d.core.relay.events import (
    DONE,
    Accuse,
    ExpectPeer,
    ForgetPeer,
    FormArrived,
    FormComplete,
    FormForgotten,
    FormSearched,
    FrameRejected,
    FramesFound,
    FramesLost,
    FrameVerified,
    Heard,
    LinkDown,
    LinkUp,
    PeerReady,
    PlanReceived,
    RelayAction,
    RelayDeadlinePassed,
    RelayEvent,
    RepairRefused,
    RepairVerified,
    ReportEdgeBroken,
    TableHeld,
    Tell,
)
from echo2d.core.relay.frame_repair import (
    REPAIR_S,
    SOURCE_QUIET_S,
    ask_for_missing,
    cancel,
    give_back_overdue,
    needs_repair,
    note_held,
    note_wanted,
)
from echo2d.core.relay.frame_set import FrameSet
from echo2d.core.relay.outlet import Outlet
from echo2d.core.relay.streams import (
    LINK_S,
    check_frame,
    close_repairs,
    close_stripes,
    follow,
    follow_all,
    leave_parent,
    what_is_wrong,
)
from echo2d.core.relay.stripes import (
    LINK_FRAMES_MAX,
    STRIPED_FORMS_MAX,
    ChildStream,
    FormState,
    LinkState,
    StripeState,
)
from echo2d.errors import PeerFault

# One peer may ask for at most this many streams before the plan that allows them is here.
ASKS_MAX = 64
# The search for a form is given up if its first table takes longer than this, which is less than LINK_S.
SEARCH_S = 4.0
# Streams are checked this often while something is arriving.
WATCH_S = 0.5


class Relay:
    """All forms at one peer. Call `handle` with every event; perform the actions in order."""

    def __init__(
        self, me: PeerId, *, unsearched: Collection[FormId] = (), has_base: bool = False
    ) -> None:
        """unsearched: forms of which something may be on disk. has_base: whether chunks of any form may be in a base
        model or an older version. A form of which something may be here is not asked for before its FormSearched.
        """
        self.me = me
        self._unsearched = set(unsearched)
        self._has_base = has_base
        self._by_table = set[FormId]()  # see `search`
        self._links: dict[PeerId, LinkState] = {}
        self._forms: dict[FormId, FormState] = {}
        self._expected: dict[PeerId, EdgePeer] = {}
        self._watch_at: float | None = None
        self._out: list[RelayAction] = []
        self.busy = BusyMeter()
        self._outlet = Outlet(self._forms, self.busy)

    def wake_at(self) -> float | None:
        """When RelayDeadlinePassed is due; None: never."""
        times = [at for at in (self._watch_at, self._outlet.frees_at()) if at is not None]
        return min(times, default=None)

    def search(self, form: FormId) -> None:
        """Ask only for the form's first table before FormSearched, because its chunks may be here."""
        if form not in self._forms:
            self._by_table.add(form)

    def transfer(self, form: FormId) -> FrameSet | None:
        """The frames of a form. Read only."""
        state = self._forms.get(form)
        return None if state is None else state.transfer

    def handle(self, event: RelayEvent, *, now: float) -> list[RelayAction]:
        """Returns the actions. PeerFault: the event's peer broke the protocol, and nothing has changed."""
        out = self._out = []
        match event:
            case FrameVerified():
                self._on_frame(event, now)
            case RepairVerified() | RepairRefused() | FrameRejected():
                self._on_repair(event, now)
            case (
                TableHeld()
                | FramesFound()
                | FramesLost()
                | FormComplete()
                | FormSearched()
                | FormForgotten()
            ):
                self._on_store(event, now)
            case PlanReceived(edges):
                self._on_plan(edges, now)
            case LinkUp(peer):
                self._on_link_up(peer, now)
            case PeerReady() | Heard() | LinkDown():
                if event.peer in self._links:
                    self._on_link(self._links[event.peer], event, now)
            case RelayDeadlinePassed():
                self._on_deadline(now)
            case _:
                assert_never(event)
        self._outlet.send(now, out)
        return out

    # frames

    def _on_frame(self, event: FrameVerified, now: float) -> None:
        state = self._forms.get(event.form)
        if state is None or not state.transfer.knows(event.frame):
            # The form was forgotten while the frame was being verified.
            return
        link = self._links.get(event.peer)
        stripe = None if link is None else link.incoming.get(event.stream)
        if stripe is not None and link is not None:
            check_frame(stripe, event)
            link.heard_at = now
        if state.transfer.asked_count:
            cancel(state, event.frame, None, self._out)
        if not event.header_only:
            state.transfer.hold(event.frame)
        if stripe is not None and event.sequence == len(stripe.log):
            stripe.progress(now)
            stripe.append(event.frame, self._out)
            self._outlet.put_all(stripe)
        self._note_arrival(state, now)
        if state.in_end_game:
            ask_for_missing(state, self._links, now, self._out)

    def _note_arrival(self, state: FormState, now: float) -> None:
        """Emits FormArrived once everything is held."""
        if state.transfer.complete and not state.arrived:
            state.arrived = True
            close_repairs(self._links, state.form, DONE, self._out)
            if state.sources:
                follow_all(self._links, state, now, self._out)
            self._out.append(FormArrived(state.form))

    def _on_passed(self, child: ChildStream | None, message: FramesPassed, now: float) -> None:
        if child is not None:
            child.passed_on(message.sequence, message.waiting)
            child.stripe.moved(now, self._out)

    def _serve_again(self, state: FormState) -> None:
        """Queues all streams again, because lost frames may be back."""
        for stripe in state.stripes.values():
            self._outlet.put_all(stripe)

    # what is on disk

    def _on_store(self, event: Finding | FormForgotten, now: float) -> None:
        if isinstance(event, FormForgotten | FormSearched):
            self._unsearched.discard(event.form)
        if isinstance(event, FormForgotten):
            self._forget(event.form)
            return
        state = self._state_of(event.form)
        take(state, self._links, event, now, self._out)
        self._serve_again(state)
        if isinstance(event, FramesLost):
            self._watch_from(now)
        self._note_arrival(state, now)
        ask_for_missing(state, self._links, now, self._out)

    def _state_of(self, form: FormId) -> FormState:
        """The state of a form. It is made if there is none; the oldest form is forgotten if there are
        too many.
        """
        if form not in self._forms:
            if len(self._forms) >= STRIPED_FORMS_MAX:
                self._forget(next(iter(self._forms)))
            by_table = self._has_base or form in self._by_table
            searched = not by_table and form not in self._unsearched
            self._forms[form] = FormState(form, searched=searched, by_table=by_table)
        return self._forms[form]

    def _forget(self, form: FormId) -> None:
        self._by_table.discard(form)
        state = self._forms.pop(form, None)
        if state is None:
            return
        close_stripes(self._links, state, "form forgotten", self._out)
        close_repairs(self._links, form, "form forgotten", self._out)
        for link in self._links.values():
            link.has.pop(form, None)
            if link.told.pop(form, 0):
                self._out.append(Tell(link.peer, FramesHeld(form, ())))
        self._expect_peers()

    # plans

    def _on_plan(self, edges: PlanEdges, now: float) -> None:
        state = self._state_of(edges.form)
        if state.plan == edges.plan and edges.generation <= state.generation:
            return
        if state.plan != edges.plan:
            close_stripes(self._links, state, "another plan", self._out)
            state.stripes = {edge.stripe: StripeState(state, edge) for edge in edges.stripes}
            state.is_root = any(edge.parent is None for edge in edges.stripes)
            state.plan, state.bound, state.denied = edges.plan, 0, set()
        state.generation = edges.generation
        state.peers = {edge.peer: edge for edge in edges.peers}
        state.sources, state.fetched_at = set(edges.sources) - state.denied, now
        self._expect_peers()
        for edge in edges.stripes:
            self._move(state.stripes.setdefault(edge.stripe, StripeState(state, edge)), edge, now)
        if state.needs_table:
            state.search_until = min(state.search_until, now + SEARCH_S)
        ask_for_missing(state, self._links, now, self._out)
        self._admit_waiting()
        self._watch_from(now)

    def _move(self, stripe: StripeState, edge: StripeEdge, now: float) -> None:
        """Changes the edges of a stripe. Streams on unchanged edges go on."""
        for peer in [peer for peer in stripe.child_streams if peer not in edge.children]:
            stripe.child_streams[peer].close("not a child any more", self._out)
        stripe.children = frozenset(edge.children)
        if stripe.parent != edge.parent or stripe.state.fetches:
            leave_parent(self._links, stripe, "not the parent any more", self._out)
            stripe.parent = edge.parent
        stripe.broken = False
        stripe.last_at = now
        follow(self._links, stripe, now, self._out)

    def _expect_peers(self) -> None:
        """Expects the peers of all plans and no other peers. If several plans name a peer, the newest plan counts."""
        expected = {
            peer: edge for state in self._forms.values() for peer, edge in state.peers.items()
        }
        for peer in sorted(self._expected.keys() - expected.keys()):
            self._out.append(ForgetPeer(peer))
        for peer, edge in expected.items():
            if self._expected.get(peer) != edge:
                self._out.append(ExpectPeer(edge))
        self._expected = expected

    # links and streams

    def _on_link(self, link: LinkState, event: PeerReady | Heard | LinkDown, now: float) -> None:
        match event:
            case PeerReady():
                self._outlet.sent(link, now)
            case Heard(message=message):
                self._on_heard(link, message, now)
            case LinkDown(reason=reason):
                self._on_link_down(link, reason, now)
            case _:
                assert_never(event)

    def _on_heard(self, link: LinkState, message: RelayMessage, now: float) -> None:
        match message:
            case StreamOpened():
                self._on_asked(link, message)
            case StreamEnded(stream, reason):
                self._on_closed(link, stream, reason, now)
            case FramesPassed(stream):
                self._on_passed(link.child(stream), message, now)
            case FramesHeld():
                note_held(link, message)
            case FramesWanted():
                note_wanted(link, message)
                self._outlet.wanted(link)
            case FramesCancelled(form, frames):
                gone = {(form, frame) for frame in frames}
                link.wants = deque(wanted for wanted in link.wants if wanted[1:] not in gone)
            case _:
                assert_never(message)

    def _on_link_up(self, peer: PeerId, now: float) -> None:
        assert peer not in self._links
        self._links[peer] = LinkState(self.me, peer)
        for state in self._forms.values():
            for stripe in state.stripes.values():
                if stripe.parent == peer:
                    follow(self._links, stripe, now, self._out)
            if state.needs_table or peer in state.sources:
                ask_for_missing(state, self._links, now, self._out)

    def _on_link_down(self, link: LinkState, reason: str, now: float) -> None:
        del self._links[link.peer]
        self._outlet.lost(link)
        unserved = {child.stripe.state.form for child in link.child_streams}
        for child in list(link.child_streams):
            child.drop(self._out)
        for state in self._forms.values():
            for frame in state.transfer.asked_of(link.peer):
                state.transfer.give_back(frame, link.peer)
            lost = [
                stripe
                for stripe in state.stripes.values()
                if stripe.parent == link.peer and not stripe.ended
            ]
            for stripe in lost:
                stripe.stream = None
            if lost or state.form in unserved:
                self._report(state, link.peer, lost, reason, now)
            elif link.peer in state.sources:
                ask_for_missing(state, self._links, now, self._out)

    def _report(
        self, state: FormState, peer: PeerId, stripes: list[StripeState], reason: str, now: float
    ) -> None:
        """Reports the edge to this peer, marks these stripes as broken and repairs meanwhile."""
        assert state.plan is not None
        for stripe in stripes:
            # An ended stripe brings nothing, but its parent may be asked again.
            stripe.broken = not stripe.ended
            stripe.last_at = now
        self._out.append(ReportEdgeBroken(state.plan, state.generation, peer, reason))
        ask_for_missing(state, self._links, now, self._out)

    def _on_asked(self, link: LinkState, asked: StreamOpened) -> None:
        if asked.from_sequence < 0:
            raise PeerFault(f"asks for a stripe from frame {asked.from_sequence} on, below 0")
        state = self._forms.get(asked.form)
        stripe = (
            state.stripes.get(asked.stripe)
            if state is not None and state.plan == asked.plan
            else None
        )
        if stripe is not None and link.peer in stripe.children:
            if link.peer in stripe.child_streams:
                stripe.child_streams[link.peer].close("asked for again", self._out)
            child = ChildStream(stripe, link, asked.stream, asked.from_sequence)
            self._outlet.put(child)
            # If the stripe has ended before the child came, nothing may be left to send.
            child.close_if_done(self._out)
        elif _may_come(state, asked) and len(link.asks) < ASKS_MAX:
            link.asks[asked.form, asked.stripe] = asked
        else:
            refusal = StreamEnded(asked.stream, "not a child in this plan")
            self._out.append(Tell(link.peer, refusal))

    def _admit_waiting(self) -> None:
        """Tries again the streams that were asked for before the plan that allows them came."""
        for link in list(self._links.values()):
            asks, link.asks = link.asks, {}
            for asked in asks.values():
                self._on_asked(link, asked)

    def _on_closed(self, link: LinkState, stream: int, reason: str, now: float) -> None:
        stripe = link.incoming.pop(stream, None)
        if stripe is not None:
            stripe.stream = None
            if reason == DONE:
                stripe.last_at = now
                stripe.end(self._out)
                ask_for_missing(stripe.state, self._links, now, self._out)
            else:
                self._report(stripe.state, link.peer, [stripe], reason, now)
            return
        link.repairs = {form: number for form, number in link.repairs.items() if number != stream}
        link.wants = deque(wanted for wanted in link.wants if wanted[0] != stream)
        link.asks = {key: asked for key, asked in link.asks.items() if asked.stream != stream}
        for child in [child for child in link.child_streams if child.stream == stream]:
            child.drop(self._out)

    # repair

    def _on_repair(
        self,
        event: RepairVerified | RepairRefused | FrameRejected,
        now: float,
    ) -> None:
        link, state = self._links.get(event.peer), self._forms.get(event.form)
        match event:
            case RepairVerified():
                self._on_repaired(state, link, event, now)
            case _ if link is None:
                return
            case RepairRefused(form=form, frame=frame):
                link.has.get(form, set()).discard(frame)
                self._on_not_sent(state, link, frame, now)
            case FrameRejected():
                self._on_rejected(state, link, event, now)
            case _:
                assert_never(event)

    def _on_repaired(
        self, state: FormState | None, link: LinkState | None, event: RepairVerified, now: float
    ) -> None:
        if link is not None:
            link.heard_at = now
        if state is None or not state.transfer.knows(event.frame):
            return
        cancel(state, event.frame, event.peer, self._out)
        state.transfer.extend(event.peer, now + REPAIR_S)
        state.fetched_at = now
        state.transfer.hold(event.frame)
        state.gone_at = now + CHILD_GONE_S
        self._serve_again(state)
        self._note_arrival(state, now)
        ask_for_missing(state, self._links, now, self._out)

    def _on_not_sent(
        self, state: FormState | None, link: LinkState, frame: FrameId, now: float
    ) -> None:
        """The peer did not send a frame that it was asked for: drops it as a source and asks another."""
        link.quiet_until = now + SOURCE_QUIET_S
        if state is not None and link.peer in state.sources:
            self._drop_sources(state, {link.peer}, now)
        if state is not None and state.transfer.give_back(frame, link.peer):
            ask_for_missing(state, self._links, now, self._out)

    def _drop_sources(self, state: FormState, peers: set[PeerId], now: float) -> None:
        """Gives up these sources. When none is left, the stripes bring what is missing."""
        state.denied |= peers
        state.sources -= state.denied
        if not state.sources:
            follow_all(self._links, state, now, self._out)

    def _on_rejected(
        self, state: FormState | None, link: LinkState, event: FrameRejected, now: float
    ) -> None:
        self._out.append(Accuse(event.form, event.frame, link.peer))
        link.has.get(event.form, set()).discard(event.frame)
        stripe = link.incoming.get(event.stream)
        if stripe is None:
            self._on_not_sent(state, link, event.frame, now)
            return
        leave_parent(self._links, stripe, "bad frame", self._out)
        link.quiet_until = now + LINK_S
        self._report(stripe.state, link.peer, [stripe], "bad frame", now)

    # time

    def _watch_from(self, now: float) -> None:
        if self._watch_at is None:
            self._watch_at = now + WATCH_S

    def _on_deadline(self, now: float) -> None:
        for state in self._forms.values():
            if (
                state.needs_table
                and now >= state.search_until
                and state.form not in self._unsearched
            ):
                searched(state, self._links, now, self._out)
            give_back_overdue(state, self._links, now, self._out)
            if state.fetches and state.searched and now >= state.fetched_at + LINK_S:
                self._drop_sources(state, state.sources, now)
            for stripe in state.stripes.values():
                self._watch(stripe, now)
            ask_for_missing(state, self._links, now, self._out)
            give_up_gone(state, now, self._out)
        self._watch_at = now + WATCH_S if any(map(_unfinished, self._forms.values())) else None

    def _watch(self, stripe: StripeState, now: float) -> None:
        """Reports a parent that should have sent something by now."""
        reason = what_is_wrong(self._links, stripe, now)
        if reason is None or stripe.parent is None:
            return
        self._report(stripe.state, stripe.parent, [stripe], reason, now)
        follow(self._links, stripe, now, self._out)

    def check(self) -> None:
        """Asserts what holds between events."""
        assert len(self._forms) <= STRIPED_FORMS_MAX
        assert set(self._expected) == {
            peer for state in self._forms.values() for peer in state.peers
        }
        for state in self._forms.values():
            state.check()
        for peer, link in self._links.items():
            assert link.peer == peer
            assert 0 <= link.unsent <= LINK_FRAMES_MAX
            assert all(child.stripe.child_streams[peer] is child for child in link.child_streams)
            assert all(
                stripe.stream == number and stripe.parent == peer
                for number, stripe in link.incoming.items()
            )
        stripes = [stripe for state in self._forms.values() for stripe in state.stripes.values()]
        following = sum(stripe.stream is not None for stripe in stripes)
        assert following == sum(len(link.incoming) for link in self._links.values())


def _may_come(state: FormState | None, asked: StreamOpened) -> bool:
    """Whether the plan that allows this stream may still be on its way.

    The numbers of two plans do not show which plan is newer, so any other plan may be newer than the known one.
    """
    return state is None or state.plan != asked.plan or asked.generation > state.generation


def _unfinished(state: FormState) -> bool:
    """Whether something of this form is still to come."""
    return state.plan is not None and (not state.ended or needs_repair(state))
