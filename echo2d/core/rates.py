"""From what receivers measured to bytes per second of links and uplinks. Not here: pacing, and who uses the rates.

A peer's uplink is what its receivers together got from it at the same time, never what it declares. So the links that
count are those of one plan.
"""

from collections.abc import Collection

from echo2d.core.bounded import keep_newest
from echo2d.core.ids import PeerId

HALF_LIFE_S = 10.0  # of transfer time: a sample of 10 s weighs as much as all before it
SAMPLE_S_MIN = 0.05  # a shorter sample measures buffers, not the link
JUMP_MAX = 4.0  # one sample moves the estimate at most towards so many times its value: bursts out of a buffer
UPLINK_MIN = 1.0  # bytes/s: no link is slower, and what a receiver reports must not make the planner divide by zero
LINKS_MAX = 16384  # 1,000 peers in 16 stripes; the link heard of longest ago makes room


class Rate:
    """A smoothed rate: each sample weighs by its length, older ones fade with HALF_LIFE_S of transfer time."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None

    def add(self, payload_bytes: int, seconds: float) -> None:
        """So many bytes came in so much time of transfer."""
        if seconds < SAMPLE_S_MIN:
            return
        rate = payload_bytes / seconds
        if self.bytes_per_s is None:
            self.bytes_per_s = rate
            return
        fade = 0.5 ** (seconds / HALF_LIFE_S)
        self.bytes_per_s = fade * self.bytes_per_s + (1 - fade) * min(rate, JUMP_MAX * self.bytes_per_s)


class Rates:
    """The rate of every link that was measured, by sender and receiver."""

    def __init__(self) -> None:
        self._links: dict[tuple[PeerId, PeerId], Rate] = {}

    def add(self, sender: PeerId, receiver: PeerId, payload_bytes: int, seconds: float) -> None:
        """The receiver got so many bytes from the sender in so much time of transfer."""
        rate = self._links.pop((sender, receiver), None) or Rate()
        rate.add(payload_bytes, seconds)
        self._links[sender, receiver] = rate
        keep_newest(self._links, LINKS_MAX)

    def uplink(self, peer: PeerId) -> float | None:
        """Bytes/s that this peer's receivers get of it together, at least UPLINK_MIN; None: not measured."""
        rates = [rate.bytes_per_s for (sender, _), rate in self._links.items() if sender == peer]
        known = [rate for rate in rates if rate is not None]
        return max(UPLINK_MIN, sum(known)) if known else None

    def keep(self, links: Collection[tuple[PeerId, PeerId]]) -> None:
        """Only these (sender, receiver) go on: others carry nothing at the same time as they do."""
        self._links = {pair: rate for pair, rate in self._links.items() if pair in links}

    def check(self) -> None:
        """Bounded, and no rate is negative."""
        assert len(self._links) <= LINKS_MAX
        assert all(rate.bytes_per_s is None or rate.bytes_per_s >= 0 for rate in self._links.values())
