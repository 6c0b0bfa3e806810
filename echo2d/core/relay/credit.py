"""The credit of one stripe: how far ahead of its relay the root binds frames to it.

A relay reports how far it has passed its stripe on. What is bound and not yet passed on is its
*backlog*, of so many frames or, at the rate of its reports, so many seconds. The root binds the next
frame to the stripe with the shortest backlog in seconds, as long as that is below the credit:

    credit = max(CREDIT_FRAMES, CREDIT_TRIPS * trip * rate)

trip: seconds from the binding of a frame until the report that it was passed on; the shortest counts,
because a longer one includes time in queues. rate: frames a second that the relay passes on while it
has a backlog. So a relay always has something to pass on when the next frame comes, and never more
than a moment's work: whatever its uplink turns out to be, it delays nobody by more than that.

Not here: the reports (`stripes.StripeState.tell_passed`), and the choice (`stripes.FormState`).
"""

import math
from collections import deque

# Enough that a relay passes one frame on while the next one is under way.
CREDIT_FRAMES = 3
# Round trips' worth of frames. One is under way; what is more bridges a late report.
CREDIT_TRIPS = 2.0
# Reports over which a rate is taken.
RATE_REPORTS = 8


class Credit:
    """Of one stripe at the root. Counts in sequence numbers of the stripe.

    passed: everything before it has been passed on.
    """

    __slots__ = ("_mark", "_marked_at", "_reports", "_trip_s", "passed")

    def __init__(self, passed: int = 0) -> None:
        self.passed = passed
        # The last reports, (seconds, sequence number), since the relay last had nothing to pass on.
        self._reports = deque[tuple[float, int]](maxlen=RATE_REPORTS)
        # The number whose trip is being timed; infinite while none is.
        self._mark, self._marked_at = math.inf, 0.0
        self._trip_s: float | None = None

    def bound(self, end: int, now: float) -> None:
        """Frames before `end` are bound to the stripe."""
        if self._mark == math.inf:
            self._mark, self._marked_at = end, now
        if not self._reports or self._reports[-1][1] == end - 1:
            self._reports.append((now, end - 1))

    def passed_on(self, sequence: int, now: float) -> None:
        """The relays report that everything before this number was passed on."""
        if sequence <= self.passed:
            return
        self.passed = sequence
        self._reports.append((now, sequence))
        if sequence >= self._mark:
            trip_s = now - self._marked_at
            self._trip_s = trip_s if self._trip_s is None else min(self._trip_s, trip_s)
            self._mark = math.inf

    @property
    def rate(self) -> float:
        """Frames a second that are passed on; 0: not known yet."""
        if len(self._reports) < 2:
            return 0.0
        (began, first), (ended, last) = self._reports[0], self._reports[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    def allows(self, end: int) -> bool:
        """Whether another frame may be bound to a stripe that ends here."""
        return end - self.passed < max(
            CREDIT_FRAMES, CREDIT_TRIPS * (self._trip_s or 0.0) * self.rate
        )

    def backlog_s(self, end: int) -> float:
        """Seconds until the relay has passed on what is bound; of unknown relays all are as fast."""
        waiting = end - self.passed
        return waiting / self.rate if self.rate else float(waiting)
