"""Measures, at a receiver, how fast frames come over a link.

From this the coordinator computes the sender's rate (`uplink_rates`). What the sender measures is
in `relay/busy_meter`.
"""

from dataclasses import dataclass

IDLE_S = 1.0  # a longer gap between frames means that the sender had nothing to send


@dataclass(slots=True)
class LinkMeter:
    """The payload that came over one link, and the seconds that it took, without idle time.

    The time is the sum of the gaps between frames that are shorter than IDLE_S.
    """

    payload_bytes: int = 0
    seconds: float = 0.0
    last_at: float | None = None  # when the last frame came

    def count(self, payload_bytes: int, now: float) -> None:
        """A frame arrived. The first one after an idle time does not count."""
        gap_s = None if self.last_at is None else now - self.last_at
        self.last_at = now
        if gap_s is not None and gap_s < IDLE_S:
            self.payload_bytes += payload_bytes
            self.seconds += gap_s

    def take(self) -> tuple[int, float]:
        """The bytes and seconds since the last call."""
        taken = self.payload_bytes, self.seconds
        self.payload_bytes, self.seconds = 0, 0.0
        return taken
