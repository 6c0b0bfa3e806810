"""What workers cost for what they make, and the cheapest of them that together make enough.

    mu     trajectories/s   accepted and fresh, of one worker while it is there; times its availability it counts
    c      usd/h            its price, and what versions that it receives and passes on cost in bandwidth
    rho    usd/trajectory   c / (3600 * mu * availability)

The problem: of all offers take those of least total c whose mu add up to the target (a knapsack, to be covered).

The rule. In the order of rho, cheapest first, until the target is met, is the best that fractions of workers could do
(the LP bound, once the last one counts in part). Whole workers cost at most the last one more. Then trim: replace the
last by the cheapest one that closes the gap, drop whoever is not needed, dearest first. For EXACT_MAX offers or fewer
dynamic programming finds the best: of all sets of the first i offers keep those that no other one beats in both mu and
c, and that could still become cheaper than the greedy set (by the LP bound of what is left).

Worked example: target 10/h; a: 6/h for 3 usd/h, b: 6/h for 3.1, c: 5/h for 2.6. By rho: a (0.50), b (0.517), c
(0.52). Greedy takes a and b for 6.1; trimming puts c in b's place: 5.6, which is the best. The LP bound is
3 + 4/6 * 3.1 = 5.07.

The bound: cost <= LP bound + one worker, always; without a gap up to EXACT_MAX offers. The frontier stays small for
real prices; were more than FRONTIER_MAX sets worth keeping, those within a part in FRONTIER_MAX of the target of each
other count as one, and `exact` is false.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

EXACT_MAX = 40  # offers of which the best set is found; above it the greedy one, trimmed
FRONTIER_MAX = 4096  # sets kept at a time; more is where all sets cost the same, and costs seconds
SLACK = 1e-9  # of the target: sums of floats


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """A worker that can be had. usd_per_h: bandwidth included. guessed: mu is not of its own work."""

    name: str
    mu: float
    usd_per_h: float
    availability: float = 1.0
    guessed: bool = False

    @property
    def counts(self) -> float:
        """Trajectories/s on average."""
        return self.mu * self.availability

    @property
    def present(self) -> "WorkerOffer":
        """While it is there it makes all of mu; that it may go makes it dearer, and rho is the same."""
        return WorkerOffer(
            self.name, self.mu, self.usd_per_h / self.availability, guessed=self.guessed
        )

    @property
    def rho(self) -> float:
        """usd per trajectory; infinite for a worker that makes none."""
        return self.usd_per_h / (3600.0 * self.counts) if self.counts > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """enough: they meet the target. exact: no set is cheaper. bound_usd_per_h: nor is any with fractions of workers."""

    offers: tuple[WorkerOffer, ...]
    enough: bool
    exact: bool
    bound_usd_per_h: float

    @property
    def mu(self) -> float:
        return sum(offer.counts for offer in self.offers)

    @property
    def usd_per_h(self) -> float:
        return sum(offer.usd_per_h for offer in self.offers)


def bandwidth_usd_per_h(
    *,
    publishes_per_h: float,
    wire_bytes: float,
    copies_sent: float,
    usd_per_gb_down: float,
    usd_per_gb_up: float,
) -> float:
    """What a worker's traffic costs: each version once down, and as often up as the plan has it pass them on."""
    gb_per_h = publishes_per_h * wire_bytes / 1e9
    return gb_per_h * (usd_per_gb_down + copies_sent * usd_per_gb_up)


def choose(offers: Sequence[WorkerOffer], target: float) -> WorkerSet:
    """The cheapest offers that make `target` trajectories/s; all that make anything, if they do not."""
    ranked = by_rho(offers)
    if target <= 0:
        return WorkerSet((), enough=True, exact=True, bound_usd_per_h=0.0)
    if sum(offer.counts for offer in ranked) < target * (1 - SLACK):
        every = tuple(ranked)
        return WorkerSet(
            every, enough=False, exact=True, bound_usd_per_h=sum(offer.usd_per_h for offer in every)
        )
    bound = _Fractions.of(ranked).usd_per_h(0, target)
    greedy = _trimmed(list(in_order(ranked, target)), ranked, target)
    if len(ranked) > EXACT_MAX:
        return WorkerSet(tuple(greedy), enough=True, exact=False, bound_usd_per_h=bound)
    best, exact = _best(ranked, target, greedy)
    return WorkerSet(tuple(best), enough=True, exact=exact, bound_usd_per_h=bound)


