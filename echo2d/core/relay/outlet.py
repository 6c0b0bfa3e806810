"""Chooses the frame that a peer sends next: one writer for all of its links.

At most UNSENT_FRAMES frames are given to links and not yet sent. So the uplink has no queue, and each frame is chosen
when it can leave. A link that has not sent its frames for SLOW_S, and for SLOW_TIMES times as long as usual, is slow.
The frames of a slow link do not count, because the link is slow and not the uplink, and a slow link must not hold up
other links (I6). A slow link gets no more frames until it has sent these.

The order of sending, first come, first served within each line:

    1. frames of stripes that relays pass on; at the root one is bound if none waits
    2. single frames that a peer asked for
    3. frames of the spare stripe; at the root one is bound if none waits
"""

from collections import deque
from collections.abc import Iterable

from echo2d.core.base.ids import FormId
from echo2d.core.relay.busy_meter import BusyMeter
from echo2d.core.relay.events import RelayAction
from echo2d.core.relay.frame_repair import answer_want
from echo2d.core.relay.stripes import ChildStream, FormState, LinkState, StripeState

Forms = dict[FormId, FormState]
# All links together have at most this many unsent frames: one is being sent while the next is chosen.
UNSENT_FRAMES = 2
# A link is slow if it has not sent a frame for SLOW_S seconds, and for SLOW_TIMES times as long as usual. bbr sometimes
# sends next to nothing for 0.2 s, and a link that repairs a loss may stand still for as long; other links must not wait
# for this.
SLOW_S, SLOW_TIMES = 0.05, 4.0


class Outlet:
    """See the module docstring. forms: the relay's own. busy: the meter of the uplink."""

    def __init__(self, forms: Forms, busy: BusyMeter) -> None:
        self._forms, self._meter = forms, busy
        # Links with unsent frames, and since when, the longest first. Slow links are not in `_busy`.
        self._busy: dict[LinkState, float] = {}
        self._slow: dict[LinkState, float] = {}
        # The usual time from giving a frame to a link until it is sent, in seconds; None: not known yet.
        self._usual_s: float | None = None
        # Links whose peers asked for single frames.
        self._asking: dict[LinkState, None] = {}
        # Streams that may have a frame to send: those of ordinary stripes, and those of spare ones.
        self._lines = deque[ChildStream](), deque[ChildStream]()

    def put(self, child: ChildStream) -> None:
        """Queue this stream, if it has a frame to send."""
        if not child.queued and child.ready:
            child.queued = True
            self._lines[child.stripe.spare > 0].append(child)

    def put_all(self, stripe: StripeState) -> None:
        for child in stripe.child_streams.values():
            self.put(child)

    def wanted(self, link: LinkState) -> None:
        """Record that the peer asked for single frames."""
        self._asking[link] = None

    def sent(self, link: LinkState, now: float) -> None:
        """Record that the link has sent what it was given."""
        link.unsent, link.slow = 0, False
        since = (self._slow if link in self._slow else self._busy).pop(link, None)
        if since is not None:
            usual_s = now - since if self._usual_s is None else self._usual_s
            # The last time counts for a fifth of the new average.
            self._usual_s = usual_s + 0.2 * (now - since - usual_s)
        for child in link.child_streams:
            self.put(child)

    def lost(self, link: LinkState) -> None:
        """Forget the link: it is down."""
        for links in (self._asking, self._busy, self._slow):
            links.pop(link, None)

    def frees_at(self) -> float | None:
        """When the next busy link counts as slow, so that others get its turn; None: no link is busy."""
        return next((since + self._slow_s for since in self._busy.values()), None)

    @property
    def _slow_s(self) -> float:
        return max(SLOW_S, SLOW_TIMES * (self._usual_s or 0.0))

    def send(self, now: float, out: list[RelayAction]) -> None:
        """Give frames to links while there is room."""
        for link in self._late(now):
            link.slow = True
            self._slow[link] = self._busy.pop(link)
        while sum(link.unsent for link in self._busy) < UNSENT_FRAMES:
            if not self._send_one(now, out):
                break
        self._meter.note(now, busy=bool(self._busy))
        for state in self._roots():
            state.end_if_bound(out)

    def _late(self, now: float) -> list[LinkState]:
        return [link for link, since in self._busy.items() if now >= since + self._slow_s]

    def _send_one(self, now: float, out: list[RelayAction]) -> bool:
        for spare in (False, True):
            child = self._next(self._lines[spare]) or self._bound(now, out, spare=spare)
            if child is not None:
                self._given(child.link, now)
                child.send(now, out)
                if child.is_open:
                    self.put(child)
                return True
            if not spare and self._answer_one(now, out):
                return True
        return False

    def _answer_one(self, now: float, out: list[RelayAction]) -> bool:
        for link in list(self._asking):
            if not link.wants:
                del self._asking[link]
            elif link.has_room and answer_want(link, self._forms, out):
                # The other links come next.
                self._asking[link] = self._asking.pop(link)
                self._given(link, now)
                return True
        return False

    def _given(self, link: LinkState, now: float) -> None:
        self._busy.setdefault(link, now)

    def _next(self, line: deque[ChildStream]) -> ChildStream | None:
        """The first stream that can send. Others are queued again when their link has room or a frame
        comes.
        """
        while line:
            child = line.popleft()
            child.queued = False
            if child.is_open and child.ready and child.link.has_room:
                return child
        return None

    def _bound(self, now: float, out: list[RelayAction], *, spare: bool) -> ChildStream | None:
        """At the root: bind a frame, and return a stream that can send it."""
        for state in self._roots():
            stripe = state.bind(now, out, spare=spare)
            if stripe is not None:
                self.put_all(stripe)
                return self._next(self._lines[spare])
        return None

    def _roots(self) -> Iterable[FormState]:
        return [state for state in self._forms.values() if state.is_root]
