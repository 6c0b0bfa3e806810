"""The send window of one child: how far ahead of it the root binds frames to its stripe.

A child with several children reports how far it has passed a stripe on. The window is what it
forwards in one round trip plus PASS_S, at its measured forwarding rate.

    silent --(first report)--> measuring: no limit --(report after PASS_START_S)--> a limit

A lower rate takes over only slowly (PASS_RATE_DECAY), because a child that had nothing to pass on
is not slow. Not here: the reports (`stripes.Stripe.tell_passed`), and what is bound.
"""

import math

PASS_EVERY = 4  # frames passed on between two reports
PASS_FRAMES_MIN = 16  # the smallest window: enough frames under way to measure a rate
# One frame is bound beyond the window this often, so that no peer below the child takes its parent
# for stalled.
PASS_TRICKLE_S = 0.3
# A relay may be this far behind: a short stop does not empty its queue, and a slow relay delays the
# last frame by no more than this.
PASS_S = 0.5
PASS_START_S = 1.0  # from the first report until the rate is used
PASS_RATE_S = 0.1  # the shortest time over which a rate is measured
PASS_RATE_DECAY = 0.8  # a measurement lowers the rate to no less than this share of it


class SendWindow:
    """The window of one child in one stripe, counted in sequence numbers of the stripe.

    said: how far the child reports to have passed the stripe on. heard: whether it has reported.
    limit: no frame from this number on is bound for the child; None: there is no limit yet.
    """

    __slots__ = (
        "_at",
        "_from",
        "_mark",
        "_marked_at",
        "_passed",
        "_rate",
        "_trip_s",
        "heard",
        "limit",
        "said",
    )

    def __init__(self, first: int) -> None:
        self.heard = False
        self.limit: int | None = None
        self.said = self._passed = first
        self._at = self._from = self._marked_at = self._rate = 0.0
        # The number whose round trip is being timed; infinite while none is.
        self._mark = math.inf
        self._trip_s: float | None = None

    def bound(self, cursor: int, now: float) -> None:
        """Frames before the cursor are bound for the child; one round trip at a time is timed."""
        if self._mark == math.inf:
            self._mark, self._marked_at = cursor, now

    def passed_on(self, sequence: int, now: float) -> None:
        """The child reports that it has passed on everything before this number."""
        self.said = max(sequence, self.said)
        if not self.heard:
            self.heard, self._passed, self._at, self._from = True, sequence, now, now + PASS_START_S
        elif now - self._at >= PASS_RATE_S:
            self._rate = max(
                (sequence - self._passed) / (now - self._at), PASS_RATE_DECAY * self._rate
            )
            self._passed, self._at = sequence, now
        if sequence >= self._mark:
            # The shortest trip counts, because a longer one includes time spent in queues.
            trip_s = now - self._marked_at
            self._trip_s = trip_s if self._trip_s is None else min(self._trip_s, trip_s)
            self._mark = math.inf
        if now >= self._from:
            ahead = max(PASS_FRAMES_MIN, int(((self._trip_s or 0.0) + PASS_S) * self._rate))
            # The limit never goes back: frames below it may be bound already.
            self.limit = max(self.limit or 0, sequence + ahead)
