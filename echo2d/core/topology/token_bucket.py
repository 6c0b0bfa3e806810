"""Limit what is sent to the rate that a line's owner allows. Not here: which link sends next."""

BURST_S = 0.05  # seconds of the rate that may be sent at once after a pause
# Bytes on the line per byte sent: headers (4.6 %), and some room for acknowledgements of received
# data.
HEADERS = 1.07


class TokenBucket:
    """A token bucket. In T seconds it lets through `(T + BURST_S) * bytes_per_s`, plus the excess
    of the last `spend`. `now` is in seconds.
    """

    def __init__(self, bytes_per_s: float, *, now: float) -> None:
        self._bytes_per_s, self._at = bytes_per_s, now
        self._left = BURST_S * bytes_per_s

    def spend(self, sent: int, *, now: float) -> None:
        """Record that `sent` bytes are being sent, even if fewer are left."""
        self._refill(now)
        self._left -= HEADERS * sent

    def wait_s(self, *, now: float) -> float:
        """Seconds until something may be sent; 0 if it may now."""
        self._refill(now)
        return max(0.0, -self._left / self._bytes_per_s)

    def _refill(self, now: float) -> None:
        self._left = min(
            BURST_S * self._bytes_per_s, self._left + (now - self._at) * self._bytes_per_s
        )
        self._at = now
