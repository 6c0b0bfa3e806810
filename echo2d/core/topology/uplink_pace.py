"""Finds how fast a peer may send over all of its links together without losing much of what it sends.

Connections that share an uplink do not know of each other. Under bbr each probes for itself, so eight of them overfill
a short queue all the time, and up to a fifth of what they send is sent again. So the peer limits the sum of their
rates. Every LOOK_S it reads how many bytes they have sent, sent again and had acknowledged, and sets the rate:

    LOSS_MAX was sent again, and long round trips      DRAIN of the rate that was acknowledged
    HELD_LOOKS later                                   that rate
    later, while the rate is used                      GROW more at each look, and after CALM_LOOKS
                                                       twice as much at each, up to GROW_MAX

Loss without long round trips has its cause in the line and not in a queue, so sending less would not
help. The rate is reported to no other peer, and forgotten with the process.
"""

from collections import deque
from dataclasses import dataclass

# Seconds between two looks.
LOOK_S = 0.1
LOSS_MAX = 0.02
# A round trip is long if it takes at least this many times as long as the shortest one.
LONG = 1.25
# After a cut the rate is this share of the acknowledged one for this many looks, so that the queue
# drains.
DRAIN, HELD_LOOKS = 0.97, 3
GROW, GROW_MAX, CALM_LOOKS = 0.003, 0.08, 15
# The rate never falls below this many bytes/s: what an interrupted line has acknowledged says nothing
# about its rate.
RATE_MIN = 65536.0
# The acknowledged rate is taken over this many looks, and the highest of this many such rates counts.
RATE_LOOKS, ABLE_LOOKS = 3, 8


@dataclass(frozen=True, slots=True)
class Sent:
    """What all connections have done so far, in bytes without headers."""

    sent: int = 0
    again: int = 0  # sent again
    acknowledged: int = 0


class UplinkPace:
    """See the module docstring."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # without headers; None: no limit yet
        self._looks = deque[tuple[float, Sent]](maxlen=RATE_LOOKS + 1)
        self._able = deque[float](maxlen=ABLE_LOOKS)
        # Looks since the last cut, and the rate that was acknowledged then.
        self._calm, self._then = 0, 0.0

    def look(self, now: float, so_far: Sent, *, long_trips: bool) -> None:
        """Adapt the rate. `now` is in seconds, LOOK_S or more after the last look."""
        if self._looks and so_far.sent < self._looks[-1][1].sent:
            # A connection has ended, and its bytes no longer count.
            self._looks.clear()
        self._looks.append((now, so_far))
        if len(self._looks) < 2:
            return
        (began, first), (_, last) = self._looks[0], self._looks[-2]
        rate = (so_far.acknowledged - first.acknowledged) / (now - began)
        self._able.append(rate)
        self._calm += 1
        lost = so_far.again - last.again > LOSS_MAX * (so_far.sent - last.sent)
        if self.bytes_per_s is None or self._calm > HELD_LOOKS:
            if lost and long_trips:
                self._cut()
            # The rate grows only while at least 90 % of it is used.
            elif self.bytes_per_s is not None and rate > 0.9 * self.bytes_per_s:
                doublings = max(0, self._calm - HELD_LOOKS - CALM_LOOKS)
                self.bytes_per_s *= 1 + min(GROW_MAX, GROW * 2.0**doublings)
        elif self._calm == HELD_LOOKS:
            self.bytes_per_s = self._then

    def _cut(self) -> None:
        able = max(self._able)
        known = able if self.bytes_per_s is None else min(able, self.bytes_per_s)
        self._then = max(RATE_MIN, known)
        self.bytes_per_s = DRAIN * self._then
        self._calm = 0


# --- the rate is kept
#
# Not here: which link sends next.

BURST_S = 0.01  # after a pause, this many seconds' worth of bytes may be sent at once
# Bytes on the line per byte sent: headers (4.6 %), and some room for acknowledgements of received
# data.
HEADERS = 1.07


class TokenBucket:
    """A token bucket. In T seconds it lets through `(T + BURST_S) * bytes_per_s`, plus the amount
    by which the last `spend` overdrew it. bytes_per_s: the rate on the line, headers included; None: no limit. `now` is
    in seconds.
    """

    def __init__(self, bytes_per_s: float | None, *, now: float) -> None:
        self._bytes_per_s, self._at = bytes_per_s, now
        self._left = BURST_S * (bytes_per_s or 0.0)

    def change(self, bytes_per_s: float | None, *, now: float) -> None:
        """Set the rate that holds from now on."""
        self._refill(now)
        self._bytes_per_s = bytes_per_s

    def spend(self, sent: int, *, now: float) -> None:
        """Record that `sent` bytes are being sent, even if fewer are left."""
        self._refill(now)
        if self._bytes_per_s is not None:
            self._left -= HEADERS * sent

    def wait_s(self, *, now: float) -> float:
        """Seconds until something may be sent; 0: now."""
        self._refill(now)
        return 0.0 if self._bytes_per_s is None else max(0.0, -self._left / self._bytes_per_s)

    def _refill(self, now: float) -> None:
        rate = self._bytes_per_s or 0.0
        self._left = min(BURST_S * rate, self._left + (now - self._at) * rate)
        self._at = now
