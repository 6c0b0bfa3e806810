"""From what receivers measured to each peer's uplink in bytes/s, and the pace at which it is to send.

A peer's uplink is what its receivers got of it, never what it declares. While a version spreads, receivers say how many
bytes came over each link in how much time, and senders how long they had more to send than the link took (a *backlog*).
Together that is one sample a version of every peer that passed something on:

- its rate: of the links it has in the plan, bytes/s over the share of the form they carry; the median of that, times
  all its shares, in every WINDOW_S; the upper quartile of these. So one of three receivers or more that lies, or has a
  slow downlink, does not matter, nor do seconds in which something else held everybody up.
- whether it was held up by its uplink: links of more than half its share were backlogged half of the time. If only a
  few were, their receivers are slow; if none was, it had nothing to pass on, as all below a slow link in a chain. A
  receiver that is itself held up at a lower rate proves nothing: its acknowledgements wait behind what it sends.

A time much shorter than the sender's backlog on that link is not believed, nor a rate above the pace, and no sample
changes a rate by more than a factor of JUMP_MAX. So an only receiver lowers just those who say themselves that they
were held up, and what it raises while there is no pace, the next held-up samples set right. A sender that denies its
backlogs keeps its rate, and gains nothing.

The rate follows the samples so, where s is a held-up sample of at least BEHIND_S (FIRST_S if it is the first):

              s >= BEHIND * rate: it is the rate            REST_VERSIONS times reached
      free  -------------------------------------> steady -----------------------------> raising
    (no pace)                                    PACE * rate <------ not reached ------ RAISE * rate
      | ^ ^                                           |                                  |  | ^
      +-+ +------------- s < BEHIND * pace -----------+----------------------------------+  +-+ reached: rate * RAISE,
       s < BEHIND * rate: the higher of two                                                   RAISES_MAX times: free

A sample of REACHED * pace or more has *reached* the pace and shows only that the uplink is no slower. Only two held-up
samples in a row lower a rate, to the higher one, and the second is one without pace: a pace that confirms itself would
shrink for ever. What is not held up only raises, to what two samples in a row have shown: a burst out of buffers passes
for more than a link can do, and nothing would ever set that right. A peer that passes nothing on has its rate raised by
RAISE a version, up to the usual one: it was perhaps misjudged, and nobody would notice.

A rate never seen held up is a least one: what nobody is asked for, nobody shows. To plan with it counts as the usual
one if that is higher, and as the root's up to EXPLORE times as much, for then a chain does. Not here: who is told the
pace (`edges`).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

PACE = 0.98  # of the rate, which is payload: 0.94 of what the link carries; its queue stays empty, hops do not jostle
REACHED = 0.97  # of the pace: the pace was the limit
BEHIND = 0.9  # of the pace: the uplink is slower than was thought; between the two is noise
BEHIND_S = 2.0  # a held-up sample so long is believed; shorter ones are start-up and buffers ...
FIRST_S = 0.5  # ... but so much is better than nothing known
RAISE = 1.05  # the pace to try, over the rate
RAISES_MAX = 3  # in a row; then a version without pace finds the rate at once
REST_VERSIONS = 4  # between two tries
SAMPLE_S_MIN = 0.05  # less is bursts out of buffers
WINDOW_S = 1.0  # as often as receivers report
WINDOW_S_MIN = 0.5  # of transfer: the rate of less is chance
WINDOWS_MAX = 64  # of one link; the newest ones count
ALIKE = 1.15  # of the usual rate: so far a peer is like the others
EXPLORE = 2.0  # more would overload a peer that can do no more by as much
LATE_S = 1.0  # by so much may one end have reported less than the other: they do so once a second
HELD_UP = 0.5  # of the time: a link is backlogged; of several that share an uplink some have caught up now and then
JUMP_MAX = 4.0  # one version changes a rate at most so many times
UPLINK_MIN = 1.0  # bytes/s: no link is slower, and what a receiver reports must not make the planner divide by zero
PEERS_MAX = 4096  # that have a rate, here or not; the one heard of longest ago makes room
IDLE_S = 1.0  # a longer gap between frames is the sender having nothing to send


@dataclass(slots=True)
class LinkMeter:
    """Payload that came over one link and the time it took: gaps between frames of a flow, never idle time."""

    payload_bytes: int = 0
    seconds: float = 0.0
    last_at: float | None = None  # of the last frame

    def count(self, payload_bytes: int, now: float) -> None:
        gap_s = None if self.last_at is None else now - self.last_at
        self.last_at = now
        if gap_s is not None and gap_s < IDLE_S:
            self.payload_bytes += payload_bytes
            self.seconds += gap_s

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since last asked."""
        taken = self.payload_bytes, self.seconds
        self.payload_bytes, self.seconds = 0, 0.0
        return taken


