"""Limit what is sent to a rate on the line. Not here: which link sends next."""

BURST_S = 0.01  # seconds of the rate that may be sent at once after a pause
# Bytes on the line per byte sent: headers (4.6 %), and some room for acknowledgements of received
# data.
HEADERS = 1.07


class TokenBucket:
    """A token bucket. In T seconds it lets through `(T + BURST_S) * bytes_per_s`, plus the excess
    of the last `spend`. bytes_per_s: on the line; None: no limit. `now` is in seconds.
    """

    def __init__(self, bytes_per_s: float | None, *, now: float) -> None:
        self._bytes_per_s, self._at = bytes_per_s, now
        self._left = BURST_S * (bytes_per_s or 0.0)

    def change(self, bytes_per_s: float | None, *, now: float) -> None:
        """From now on the rate is another one."""
        self._refill(now)
        self._bytes_per_s = bytes_per_s

    def spend(self, sent: int, *, now: float) -> None:
        """Record that `sent` bytes are being sent, even if fewer are left."""
        self._refill(now)
        if self._bytes_per_s is not None:
            self._left -= HEADERS * sent

    def wait_s(self, *, now: float) -> float:
        """Seconds until something may be sent; 0 if it may now."""
        self._refill(now)
        return 0.0 if self._bytes_per_s is None else max(0.0, -self._left / self._bytes_per_s)

    def _refill(self, now: float) -> None:
        rate = self._bytes_per_s or 0.0
        self._left = min(BURST_S * rate, self._left + (now - self._at) * rate)
        self._at = now
