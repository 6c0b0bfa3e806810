"""The credit of one stripe: how many frames the root binds ahead of the stripe's relay.

A relay reports how far it has passed its stripe on, and how many frames wait there. What is bound and
not yet passed on is the stripe's *backlog*. The root binds the next frame to the stripe whose backlog
is passed on first, as long as the backlog is below the stripe's credit:

    a report of 0 waiting, and the credit was used up       credit + 1
    never below WAITING + 1 waiting since the last change   credit - 1, once in as many reports

So a relay that runs dry gets more, however long the way to it is, twice as many in a round trip; and a
queue that stands at a relay goes. A relay always has something to pass on when the next frame comes,
and never more than a moment's work: whatever its uplink turns out to be, it delays nobody by more.

Not here: the reports (`stripes.StripeState.tell_passed`), and the choice (`stripes.FormState`).
"""

from collections import deque

# At first: one frame is passed on, one is under way, and one waits.
CREDIT_FRAMES = 3
# In a large swarm, where reports come through many peers, and rates made the plan.
LARGE_CREDIT_FRAMES = 64
# Of 64 KiB: what 2 Gbit/s carry in a quarter of a second. No report makes a credit larger.
CREDIT_FRAMES_MAX = 1024
# So many waiting frames bridge a late arrival.
WAITING = 2
# When nothing has moved for this long, and for so many usual gaps, a frame is bound beyond the credit.
# So nobody below a healthy relay takes its parent for stalled because another peer stands still.
TRICKLE_S, TRICKLE_GAPS = 0.3, 2.0
# Reports over which a rate is taken.
RATE_REPORTS = 8


class Credit:
    """The root keeps one for each stripe, and counts in the stripe's sequence numbers.

    passed: everything before it has been passed on. frames: the credit.
    """

    __slots__ = ("_least", "_moved_at", "_reports", "_seen", "_used_up", "frames", "passed")

    def __init__(self, passed: int = 0, frames: int = CREDIT_FRAMES) -> None:
        self.passed, self.frames = passed, frames
        # The last frame bound or passed on.
        self._moved_at = 0.0
        # Whether the credit has held a frame back since it last changed.
        self._used_up = False
        # The fewest waiting frames, and the reports, since then.
        self._least, self._seen = CREDIT_FRAMES_MAX, 0
        # The last reports, (seconds, sequence number), and when a relay without backlog was given a frame.
        self._reports = deque[tuple[float, int]](maxlen=RATE_REPORTS)

    def bound(self, end: int, now: float) -> None:
        """Frames before `end` are bound to the stripe."""
        self._moved_at = now
        if not self._reports or self._reports[-1][1] == end - 1:
            self._reports.append((now, end - 1))

    def passed_on(self, sequence: int, waiting: int, now: float) -> None:
        """The relays report that everything before this number was passed on, and what waits."""
        if sequence <= self.passed:
            return
        self.passed, self._moved_at = sequence, now
        self._reports.append((now, sequence))
        self._seen += 1
        self._least = min(self._least, waiting)
        if waiting == 0 and self._used_up:
            self._change(min(self.frames + 1, CREDIT_FRAMES_MAX))
        elif self._seen >= self.frames:
            self._change(max(self.frames - (self._least > WAITING), CREDIT_FRAMES))

    def _change(self, frames: int) -> None:
        self.frames, self._used_up = frames, False
        self._least, self._seen = CREDIT_FRAMES_MAX, 0

    @property
    def rate(self) -> float:
        """Frames a second that are passed on; 0: not known yet."""
        if len(self._reports) < 2:
            return 0.0
        (began, first), (ended, last) = self._reports[0], self._reports[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    def allows(self, end: int, now: float) -> bool:
        """Whether another frame may be bound to a stripe that ends here."""
        if end - self.passed < self.frames:
            return True
        self._used_up = True
        gap_s = 1 / self.rate if self.rate else 0.0
        return now >= self._moved_at + max(TRICKLE_S, TRICKLE_GAPS * gap_s)

    def backlog_s(self, end: int) -> float:
        """Seconds until the relay has passed on what is bound; of unknown relays all are as fast."""
        waiting = end - self.passed
        return waiting / self.rate if self.rate else float(waiting)
