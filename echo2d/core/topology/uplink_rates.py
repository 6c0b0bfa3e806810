"""Estimates each peer's uplink in bytes/s from what its receivers measured, and sets its pace.

While a version spreads, receivers report how many bytes came over each link in how much time, and
senders how long a link was *backlogged*, which means that they had more to send than it took. That
makes one sample a version for every peer that passed something on: a rate, and whether the peer was
*held up* by its own uplink. Below, s is a held-up sample of BEHIND_S or more (FIRST_S if it is the
first one).

              s >= BEHIND * rate: the new rate       REST_VERSIONS times reached
      free  ---------------------------------> steady ----------------------> raising
    (no pace)                                PACE * rate <-- not reached -- RAISE * rate
      | ^ ^                                        |                          |  | ^
      +-+ +---------- s < BEHIND * pace -----------+--------------------------+  +-+ reached:
       s < BEHIND * rate: the higher of two                    rate * RAISE; RAISES_MAX times: free

A sample of REACHED * pace or more has *reached* the pace. docs/design/planning.md#rates has the
reasons. Not here: who is told the pace (`edges`), and how the two ends measure (`link_meters`).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

# The steady pace as a share of the rate. The rate counts payload, about 0.94 of what the link
# carries. A little less than the rate keeps the link's queue empty.
PACE = 0.98
REACHED = 0.97  # from this share of the pace on, the pace was the limit
# Below this share of the pace the uplink is slower than was thought. Between the two is noise.
BEHIND = 0.9
# A held-up sample must be this long to be believed: shorter ones show start-up and buffers. A first
# sample may be shorter, because little knowledge is better than none.
BEHIND_S = 2.0
FIRST_S = 0.5
RAISE = 1.05  # the pace to try, over the rate
RAISES_MAX = 3  # in a row; then a version without pace finds the rate at once
REST_VERSIONS = 4  # between two tries
SAMPLE_S_MIN = 0.05  # a shorter transfer is a burst out of buffers
WINDOW_S = 1.0  # as often as receivers report
WINDOW_S_MIN = 0.5  # of transfer: the rate of less is chance
WINDOWS_MAX = 64  # of one link; the newest ones count
ALIKE = 1.15  # a rate within this factor of the usual one counts as the usual one
# A peer is tried at up to this many times its known rate: if it can do no more, the plan overloads
# it by no more than this factor.
EXPLORE = 2.0
LATE_S = 1.0  # the two ends report once a second, so their totals may differ by this much
# A link counts as backlogged if it was so for this share of the time: of several links that share
# an uplink, some catch up now and then.
HELD_UP = 0.5
JUMP_MAX = 4.0  # one version changes a rate by at most this factor
# Bytes/s. No real link is slower, and a receiver's report must not make the planner divide by zero.
UPLINK_MIN = 1.0
# Peers with a rate, connected or not; the one whose last sample is oldest is evicted.
PEERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PeerRate:
    """What the ledger keeps of a peer.

    held_up: its uplink was the limit; if False, the rate is only a lower bound.
    """

    peer: PeerId
    bytes_per_s: float
    held_up: bool


@dataclass(frozen=True, slots=True)
class RateSample:
    """What one version shows of one peer: a rate, over how many seconds, and whether its uplink was
    the limit.
    """

    bytes_per_s: float
    seconds: float
    held_up: bool


@dataclass(slots=True)
class UplinkEstimate:
    """The state machine of one peer's rate; see the module docstring.

    free: without pace. rest: samples until the next try to raise. raises: raises in a row, None if
    not raising. behind: the last sample's rate, if that sample asked to lower the rate. shown: the
    rate of the last sample that was not held up; infinite while only a first such sample is known.
    """

    rate: float
    held_up: bool
    free: bool = True
    rest: int = 1  # the first sample has a cold start in it
    raises: int | None = None
    behind: float | None = None
    shown: float = 0.0

    @staticmethod
    def of(sample: RateSample) -> "UplinkEstimate":
        """The state after a first sample.

        If the sample was not held up, a lower second sample replaces it (`shown`).
        """
        known = sample.held_up and sample.seconds >= FIRST_S
        return UplinkEstimate(
            max(UPLINK_MIN, sample.bytes_per_s),
            known,
            free=not known,
            shown=0.0 if known else math.inf,
        )

    @property
    def pace(self) -> float | None:
        """Bytes/s; None: the peer sends as fast as it can."""
        if self.free:
            return None
        return self.rate * (PACE if self.raises is None else RAISE)

    def judge(self, sample: RateSample) -> None:
        """Another version has ended with this sample."""
        pace = self.pace
        believed = sample.held_up and sample.seconds >= (BEHIND_S if self.held_up else FIRST_S)
        if pace is not None and sample.bytes_per_s >= REACHED * pace:
            self._reached()
        elif believed:
            self.rest, self.raises = REST_VERSIONS, None
            low = self.held_up and sample.bytes_per_s < BEHIND * (
                self.rate if pace is None else pace
            )
            # A first low sample only lifts the pace. The rate falls after the next one, which is
            # unpaced: a pace that confirmed itself would shrink for ever.
            self.free = low and (pace is not None or self.behind is None)
            if pace is None and not self.free:
                self._set(max(sample.bytes_per_s, self.behind or 0.0))
                self.held_up = True
            self.behind = sample.bytes_per_s if self.free else None
        elif pace is None:
            self._show(sample.bytes_per_s)

    def _show(self, bytes_per_s: float) -> None:
        """A sample that was not held up raises the rate to what the last one showed as well.

        One sample is not enough, because a burst out of buffers looks faster than the link is.
        """
        first, twice = self.shown == math.inf, min(bytes_per_s, self.shown)
        self._set(min(self.rate, twice) if first else max(self.rate, twice))
        self.shown = bytes_per_s

    def _reached(self) -> None:
        """The pace was the limit: rest or, after REST_VERSIONS of these, try a higher pace."""
        if self.raises is None:
            self.rest -= 1
            self.raises = 0 if self.rest <= 0 else None
            return
        self.rate *= RAISE
        self.raises += 1
        if self.raises >= RAISES_MAX:
            self.free, self.rest, self.raises = True, REST_VERSIONS, None

    def rise(self, usual: float) -> None:
        """A version has ended in which the peer passed nothing on.

        It may have been misjudged, and without a part in a plan it could never show that.
        """
        if self.held_up:
            self.rate = max(self.rate, min(self.rate * RAISE, usual))

    def kept(self, peer: PeerId) -> PeerRate:
        return PeerRate(peer, self.rate, self.held_up)

    def _set(self, bytes_per_s: float) -> None:
        self.rate = max(
            UPLINK_MIN, min(max(bytes_per_s, self.rate / JUMP_MAX), self.rate * JUMP_MAX)
        )


@dataclass(slots=True)
class _Link:
    """What both ends reported of one link during this version.

    share: the share of the form that the link carries by the plan. windows: bytes and seconds by
    number of the window.
    """

    share: float
    payload_bytes: int = 0
    seconds: float = 0.0
    backlogged_s: float = 0.0
    windows: dict[int, tuple[int, float]] = field(default_factory=dict)

    def received(self, payload_bytes: int, seconds: float, window: int) -> None:
        self.payload_bytes += payload_bytes
        self.seconds += seconds
        before_bytes, before_s = self.windows.get(window, (0, 0.0))
        self.windows[window] = before_bytes + payload_bytes, before_s + seconds
        keep_newest(self.windows, WINDOWS_MAX)

    @property
    def form_rate(self) -> float:
        """Bytes/s of the link divided by its share: its rate as if it carried the whole form."""
        return self._rate(self.payload_bytes, self.seconds)

    def form_rates(self) -> Iterator[tuple[int, float]]:
        """`form_rate` of each window that has at least WINDOW_S_MIN of transfer."""
        for window, (payload_bytes, seconds) in self.windows.items():
            if seconds >= WINDOW_S_MIN:
                yield window, self._rate(payload_bytes, seconds)

    def _rate(self, payload_bytes: int, seconds: float) -> float:
        """Bytes/s over the share, of bytes that came in so many seconds.

        A receiver may report too little time. If the sender was backlogged for longer than the
        receiver reports in all, the time is stretched by that factor.
        """
        stretch = max(1.0, (self.backlogged_s - LATE_S) / self.seconds)
        return payload_bytes / seconds / stretch / self.share

    @property
    def held_up(self) -> bool:
        return self.backlogged_s >= HELD_UP * self.seconds


class Rates:
    """The uplinks of all measured peers, and the links of the version that spreads.

    kept: the rates that an earlier process measured.
    """

    def __init__(self, kept: Iterable[PeerRate] = ()) -> None:
        self._uplinks = {
            one.peer: UplinkEstimate(one.bytes_per_s, one.held_up, free=not one.held_up)
            for one in kept
        }
        self._shares: Mapping[tuple[PeerId, PeerId], float] = {}
        self._links: dict[PeerId, dict[PeerId, _Link]] = {}
        self._bound()

    def uplink(self, peer: PeerId) -> float | None:
        """Bytes/s that the peer can send at least; None: not measured."""
        known = self._uplinks.get(peer)
        return None if known is None else known.rate

    def to_plan_with(self, root: PeerId, others: Collection[PeerId]) -> dict[PeerId, float]:
        """The rates in bytes/s to plan with, for those of these peers that were measured."""
        found = {peer: self._uplinks[peer] for peer in (root, *others) if peer in self._uplinks}
        wanted = found[root].rate if root in found else 0.0
        return {
            peer: self._planned(one, wanted) if peer != root else one.rate
            for peer, one in found.items()
        }

    def _planned(self, one: UplinkEstimate, wanted: float) -> float:
        """The rate to plan with; the usual one if it is close to that.

        So chance does not change a plan, and plans for many alike peers are simple.
        """
        rate = one.rate if one.held_up else self._hoped(one.rate, wanted)
        return self._usual if self._usual / ALIKE <= rate <= self._usual * ALIKE else rate

    def _hoped(self, least: float, wanted: float) -> float:
        """A guess for a lower bound: the usual rate, or up to EXPLORE times the bound if wanted."""
        return max(least, self._usual, min(EXPLORE * least, wanted))

    def pace(self, peer: PeerId) -> float | None:
        """Bytes/s that the peer may send to all receivers together; None: as fast as it can."""
        known = self._uplinks.get(peer)
        return None if known is None else known.pace

    def begin(self, shares: Mapping[tuple[PeerId, PeerId], float]) -> None:
        """A version begins to spread.

        shares: the share of the form that each link (sender, receiver) carries. The caller must not
        change it afterwards.
        """
        self._shares, self._links = shares, {}

    def received(
        self, sender: PeerId, receiver: PeerId, payload_bytes: int, seconds: float, *, now: float
    ) -> None:
        """The receiver reports new payload from the sender and the seconds of transfer it took."""
        self._link(sender, receiver).received(payload_bytes, seconds, int(now / WINDOW_S))

    def backlogged(self, sender: PeerId, receiver: PeerId, seconds: float) -> None:
        """The sender reports for how many more seconds this link was backlogged."""
        self._link(sender, receiver).backlogged_s += seconds

    def judge(self) -> tuple[PeerRate, ...]:
        """The version has ended. Returns the rates that have changed."""
        samples = self._samples()
        before = {peer: uplink.kept(peer) for peer, uplink in self._uplinks.items()}
        # A peer with a sample moves to the end, since `_bound` evicts from the front.
        for peer, sample in samples.items():
            known = self._uplinks.pop(peer, None)
            self._uplinks[peer] = UplinkEstimate.of(sample) if known is None else known
            if known is not None:
                known.judge(sample)
        self._bound()
        if samples:
            senders = {sender for sender, _ in self._shares}
            for peer in {receiver for _, receiver in self._shares}.intersection(
                self._uplinks
            ) - senders:
                self._uplinks[peer].rise(self._usual)
        self.begin({})
        now = [uplink.kept(peer) for peer, uplink in self._uplinks.items()]
        return tuple(kept for kept in now if kept != before.get(kept.peer))

    def _samples(self) -> dict[PeerId, RateSample]:
        """One sample for each peer that passed something on during this version."""
        told = {sender: _told(links) for sender, links in self._links.items()}
        forms = {sender: _form_rate(links.values()) for sender, links in told.items() if links}
        # A backlog towards a receiver that is itself held up at a lower rate proves nothing: its
        # acknowledgements wait behind what it sends.
        slow = {
            sender: forms[sender] / BEHIND for sender in forms if _held_up(told[sender].values())
        }
        samples = {}
        for sender, form_rate in forms.items():
            links = told[sender]
            share = sum(link.share for link in links.values())
            proven = [
                link
                for receiver, link in links.items()
                if link.form_rate <= slow.get(receiver, math.inf)
            ]
            seconds = median([link.seconds for link in links.values()])
            samples[sender] = RateSample(share * form_rate, seconds, _held_up(proven, share))
        return samples

    def _link(self, sender: PeerId, receiver: PeerId) -> _Link:
        """The link's record. A link outside the plan gets one that is thrown away."""
        share = self._shares.get((sender, receiver))
        if share is None:
            return _Link(1.0)
        return self._links.setdefault(sender, {}).setdefault(receiver, _Link(share))

    def _bound(self) -> None:
        """Evict peers above PEERS_MAX, and find the usual rate: the median of all peers."""
        keep_newest(self._uplinks, PEERS_MAX)
        self._usual = median([uplink.rate for uplink in self._uplinks.values()] or [UPLINK_MIN])

    def check(self) -> None:
        """Assert the limits, and that every link is in the plan."""
        assert len(self._uplinks) <= PEERS_MAX
        assert all(uplink.rate >= UPLINK_MIN for uplink in self._uplinks.values())
        assert all(
            (sender, receiver) in self._shares
            for sender, links in self._links.items()
            for receiver in links
        )


