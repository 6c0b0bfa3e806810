"""What the two ends of a link measure while frames move: how fast they came, and how long they waited.

The coordinator turns both into the sender's rate (`uplink_rates`).
"""

from dataclasses import dataclass

IDLE_S = 1.0  # a longer gap between frames means that the sender had nothing to send


@dataclass(slots=True)
class LinkMeter:
    """Payload that came over one link and the seconds that it took, without idle time.

    The time is the sum of the gaps between frames that are shorter than IDLE_S.
    """

    payload_bytes: int = 0
    seconds: float = 0.0
    last_at: float | None = None  # of the last frame

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


@dataclass(slots=True)
class BacklogMeter:
    """Measures for how long a link had more to send than it took.

    Call `look` whenever frames are given to the link, and only then give it frames. So if some of
    what was given before is still unsent at a look, the link was busy ever since the last look.
    """

    seconds: float = 0.0
    looked_at: float = 0.0

    def look(self, now: float, *, waits: bool) -> None:
        """waits: whether some of what was given before is still unsent."""
        if waits:
            self.seconds += now - self.looked_at
        self.looked_at = now

    def take(self) -> float:
        """The backlogged seconds since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken
