"""Opens the streams of one peer, judges whether a parent is at fault, and closes them.

Not here: what streams carry (`stripes`, `frame_repair`), and reporting a fault (`relay`).
"""

import math
from collections.abc import Sequence

from echo2d.core.base.ids import FormId, FrameId, PeerId, is_table
from echo2d.core.protocol.peer_messages import StreamEnded, StreamOpened, frames_held
from echo2d.core.relay.events import FrameVerified, RelayAction, Tell
from echo2d.core.relay.frame_set import FrameSet
from echo2d.core.relay.stripes import GAP_START_S, FormState, LinkState, StripeState, table_of
from echo2d.errors import PeerFault

# A stream is stalled when the next frame takes this many expected gaps, and at least STALL_S_MIN.
STALL_GAPS = 3.0
STALL_S_MIN = 1.0
# A parent without a stream to us for this long is reported and asked again. Sources that send
# nothing for this long are given up.
LINK_S = 5.0

Links = dict[PeerId, LinkState]


def follow(links: Links, stripe: StripeState, now: float, out: list[RelayAction]) -> None:
    """Opens the stream from the parent, if there is a link and no stream is open yet."""
    state = stripe.state
    if (
        stripe.parent not in links
        or stripe.stream is not None
        or stripe.ended
        or not state.searched
        or state.fetches
    ):
        return
    link = links[stripe.parent]
    assert state.plan is not None
    tell(link, state, out)
    number = stripe.stream = link.new_stream()
    link.incoming[number] = stripe
    stripe.broken = False
    stripe.last_at, stripe.gap_s = now, GAP_START_S
    first = len(stripe.log)
    asked = StreamOpened(number, state.form, state.plan, state.generation, stripe.number, first)
    out.append(Tell(link.peer, asked))
    if len(stripe.children) > 1 or (stripe.children and state.has_spare):
        stripe.tell_passed(out, at_once=True)


def follow_all(links: Links, state: FormState, now: float, out: list[RelayAction]) -> None:
    """Follows all stripes from now on. The parents' time limits begin now."""
    for stripe in state.stripes.values():
        stripe.last_at = now
        follow(links, stripe, now, out)


def tell(link: LinkState, state: FormState, out: list[RelayAction]) -> None:
    """Tells the peer which frames are held here, except those that it knows of already."""
    arrivals, lost = state.transfer.arrivals, state.transfer.lost
    news = [frame for frame in arrivals[link.told.get(state.form, 0) :] if frame not in lost]
    say_have(link, state, news, out)
    link.told[state.form] = len(arrivals)


def say_have(
    link: LinkState, state: FormState, frames: Sequence[FrameId], out: list[RelayAction]
) -> None:
    """Tells the peer that these frames are held here."""
    out.extend(Tell(link.peer, message) for message in frames_held(state.form, frames))


def check_frame(stripe: StripeState, event: FrameVerified) -> None:
    """Raises PeerFault if no honest parent would send this frame now."""
    frame, following = event.frame, len(stripe.log)
    if event.sequence > following:
        raise PeerFault(f"frame number {event.sequence} of a stripe; expected {following} at most")
    transfer = stripe.state.transfer
    if event.header_only and not transfer.holds(frame) and frame not in transfer.lost:
        raise PeerFault(f"frame {frame} came without payload, but is not held here")
    if event.sequence < following:
        return
    if frame in stripe.logged:
        raise PeerFault(f"frame {frame} came twice in a stripe")
    if not is_table(frame) and table_of(frame) not in stripe.logged:
        raise PeerFault(f"frame {frame} came before its table")


def what_is_wrong(links: Links, stripe: StripeState, now: float) -> str | None:
    """Why the parent of this stripe should be reported now; None: it should not.

    A stripe that is known to be broken is not judged again. A parent that sends on another stream
    works; if only this stripe stands still, the fault is further up. A parent is also at fault if
    it ended the stripe, all stripes have ended, and it does not send the missing frames as repair:
    then it never had them.
    """
    if stripe.parent is None or not stripe.state.searched or stripe.state.fetches:
        return None
    waited = now - stripe.last_at
    if stripe.ended:
        heard_at = links[stripe.parent].heard_at if stripe.parent in links else -math.inf
        lacking = stripe.state.ended and stripe.state.transfer.missing_count > 0
        return "ended too early" if lacking and min(waited, now - heard_at) >= LINK_S else None
    if stripe.stream is None:
        return "no link" if waited >= LINK_S else None
    if stripe.broken or not _more_is_due(stripe.state.transfer):
        return None
    waited = min(waited, now - links[stripe.parent].heard_at)
    return "stalled" if waited >= max(STALL_S_MIN, STALL_GAPS * stripe.gap_s) else None


def leave_parent(links: Links, stripe: StripeState, reason: str, out: list[RelayAction]) -> None:
    """Ends the stream from the parent, if one is open."""
    if stripe.stream is not None and stripe.parent is not None:
        del links[stripe.parent].incoming[stripe.stream]
        out.append(Tell(stripe.parent, StreamEnded(stripe.stream, reason)))
    stripe.stream = None


def close_stripes(links: Links, state: FormState, reason: str, out: list[RelayAction]) -> None:
    """Ends the stripe streams of this form, from parents and to children."""
    for stripe in state.stripes.values():
        leave_parent(links, stripe, reason, out)
        for child in list(stripe.child_streams.values()):
            child.close(reason, out)


def close_repairs(links: Links, form: FormId, reason: str, out: list[RelayAction]) -> None:
    """Ends the repair streams that this end opened for the form."""
    for link in links.values():
        stream = link.repairs.pop(form, None)
        if stream is not None:
            out.append(Tell(link.peer, StreamEnded(stream, reason)))


def _more_is_due(transfer: FrameSet) -> bool:
    """Whether the root still has something to send: frames, or the end of the stripe."""
    return transfer.missing_count > 0 or transfer.complete
