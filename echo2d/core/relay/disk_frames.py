"""What the disk shows about one form at one peer: frames found, frames lost, the end of the search.

    found --> no peer needs to send it              lost --> asked for again; children wait for it
    lost at the root of a plan, and not back within CHILD_GONE_S --> FrameGone

Not here: which peers are asked for missing frames (`frame_repair`), and reading the disk (the
runtime).
"""

import math
from collections.abc import Iterable

from echo2d.core.base.ids import FrameId, frame_id
from echo2d.core.relay.events import (
    FormComplete,
    FormSearched,
    FrameGone,
    FramesFound,
    FramesLost,
    RelayAction,
    TableHeld,
)
from echo2d.core.relay.frame_repair import cancel
from echo2d.core.relay.streams import Links, follow_all, say_have
from echo2d.core.relay.stripes import FormState

# A frame that the root has lost is back within this time if any peer has it: the root can ask three
# peers in turn.
CHILD_GONE_S = 15.0

Finding = TableHeld | FramesFound | FramesLost | FormSearched | FormComplete


def take(
    state: FormState, links: Links, finding: Finding, now: float, out: list[RelayAction]
) -> None:
    """Applies a finding to the form's frames and streams. The caller then asks for missing frames."""
    match finding:
        case TableHeld(segment=segment, sizes=sizes):
            cancel(state, frame_id(segment, 0), None, out)
            state.transfer.learn(segment, sizes)
        case FramesFound(frames=frames):
            _found(state, links, [frame for frame in frames if state.transfer.knows(frame)], out)
        case FramesLost(frames=frames):
            _lost(state, frames, now)
        case FormSearched():
            searched(state, links, now, out)
        case FormComplete(segments=segments):
            state.transfer.finish(segments)


def searched(state: FormState, links: Links, now: float, out: list[RelayAction]) -> None:
    """Notes that the search has ended: missing frames may be asked for."""
    if not state.searched:
        state.searched = True
        state.fetched_at = now
        follow_all(links, state, now, out)


def give_up_gone(state: FormState, now: float, out: list[RelayAction]) -> None:
    """At the root, emits one FrameGone when lost frames do not come back."""
    if state.is_root and state.transfer.lost and now >= state.gone_at:
        state.gone_at = math.inf
        out.append(FrameGone(state.form, min(state.transfer.lost)))


def _found(
    state: FormState, links: Links, frames: Iterable[FrameId], out: list[RelayAction]
) -> None:
    """Holds these frames, and tells the parents that already send, so that they skip these frames."""
    fresh = [frame for frame in frames if state.transfer.hold(frame)]
    parents = {stripe.parent for stripe in state.stripes.values() if stripe.stream is not None}
    for link in [links[peer] for peer in links if peer in parents]:
        say_have(link, state, fresh, out)


def _lost(state: FormState, frames: Iterable[FrameId], now: float) -> None:
    """Notes the loss, and restarts the parents' time limits, because they had sent these frames."""
    for frame in frames:
        state.transfer.lose(frame)
    state.gone_at = now + CHILD_GONE_S
    for stripe in state.stripes.values():
        stripe.last_at = stripe.last_at if stripe.parent is None else now