def by_rho(offers: Sequence[WorkerOffer]) -> list[WorkerOffer]:
    """Those that make anything, cheapest trajectories first."""
    able = [offer for offer in offers if offer.counts > 0]
    return sorted(able, key=lambda offer: (offer.rho, offer.usd_per_h, offer.name))


def in_order(offers: Sequence[WorkerOffer], target: float) -> Iterator[WorkerOffer]:
    """One after the other until the target is met."""
    mu = 0.0
    for offer in offers:
        if mu >= target * (1 - SLACK):
            return
        mu += offer.counts
        yield offer


def _trimmed(
    taken: list[WorkerOffer], ranked: Sequence[WorkerOffer], target: float
) -> list[WorkerOffer]:
    """Cheaper by whole workers, see the module docstring."""
    chosen = {offer.name for offer in taken[:-1]}
    gap = target * (1 - SLACK) - sum(offer.counts for offer in taken[:-1])
    closing = [offer for offer in ranked if offer.name not in chosen and offer.counts >= gap]
    taken = [*taken[:-1], min(closing, key=lambda offer: (offer.usd_per_h, -offer.counts))]
    spare = sum(offer.counts for offer in taken) - target * (1 - SLACK)
    for offer in sorted(taken, key=lambda offer: -offer.usd_per_h):
        if offer.counts <= spare:
            taken.remove(offer)
            spare -= offer.counts
    return taken


@dataclass(frozen=True, slots=True)
class _Fractions:
    """Offers in the order of rho, of which the last one may be taken in part. mu, usd: of the first n, for each n."""

    offers: Sequence[WorkerOffer]
    mu: tuple[float, ...]
    usd: tuple[float, ...]

    @staticmethod
    def of(offers: Sequence[WorkerOffer]) -> "_Fractions":
        mu = accumulate((offer.counts for offer in offers), initial=0.0)
        return _Fractions(
            offers, tuple(mu), tuple(accumulate((offer.usd_per_h for offer in offers), initial=0.0))
        )

    def usd_per_h(self, first: int, mu: float) -> float:
        """The least that so much costs, of offers from `first` on; infinite if they do not make it."""
        last = bisect_left(self.mu, self.mu[first] + mu * (1 - SLACK), lo=first)
        if last >= len(self.mu):
            return float("inf")
        if last == first:
            return 0.0
        over = max(0.0, self.mu[last] - self.mu[first] - mu) / self.offers[last - 1].counts
        return self.usd[last] - self.usd[first] - over * self.offers[last - 1].usd_per_h


_Set = tuple[float, float, int]  # usd/h, mu, the offers as bits


def _best(
    ranked: Sequence[WorkerOffer], target: float, greedy: Sequence[WorkerOffer]
) -> tuple[list[WorkerOffer], bool]:
    """The best set, and whether nothing was left out on the way."""
    fractions, enough, exact = _Fractions.of(ranked), target * (1 - SLACK), True
    best_usd, best = sum(offer.usd_per_h for offer in greedy), 0
    frontier: list[_Set] = [(0.0, 0.0, 0)]
    for index, offer in enumerate(ranked):
        with_it = [
            (usd + offer.usd_per_h, mu + offer.counts, bits | 1 << index)
            for usd, mu, bits in frontier
        ]
        for usd, mu, bits in with_it:
            if mu >= enough and usd < best_usd:
                best_usd, best = usd, bits
        promising = [
            one
            for one in _unbeaten(frontier, [each for each in with_it if each[1] < enough])
            if one[0] + fractions.usd_per_h(index + 1, target - one[1]) < best_usd
        ]
        frontier, exact = (
            (promising, exact)
            if len(promising) <= FRONTIER_MAX
            else (_coarse(promising, target), False)
        )
    return [offer for index, offer in enumerate(ranked) if best >> index & 1] if best else list(
        greedy
    ), exact


def _unbeaten(one: Sequence[_Set], other: Sequence[_Set]) -> list[_Set]:
    """Those of both that make more than all that cost less."""
    kept: list[_Set] = []
    for usd, mu, bits in sorted([*one, *other], key=lambda each: (each[0], -each[1])):
        if not kept or mu > kept[-1][1]:
            kept.append((usd, mu, bits))
    return kept


def _coarse(sets: Sequence[_Set], target: float) -> list[_Set]:
    """The one that makes most, of those that make nearly the same."""
    kept = {int(mu / target * FRONTIER_MAX): (usd, mu, bits) for usd, mu, bits in sets}
    return list(kept.values())
