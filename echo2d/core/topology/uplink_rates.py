"""Estimates each peer's uplink in bytes/s, from what its receivers got and how long it was busy.

While a version spreads, receivers report how many bytes came over each link, in how much time of
transfer, and senders for how long their uplink had something to send. A version gives one sample for
every peer that passed something on:

    busy for HELD_UP of the time and for BUSY_S   bytes / busy seconds: the rate
    else                                          bytes / seconds of transfer: a lower bound

A rate that was measured before is averaged with the new one. Rates are used to foretell how long a
version takes, to price it, and to plan for large swarms. Nothing else depends on them: credits find
out what a relay can pass on (`relay/credit`).

A peer's word counts for little. A sender cannot say less busy time than HELD_UP of what its receivers
saw. Of several receivers the median counts, and none got more than the form.
Not here: how the two ends measure (`link_meters`).
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median, median_low

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.topology.plan import Plan

# A sender that was busy for less than this part of its receivers' seconds of transfer was not the limit.
HELD_UP = 0.5
# A shorter sample shows start-up and buffers.
BUSY_S = 0.5
# A shorter transfer is a burst out of buffers.
SAMPLE_S_MIN = 0.05
# A rate within this factor of the usual one counts as the usual one: plans for alike peers are simple.
ALIKE = 1.15
# One version changes a rate by at most this factor.
JUMP_MAX = 4.0
# Bytes/s. No real link is slower, and a receiver's report must not make the planner divide by zero.
UPLINK_MIN = 1.0
# Peers with a rate, connected or not; the one whose last sample is oldest is evicted.
_PEERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PeerRate:
    """What the ledger keeps of a peer.

    held_up: its uplink was the limit; if False, the rate is only a lower bound.
    """

    peer: PeerId
    bytes_per_s: float
    held_up: bool

    def then(self, newer: "PeerRate") -> "PeerRate":
        """After another version."""
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
    """The uplinks of all measured peers, and what was reported of the version that spreads.

    kept: the rates that an earlier process measured.
    """

    def __init__(self, kept: Iterable[PeerRate] = ()) -> None:
        self._uplinks = {one.peer: one for one in kept}
        self._plan: Plan | None = None
        self._links: dict[PeerId, dict[PeerId, _Link]] = {}
        self._busy_s: dict[PeerId, float] = {}
        self._bound()

    def uplink(self, peer: PeerId) -> float | None:
        """Bytes/s that the peer can send at least; None: not measured."""
        known = self._uplinks.get(peer)
        return None if known is None else known.bytes_per_s

    def to_plan_with(self, peers: Collection[PeerId]) -> dict[PeerId, float]:
        """The rates in bytes/s to plan with, for those of these peers that were measured."""
        return {peer: self._planned(self._uplinks[peer]) for peer in peers if peer in self._uplinks}

    def _planned(self, one: PeerRate) -> float:
        rate = one.bytes_per_s if one.held_up else max(one.bytes_per_s, self._usual)
        return self._usual if self._usual / ALIKE <= rate <= self._usual * ALIKE else rate

    def begin(self, plan: Plan | None) -> None:
        """A version begins to spread by this plan. Reports of other links than its own do not count."""
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
        # A relay sends all its children the same; the root sends each relay what that can pass on.
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