def _told(links: Mapping[PeerId, _Link]) -> dict[PeerId, _Link]:
    """The links of which enough was reported to take a rate."""
    return {
        peer: link
        for peer, link in links.items()
        if link.payload_bytes and link.seconds > SAMPLE_S_MIN
    }


def _form_rate(links: Collection[_Link]) -> float:
    """The upper quartile over windows of the median over links.

    There must be links, with seconds in each. Windows in which fewer than half of the links were
    reported do not count.
    """
    windows: dict[int, list[float]] = {}
    for link in links:
        for window, rate in link.form_rates():
            windows.setdefault(window, []).append(rate)
    usual = sorted(
        _middle(rates, len(links)) for rates in windows.values() if 2 * len(rates) >= len(links)
    )
    return usual[3 * len(usual) // 4] if usual else median([link.form_rate for link in links])


def _middle(rates: Sequence[float], links: int) -> float:
    """The median. Where a report is missing, the lower of two middles: the higher may be a lie."""
    return median(rates) if len(rates) == links else median_low(rates)


def _held_up(links: Collection[_Link], share: float | None = None) -> bool:
    """Whether the held-up ones of these links carry more than half of `share`.

    None: more than half of what these links carry.
    """
    share = sum(link.share for link in links) if share is None else share
    return 2 * sum(link.share for link in links if link.held_up) > share
