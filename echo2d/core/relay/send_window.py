"""How far ahead of a relay its stripe is bound: what it passes on in the time of the way there and back, and PASS_S.

    nothing said --(first word)--> its rate is being found, weights alone decide --(PASS_START_S)--> a limit

A child with several children says how far it has passed a stripe on. The rate is about the highest of the last second,
for who had nothing to pass on is not slow. Not here: who says what (`stripes.Stripe.tell_passed`), and what is bound.
"""

import math

PASS_EVERY = 4  # frames passed on between two words about it
PASS_FRAMES_MIN = 16  # the smallest window: enough under way to find a rate by
PASS_TRICKLE_S = 0.3  # so often a frame is bound beyond the window: nobody below is to think that its parent stalls
PASS_S = 0.5  # what a relay may be behind: short stops do not empty it, and a slow one is not later than this
PASS_START_S = 1.0  # until a child's rate is known
PASS_RATE_S = 0.1  # over which it is taken
PASS_RATE_DECAY = 0.8  # of the rate before, for a lower one


class SendWindow:
    """Of one child in one stripe. said: how far it has passed on; heard: whether it has said anything.

    limit: nothing is bound for it from this sequence number on; None: anything may be. The rest is how that is found:
    the last `mark` that was bound and when, the shortest `trip_s` from there to the word of it, frames/s.
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
        self._mark = math.inf
        self._trip_s: float | None = None

    def bound(self, cursor: int, now: float) -> None:
        """The child is given what comes before the cursor; one mark at a time is timed."""
        if self._mark == math.inf:
            self._mark, self._marked_at = cursor, now

    def passed_on(self, sequence: int, now: float) -> None:
        """The child says so."""
        self.said = max(sequence, self.said)
        if not self.heard:
            self.heard, self._passed, self._at, self._from = True, sequence, now, now + PASS_START_S
        elif now - self._at >= PASS_RATE_S:
            self._rate = max(
                (sequence - self._passed) / (now - self._at), PASS_RATE_DECAY * self._rate
            )
            self._passed, self._at = sequence, now
        if sequence >= self._mark:
            trip_s = now - self._marked_at
            self._trip_s = trip_s if self._trip_s is None else min(self._trip_s, trip_s)
            self._mark = math.inf
        if now >= self._from:
            ahead = max(PASS_FRAMES_MIN, int(((self._trip_s or 0.0) + PASS_S) * self._rate))
            self.limit = max(self.limit or 0, sequence + ahead)
