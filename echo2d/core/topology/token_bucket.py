"""How much may be sent so that a line never carries more than its owner allows. Not here: whose turn it is."""

BURST_S = 0.05  # of the rate may be sent at once after a pause
HEADERS = 1.07  # bytes on the line per byte sent: headers (4.6 %), and some room for acknowledgements of what comes in


class TokenBucket:
    """In T seconds at most T + BURST_S of `bytes_per_s`, and what the last `spend` was more. `now` is in seconds."""

    def __init__(self, bytes_per_s: float, *, now: float) -> None:
        self._bytes_per_s, self._at = bytes_per_s, now
        self._left = BURST_S * bytes_per_s

    def spend(self, sent: int, *, now: float) -> None:
        """So many bytes are sent, whatever is left."""
        self._refill(now)
        self._left -= HEADERS * sent

    def wait_s(self, *, now: float) -> float:
        """How long nothing may be sent; 0: something may."""
        self._refill(now)
        return max(0.0, -self._left / self._bytes_per_s)

    def _refill(self, now: float) -> None:
        self._left = min(
            BURST_S * self._bytes_per_s, self._left + (now - self._at) * self._bytes_per_s
        )
        self._at = now