@dataclass(slots=True)
class BacklogMeter:
    """How long a link had more to send than it took: between two looks at which something waits, something always did.

    Something is given to the link only at a look.
    """

    seconds: float = 0.0
    looked_at: float = 0.0

    def look(self, now: float, *, waits: bool) -> None:
        """waits: some of what was given before is unsent."""
        if waits:
            self.seconds += now - self.looked_at
        self.looked_at = now

    def take(self) -> float:
        """Seconds since last asked."""
        taken, self.seconds = self.seconds, 0.0
        return taken


@dataclass(frozen=True, slots=True)
class PeerRate:
    """What is kept of a peer. held_up: its uplink was the limit; otherwise it can do so much at least."""

    peer: PeerId
    bytes_per_s: float
    held_up: bool


@dataclass(frozen=True, slots=True)
class RateSample:
    """One version of one peer: its rate over so many seconds, and whether its uplink was the limit."""

    bytes_per_s: float
    seconds: float
    held_up: bool


@dataclass(slots=True)
class UplinkEstimate:
    """One peer's rate, see the module docstring.

    rest: samples until the next try. raises: None if steady. behind: the last sample, if it was one that lowers.
    shown: the last one that was not held up; inf while the rate is that of a first sample.
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
        """The first one is all there is; what was not held up gives way to a lower second one."""
        known = sample.held_up and sample.seconds >= FIRST_S
        return UplinkEstimate(
            max(UPLINK_MIN, sample.bytes_per_s),
            known,
            free=not known,
            shown=0.0 if known else math.inf,
        )

    @property
    def pace(self) -> float | None:
        """Bytes/s; None: as fast as it can."""
        if self.free:
            return None
        return self.rate * (PACE if self.raises is None else RAISE)

    def judge(self, sample: RateSample) -> None:
        """Another version has ended."""
        pace = self.pace
        believed = sample.held_up and sample.seconds >= (BEHIND_S if self.held_up else FIRST_S)
        if pace is not None and sample.bytes_per_s >= REACHED * pace:
            self._reached()
        elif believed:
            self.rest, self.raises = REST_VERSIONS, None
            low = self.held_up and sample.bytes_per_s < BEHIND * (
                self.rate if pace is None else pace
            )
            self.free = low and (pace is not None or self.behind is None)
            if pace is None and not self.free:
                self._set(max(sample.bytes_per_s, self.behind or 0.0))
                self.held_up = True
            self.behind = sample.bytes_per_s if self.free else None
        elif pace is None:
            self._show(sample.bytes_per_s)

    def _show(self, bytes_per_s: float) -> None:
        """It can do so much at least, if the sample before says so too."""
        first, twice = self.shown == math.inf, min(bytes_per_s, self.shown)
        self._set(min(self.rate, twice) if first else max(self.rate, twice))
        self.shown = bytes_per_s

    def _reached(self) -> None:
        if self.raises is None:
            self.rest -= 1
            self.raises = 0 if self.rest <= 0 else None
            return
        self.rate *= RAISE
        self.raises += 1
        if self.raises >= RAISES_MAX:
            self.free, self.rest, self.raises = True, REST_VERSIONS, None

    def rise(self, usual: float) -> None:
        """A version has ended in which the peer passed nothing on."""
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
    """What was said of one link during this version. share: of the form, by the plan. windows: bytes and seconds."""

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
        """Bytes/s at which the whole form would have come so."""
        return self._rate(self.payload_bytes, self.seconds)

    def form_rates(self) -> Iterator[tuple[int, float]]:
        """The same of each window with enough of it."""
        for window, (payload_bytes, seconds) in self.windows.items():
            if seconds >= WINDOW_S_MIN:
                yield window, self._rate(payload_bytes, seconds)

    def _rate(self, payload_bytes: int, seconds: float) -> float:
        """Times as long as the receiver says as the sender says that it took in all."""
        stretch = max(1.0, (self.backlogged_s - LATE_S) / self.seconds)
        return payload_bytes / seconds / stretch / self.share

    @property
    def held_up(self) -> bool:
        return self.backlogged_s >= HELD_UP * self.seconds


class Rates:
    """The uplinks of all peers that were measured, and the links of the version that spreads."""

    def __init__(self, kept: Iterable[PeerRate] = ()) -> None:
        self._uplinks = {
            one.peer: UplinkEstimate(one.bytes_per_s, one.held_up, free=not one.held_up)
            for one in kept
        }
        self._shares: Mapping[tuple[PeerId, PeerId], float] = {}
        self._links: dict[PeerId, dict[PeerId, _Link]] = {}
        self._bound()

    def uplink(self, peer: PeerId) -> float | None:
        """Bytes/s that it can send, at least; None: not measured."""
        known = self._uplinks.get(peer)
        return None if known is None else known.rate

    def to_plan_with(self, root: PeerId, others: Collection[PeerId]) -> dict[PeerId, float]:
        """Bytes/s of all of these that were measured, at least UPLINK_MIN."""
        found = {peer: self._uplinks[peer] for peer in (root, *others) if peer in self._uplinks}
        wanted = found[root].rate if root in found else 0.0
        return {
            peer: self._planned(one, wanted) if peer != root else one.rate
            for peer, one in found.items()
        }

    def _planned(self, one: UplinkEstimate, wanted: float) -> float:
        """What is near the usual counts as that: chance does not change a plan, and one for many alike is simpler."""
        rate = one.rate if one.held_up else self._hoped(one.rate, wanted)
        return self._usual if self._usual / ALIKE <= rate <= self._usual * ALIKE else rate

    def _hoped(self, least: float, wanted: float) -> float:
        return max(least, self._usual, min(EXPLORE * least, wanted))

    def pace(self, peer: PeerId) -> float | None:
        """Bytes/s that it is to send at most, to all its receivers together; None: as fast as it can."""
        known = self._uplinks.get(peer)
        return None if known is None else known.pace

    def begin(self, shares: Mapping[tuple[PeerId, PeerId], float]) -> None:
        """A version spreads: these (sender, receiver) carry such shares of the form. Not to be changed."""
        self._shares, self._links = shares, {}

    def received(
        self, sender: PeerId, receiver: PeerId, payload_bytes: int, seconds: float, *, now: float
    ) -> None:
        """The receiver says that so many bytes have just come from the sender in so much time of transfer."""
        self._link(sender, receiver).received(payload_bytes, seconds, int(now / WINDOW_S))

    def backlogged(self, sender: PeerId, receiver: PeerId, seconds: float) -> None:
        """The sender says that it had for so long more to send than this link took."""
        self._link(sender, receiver).backlogged_s += seconds

    def judge(self) -> tuple[PeerRate, ...]:
        """The version has ended. The rates that have changed."""
        samples = self._samples()
        before = {peer: uplink.kept(peer) for peer, uplink in self._uplinks.items()}
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
        told = {sender: _told(links) for sender, links in self._links.items()}
        forms = {sender: _form_rate(links.values()) for sender, links in told.items() if links}
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
        """What is said of links that are not in the plan counts for nothing."""
        share = self._shares.get((sender, receiver))
        if share is None:
            return _Link(1.0)
        return self._links.setdefault(sender, {}).setdefault(receiver, _Link(share))

    def _bound(self) -> None:
        keep_newest(self._uplinks, PEERS_MAX)
        self._usual = median([uplink.rate for uplink in self._uplinks.values()] or [UPLINK_MIN])

    def check(self) -> None:
        """Bounded, and no rate is less than UPLINK_MIN."""
        assert len(self._uplinks) <= PEERS_MAX
        assert all(uplink.rate >= UPLINK_MIN for uplink in self._uplinks.values())
        assert all(
            (sender, receiver) in self._shares
            for sender, links in self._links.items()
            for receiver in links
        )


def _told(links: Mapping[PeerId, _Link]) -> dict[PeerId, _Link]:
    """Those of whom enough was said."""
    return {
        peer: link
        for peer, link in links.items()
        if link.payload_bytes and link.seconds > SAMPLE_S_MIN
    }


def _form_rate(links: Collection[_Link]) -> float:
    """See the module docstring. There are links, and seconds in each."""
    windows: dict[int, list[float]] = {}
    for link in links:
        for window, rate in link.form_rates():
            windows.setdefault(window, []).append(rate)
    usual = sorted(
        _middle(rates, len(links)) for rates in windows.values() if 2 * len(rates) >= len(links)
    )
    return usual[3 * len(usual) // 4] if usual else median([link.form_rate for link in links])


def _middle(rates: Sequence[float], links: int) -> float:
    """Where a report is missing the lower one of two counts: the other may be a liar's."""
    return median(rates) if len(rates) == links else median_low(rates)


def _held_up(links: Collection[_Link], share: float | None = None) -> bool:
    """Whether those of these links that were held up carried most of the share; None: of what these carry."""
    share = sum(link.share for link in links) if share is None else share
    return 2 * sum(link.share for link in links if link.held_up) > share
