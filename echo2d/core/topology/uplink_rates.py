"""Estimates each peer's uplink in bytes/s, from what its receivers got and how long it was busy.

While a version spreads, receivers report how many bytes came over each link and in how many seconds of
transfer, and senders report for how many seconds their uplink had something to send. A version gives
one sample for every peer that passed something on:

    busy for HELD_UP of the time and for BUSY_S   bytes / busy seconds: the rate
    else                                          bytes / seconds of transfer: a lower bound

A rate that was measured before is averaged with the new one. Rates are used to predict how long a
version takes, to price it, and to plan for large swarms. Nothing else depends on them: credits find
out what a relay can pass on (`relay/credit`).

A single peer's report has little influence. A sender's busy time counts only if it is at least HELD_UP
of its receivers' transfer time. Of several receivers the median counts, and no receiver is believed
to have got more than the form.
Not here: how the two ends measure (`link_meters`).
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median, median_low

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.topology.plan import Plan

# If a sender was busy for less than this share of its receivers' transfer time, its uplink was not the
# limit.
HELD_UP = 0.5
# A sample of a shorter busy time shows only start-up and buffers.
BUSY_S = 0.5
# A shorter transfer is only a burst out of buffers.
SAMPLE_S_MIN = 0.05
# A rate within this factor of the usual one counts as the usual one, because plans for equal peers are
# simple.
ALIKE = 1.15
# One version changes a rate by at most this factor.
JUMP_MAX = 4.0
# No real link has fewer bytes/s, and a receiver's report must not make the planner divide by zero.
UPLINK_MIN = 1.0
# At most this many peers have a rate, connected or not; the one with the oldest sample is evicted.
_PEERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PeerRate:
    """The rate of one peer, as the ledger keeps it."""

    peer: PeerId
    bytes_per_s: float
    # Whether the peer's uplink was the limit; if not, the rate is only a lower bound.
    held_up: bool

    def then(self, newer: "PeerRate") -> "PeerRate":
        """The peer's rate after another version gave the sample `newer`."""
        if not newer.held_up:
            return PeerRate(self.peer, max(self.bytes_per_s, newer.bytes_per_s), self.held_up)
        if not self.held_up:
            return newer
        low, high = self.bytes_per_s / JUMP_MAX, self.bytes_per_s * JUMP_MAX
        return PeerRate(
            self.peer, math.sqrt(self.bytes_per_s * min(max(newer.bytes_per_s, low), high)), True
        )


@dataclass(slots=True)
class _Link:
    payload_bytes: int = 0
    seconds: float = 0.0


class Rates:
    """The uplinks of all measured peers, and the reports about the version that spreads.

    kept: the rates that an earlier process measured.
    """

    def __init__(self, kept: Iterable[PeerRate] = ()) -> None:
        self._uplinks = {one.peer: one for one in kept}
        self._plan: Plan | None = None
        self._links: dict[PeerId, dict[PeerId, _Link]] = {}
        self._busy_s: dict[PeerId, float] = {}
        self._bound()

    def uplink(self, peer: PeerId) -> float | None:
        """The bytes/s that the peer can send at least; None: not measured."""
        known = self._uplinks.get(peer)
        return None if known is None else known.bytes_per_s

    def to_plan_with(self, peers: Collection[PeerId]) -> dict[PeerId, float]:
        """The rates in bytes/s to plan with, for the measured ones of these peers."""
        return {peer: self._planned(self._uplinks[peer]) for peer in peers if peer in self._uplinks}

    def _planned(self, one: PeerRate) -> float:
        rate = one.bytes_per_s if one.held_up else max(one.bytes_per_s, self._usual)
        return self._usual if self._usual / ALIKE <= rate <= self._usual * ALIKE else rate

    def begin(self, plan: Plan | None) -> None:
        """A version begins to spread by this plan. Reports about links outside the plan do not count."""
        self._plan, self._links, self._busy_s = plan, {}, {}

    def received(
        self, sender: PeerId, receiver: PeerId, payload_bytes: int, seconds: float
    ) -> None:
        """The receiver reports new payload from the sender and the seconds of transfer it took."""
        if self._plan is not None and (sender, receiver) in self._plan.shares:
            link = self._links.setdefault(sender, {}).setdefault(receiver, _Link())
            link.payload_bytes = min(link.payload_bytes + payload_bytes, self._plan.job.wire_bytes)
            link.seconds += seconds

    def busy(self, sender: PeerId, seconds: float) -> None:
        """The sender reports for how many more seconds its uplink was busy."""
        if self._plan is not None and sender in self._plan.facts():
            self._busy_s[sender] = self._busy_s.get(sender, 0.0) + seconds

    def judge(self) -> tuple[PeerRate, ...]:
        """The version has ended. Returns the rates that have changed."""
        changed = []
        for sender in self._links:
            sample, known = self._sample(sender), self._uplinks.get(sender)
            if sample is None:
                continue
            rate = sample if known is None else known.then(sample)
            # The newest come last, because the oldest are evicted.
            self._uplinks.pop(sender, None)
            self._uplinks[sender] = rate
            if rate != known:
                changed.append(rate)
        self._bound()
        self.begin(None)
        return tuple(changed)

    def _sample(self, sender: PeerId) -> PeerRate | None:
        """What the version shows of one sender; None: nothing."""
        links = [link for link in self._links[sender].values() if link.seconds > SAMPLE_S_MIN]
        if not links or self._plan is None:
            return None
        got = [link.payload_bytes for link in links]
        # A relay sends all its children the same, but the root sends each relay what it can pass on.
        sent = sum(got) if sender == self._plan.root else median_low(got) * len(got)
        transfer_s = median([link.seconds for link in links])
        busy_s = self._busy_s.get(sender, 0.0)
        held_up = busy_s >= max(BUSY_S, HELD_UP * transfer_s)
        rate = sent / (busy_s if held_up else max(transfer_s, busy_s))
        return PeerRate(sender, max(UPLINK_MIN, rate), held_up)

    def _bound(self) -> None:
        """Evict peers above _PEERS_MAX, and find the usual rate: the median of all peers."""
        keep_newest(self._uplinks, _PEERS_MAX)
        self._usual = median([one.bytes_per_s for one in self._uplinks.values()] or [UPLINK_MIN])

    def check(self) -> None:
        """Assert the limits, and that every link is in the plan."""
        assert len(self._uplinks) <= _PEERS_MAX
        assert all(one.bytes_per_s >= UPLINK_MIN for one in self._uplinks.values())
        shares = {} if self._plan is None else self._plan.shares
        assert all(
            (sender, receiver) in shares
            for sender, links in self._links.items()
            for receiver in links
        )
