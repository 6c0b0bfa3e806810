"""The credit of one stripe: how many frames the root binds ahead of the stripe's relay.

A relay reports how far it has passed its stripe on, and how many frames wait there. The frames that
are bound and not yet passed on are the stripe's *backlog*. The root binds the next frame to the
stripe whose backlog will be passed on first, as long as that backlog is below the stripe's credit:

    a report of 0 waiting, and the credit was used up       credit + 1
    never below WAITING + 1 waiting since the last change   credit - 1, once per `credit` reports

So a relay that runs dry gets more, however far away it is: its credit doubles in a round trip. A
standing queue at a relay shrinks. When the next frame comes, a relay still has something to pass
on, but never more than a moment's work. So even a slow uplink delays other peers by no more than
this moment.

Not here: the reports (`stripes.StripeState.tell_passed`), and the choice (`stripes.FormState`).
"""

from collections import deque

# The first credit: one frame is passed on, one is under way, and one waits.
CREDIT_FRAMES = 3
# The first credit in a large swarm, where reports come through many peers and the plan is made from
# rates.
LARGE_CREDIT_FRAMES = 64
# A credit never grows beyond this: frames of 64 KiB that 2 Gbit/s carry in a quarter of a second.
CREDIT_FRAMES_MAX = 1024
# This many waiting frames bridge a late arrival.
WAITING = 2
# When nothing has moved for this long, and for this many usual gaps, a frame is bound beyond the
# credit. Otherwise, when one peer stands still, the peers below a healthy relay would take their
# parent for stalled.
TRICKLE_S, TRICKLE_GAPS = 0.3, 2.0
# A rate is measured over this many reports.
RATE_REPORTS = 8


class Credit:
    """The root keeps one Credit for each stripe, and counts frames by the stripe's sequence
    numbers.
    """

    __slots__ = ("_least", "_moved_at", "_reports", "_seen", "_used_up", "frames", "passed")

    def __init__(self, passed: int = 0, frames: int = CREDIT_FRAMES) -> None:
        self.passed, self.frames = passed, frames  # the credit
        # When the last frame was bound or passed on.
        self._moved_at = 0.0
        # Whether the credit has held a frame back since it last changed.
        self._used_up = False
        # The fewest waiting frames, and the number of reports, since the credit last changed.
        self._least, self._seen = CREDIT_FRAMES_MAX, 0
        # (seconds, sequence number) of the last reports, and of frames bound while there was no backlog.
        self._reports = deque[tuple[float, int]](maxlen=RATE_REPORTS)

    def bound(self, end: int, now: float) -> None:
        """Record that the frames before `end` are bound to the stripe."""
        self._moved_at = now
        if not self._reports or self._reports[-1][1] == end - 1:
            self._reports.append((now, end - 1))

    def passed_on(self, sequence: int, waiting: int, now: float) -> None:
        """Record a report: everything before this number was passed on, and this many frames wait."""
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
        """How many frames a second are passed on; 0: not known yet."""
        if len(self._reports) < 2:
            return 0.0
        (began, first), (ended, last) = self._reports[0], self._reports[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    def allows(self, end: int, now: float) -> bool:
        """Whether another frame may be bound to a stripe of which the frames before `end` are bound."""
        if end - self.passed < self.frames:
            return True
        self._used_up = True
        gap_s = 1 / self.rate if self.rate else 0.0
        return now >= self._moved_at + max(TRICKLE_S, TRICKLE_GAPS * gap_s)

    def backlog_s(self, end: int) -> float:
        """Seconds until the relay has passed on the backlog. A relay without a rate counts as passing on
        one frame a second.
        """
        waiting = end - self.passed
        return waiting / self.rate if self.rate else float(waiting)
