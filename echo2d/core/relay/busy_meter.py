"""Measures how long a sender's uplink had something to send."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyMeter:
    """How many seconds a peer's links had frames that they had not sent yet.

    Links are given no more than the uplink takes. So while a frame waits, the uplink, or something
    slower on the way, is the limit.
    """

    seconds: float = 0.0
    since: float | None = None

    def note(self, now: float, *, busy: bool) -> None:
        """Record that from now on the uplink is busy, or not."""
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if busy else None

    def take(self, now: float) -> float:
        """The busy seconds since the last call."""
        self.note(now, busy=self.since is not None)
        taken, self.seconds = self.seconds, 0.0
        return taken
