"""Repair: asks other peers for single frames that are missing here, and answers their requests.

A peer fetches what its stripes do not bring. It fetches all missing frames while a stripe is
broken, when all stripes have ended, or if it is a root that does not hold everything. It also
fetches the frames that it has lost, and the first table of a form for which it searches its disk.
It asks peers that said they hold a frame. If no peer said so, it asks the parents of its working
stripes; a root asks the children that were sent the frame. A newcomer with sources (peers that hold
everything) first fetches from them all that it misses, and then follows its stripes.

A frame may come twice, because a stripe may bring what was asked for. Not here: finding out that a
stripe is broken (`relay`).
"""

from collections.abc import Iterator
from itertools import islice

from echo2d.core.base.ids import FormId, FrameId, PeerId
from echo2d.core.protocol.peer_messages import FramesCancelled, FramesHeld, FramesWanted
from echo2d.core.relay.events import RelayAction, SendFrame, Tell
from echo2d.core.relay.stripes import FIRST_TABLE, STRIPED_FORMS_MAX, FormState, LinkState
from echo2d.errors import PeerFault

# One peer is asked for at most this many frames at a time: enough to cover the round trip, and few
# enough to be asked of others soon when the peer dies.
WANT_FRAMES_MAX = 16
# One peer may ask us for at most this many at a time. This program never asks for more.
WANTED_FRAMES_MAX = 4 * WANT_FRAMES_MAX
# A peer may say that it holds at most this many frames of one form: 256 GiB in frames of 256 KiB.
HELD_FRAMES_MAX = 1 << 20
# In the end game a peer asks the root for at most this many at a time, the newest first, because
# relays bring the oldest first.
END_FRAMES_MAX = 8
# One turn looks at this many missing frames.
SCAN_FRAMES_MAX = 4096
# After this long, another peer is asked for a frame: 16 frames of 256 KiB take as long at 8 Mbit/s.
REPAIR_S = 5.0
# Other peers take over frames from a peer that sent nothing for this long: above most round trips.
FRAME_LATE_S = 0.2
# For this long, a peer that did not have a frame, or was late, is not asked again.
SOURCE_QUIET_S = 1.0


def needs_repair(state: FormState) -> bool:
    """Whether frames may be missing that no working stripe will bring."""
    if state.plan is None or state.transfer.missing_count == 0 or not state.searched:
        return False
    return (
        state.is_root
        or state.ended
        or state.fetches
        or state.in_end_game
        or any(stripe.broken for stripe in state.stripes.values())
    )


def ask_for_missing(
    state: FormState, links: dict[PeerId, LinkState], now: float, out: list[RelayAction]
) -> None:
    """Asks for missing frames up to the limits, each from the peer that has the fewest to send."""
    able = [
        peer
        for peer in state.peers
        if peer in links and (not state.fetches or peer in state.sources)
    ]
    if state.in_end_game and not state.fetches:
        ended = {stripe.parent for stripe in state.stripes.values() if stripe.ended}
        able = [peer for peer in able if peer in ended]
    sources = [links[peer] for peer in able if links[peer].quiet_until <= now]
    most = WANT_FRAMES_MAX
    if state.fetches:
        # All sources together are asked for 32 frames at a time: these fill 1 Gbit/s over 60 ms,
        # and slow sources owe few.
        most = min(most, 32 // len(state.sources))
    elif state.in_end_game:
        most = END_FRAMES_MAX
    spare = {link.peer: most - len(state.transfer.asked_of(link.peer)) for link in sources}
    wanted: dict[PeerId, list[FrameId]] = {}
    parents = _working_parents(state)
    for frame in list(islice(_to_be_asked(state), SCAN_FRAMES_MAX)):
        if not any(left > 0 for left in spare.values()):
            break
        peer = _choose(
            frame, [links[peer] for peer, left in spare.items() if left > 0], spare, parents, state
        )
        if peer is not None:
            spare[peer] -= 1
            state.transfer.ask(frame, peer, now + REPAIR_S)
            wanted.setdefault(peer, []).append(frame)
    if not wanted and state.transfer.asked_count:
        wanted = _steal(state, sources, now, out)
    for peer, frames in wanted.items():
        stream = _repair_stream(links[peer], state.form)
        out.append(Tell(peer, FramesWanted(stream, state.form, tuple(frames))))


def _steal(
    state: FormState, links: list[LinkState], now: float, out: list[RelayAction]
) -> dict[PeerId, list[FrameId]]:
    """The end game: an idle peer takes over the last half of the frames that the most loaded late peer
    owes.

    Frames that the late peer has sent already come twice and count as duplicates.
    """
    transfer, stolen = state.transfer, dict[PeerId, list[FrameId]]()
    for idle in [link for link in links if not transfer.asked_of(link.peer)]:
        late = [
            link.peer
            for link in links
            if transfer.asked_until(link.peer) <= now + REPAIR_S - FRAME_LATE_S
        ]
        loaded = max(late, key=lambda peer: len(transfer.asked_of(peer)), default=idle.peer)
        owed = transfer.asked_of(loaded)
        frames = [frame for frame in owed[(len(owed) + 1) // 2 :] if _is_known(idle, frame, state)]
        if frames:
            out.append(Tell(loaded, FramesCancelled(state.form, tuple(frames))))
            for frame in frames:
                transfer.give_back(frame, loaded)
                transfer.ask(frame, idle.peer, now + REPAIR_S)
            stolen[idle.peer] = frames
    return stolen


def _to_be_asked(state: FormState) -> Iterator[FrameId]:
    transfer = state.transfer
    if state.needs_table:
        return iter((FIRST_TABLE,) if transfer.asked_from(FIRST_TABLE) is None else ())
    if not needs_repair(state):
        return transfer.unasked_lost()
    if state.in_end_game and transfer.missing_count <= SCAN_FRAMES_MAX:
        return reversed(list(transfer.unasked()))
    return transfer.unasked()


def give_back_overdue(
    state: FormState, links: dict[PeerId, LinkState], now: float, out: list[RelayAction]
) -> None:
    """Takes back requests for frames that did not come in time."""
    late: dict[PeerId, list[FrameId]] = {}
    for frame, peer in state.transfer.overdue(now):
        state.transfer.give_back(frame, peer)
        late.setdefault(peer, []).append(frame)
    for peer, frames in late.items():
        links[peer].quiet_until = now + SOURCE_QUIET_S
        out.append(Tell(peer, FramesCancelled(state.form, tuple(frames))))


def cancel(state: FormState, frame: FrameId, sender: PeerId | None, out: list[RelayAction]) -> None:
    """Tells the peer that was asked for this frame that it need not send it any more.

    sender: the peer that sent the frame as a repair; it needs no message.
    """
    asked = state.transfer.asked_from(frame)
    if asked is not None and asked != sender:
        out.append(Tell(asked, FramesCancelled(state.form, (frame,))))


def note_held(link: LinkState, held: FramesHeld) -> None:
    """Notes which frames the peer says it holds. PeerFault: more than HELD_FRAMES_MAX of a form."""
    form, frames = held.form, held.frames()
    if not frames:
        link.has.pop(form, None)
        return
    if len(link.has.get(form, ())) + len(frames) > HELD_FRAMES_MAX:
        raise PeerFault(f"says that it holds over {HELD_FRAMES_MAX} frames of one form")
    if form not in link.has and len(link.has) >= STRIPED_FORMS_MAX:
        del link.has[next(iter(link.has))]
    link.has.setdefault(form, set()).update(frames)


def note_wanted(link: LinkState, wanted: FramesWanted) -> None:
    """Notes what the peer asks for. PeerFault: more than WANTED_FRAMES_MAX at a time."""
    wants = [(wanted.stream, wanted.form, frame) for frame in wanted.frames]
    if len(link.wants) + len(wants) > WANTED_FRAMES_MAX:
        raise PeerFault(f"wants more than {WANTED_FRAMES_MAX} frames at a time")
    link.wants.extend(wants)


def answer_want(link: LinkState, forms: dict[FormId, FormState], out: list[RelayAction]) -> bool:
    """Gives the link the next frame that its peer asked for, or a refusal. False: none can be given now.

    If the peer asks for a first table that is still on its way here, the answer waits until the
    table has come, because the peer cannot begin without it.
    """
    for place, (stream, form, frame) in enumerate(link.wants):
        state = forms.get(form)
        held = state is not None and state.transfer.holds(frame)
        if frame == FIRST_TABLE and not held and state is not None and state.plan is not None:
            continue
        out.append(SendFrame(link.peer, stream, form, frame, 0, header_only=not held))
        link.unsent += 1
        del link.wants[place]
        return True
    return False


def _working_parents(state: FormState) -> set[PeerId]:
    stripes = state.stripes.values()
    return {stripe.parent for stripe in stripes if stripe.parent is not None and not stripe.broken}


def _choose(
    frame: FrameId,
    links: list[LinkState],
    spare: dict[PeerId, int],
    parents: set[PeerId],
    state: FormState,
) -> PeerId | None:
    """The peer to ask for the frame: the least busy of the peers that have it, or else of those
    that may have it.
    """
    known = [link.peer for link in links if _is_known(link, frame, state)]
    others = parents | _given(state, frame)
    maybe = known or [link.peer for link in links if link.peer in others]
    return max(maybe, key=lambda peer: spare[peer], default=None)


def _is_known(link: LinkState, frame: FrameId, state: FormState) -> bool:
    """Whether the peer has the frame, according to the peer or the coordinator."""
    return link.peer in state.sources or frame in link.has.get(state.form, ())


def _given(state: FormState, frame: FrameId) -> set[PeerId]:
    """At the root, the children that were sent a frame that is lost here, or wait for it."""
    if not state.is_root or frame not in state.transfer.lost:
        return set()
    return {
        child
        for stripe in state.stripes.values()
        if frame in stripe.logged
        for child in stripe.children
    }


def _repair_stream(link: LinkState, form: FormId) -> int:
    if form not in link.repairs:
        link.repairs[form] = link.new_stream()
    return link.repairs[form]
