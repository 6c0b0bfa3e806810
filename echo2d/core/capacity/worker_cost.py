"""Finds the cheapest set of workers that makes enough (a covering knapsack).

    mu     trajectories/s   accepted and fresh, from one worker while it is present
    c      usd/h            the worker's price, plus the bandwidth of versions it receives and sends
    rho    usd/trajectory   c / (3600 * mu)

A worker that is away is not billed, so its price does not depend on how often it is present. This module looks for
the offers with the least total c whose mu add up to the target. If workers could be divided, taking them by rho,
lowest first, would be optimal (the LP bound). The greedy set takes whole workers in this order and is then trimmed. It
costs at most one worker more than the bound. Up to EXACT_MAX offers, dynamic programming finds the best set. It keeps
those sets of the first i offers that no other set beats in both mu and c, and that may still become cheaper than the
greedy set.

docs/design/capacity.md has the reasons and an example.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

EXACT_MAX = 40  # offers; above it the trimmed greedy set is the answer
# Sets kept at a time. Real prices need far fewer. More would take seconds, and occur only where all
# sets cost about the same; sets of nearly equal mu then count as one.
FRONTIER_MAX = 4096
COST_SLACK = 1e-9  # a share of the target, because sums of floats are inexact


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """A worker that can be had."""

    name: str
    # Trajectories/s while it is present.
    mu: float
    # Its price, bandwidth included.
    usd_per_h: float
    # Whether mu is still a guess.
    guessed: bool = False
    # Samples that it generates at once.
    slots: int = 1
    # The share of what it makes that is thrown away.
    waste: float = 0.0

    @property
    def rho(self) -> float:
        """Usd per trajectory; infinite for a worker that makes none."""
        return self.usd_per_h / (3600.0 * self.mu) if self.mu > 0 else float("inf")

    @property
    def sample_s(self) -> float:
        """Seconds that a sample of usual length takes in one of its slots."""
        return self.slots * (1.0 - self.waste) / self.mu


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """A set of workers."""

    offers: tuple[WorkerOffer, ...]
    # It meets the target.
    enough: bool
    # No cheaper set meets the target.
    exact: bool
    # The LP bound: no set costs less, not even one with fractions of workers.
    bound_usd_per_h: float

    @property
    def mu(self) -> float:
        return sum([offer.mu for offer in self.offers])

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
    """What a worker's traffic costs: it receives each version once and sends it `copies_sent` times."""
    gb_per_h = publishes_per_h * wire_bytes / 1e9
    return gb_per_h * (usd_per_gb_down + copies_sent * usd_per_gb_up)


def choose(offers: Sequence[WorkerOffer], target: float) -> WorkerSet:
    """The cheapest offers that make `target` trajectories/s together.

    If all offers together make less, the answer is all offers that make anything.
    """
    ranked = by_rho(offers)
    if target <= 0:
        return WorkerSet((), enough=True, exact=True, bound_usd_per_h=0.0)
    if sum([offer.mu for offer in ranked]) < target * (1 - COST_SLACK):
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
    """The offers that make anything, lowest rho first."""
    able = [offer for offer in offers if offer.mu > 0]
    return sorted(able, key=lambda offer: (offer.rho, offer.usd_per_h, offer.name))


def in_order(offers: Sequence[WorkerOffer], target: float) -> Iterator[WorkerOffer]:
    """Yield offers in the given order until the target is met."""
    mu = 0.0
    for offer in offers:
        if mu >= target * (1 - COST_SLACK):
            return
        mu += offer.mu
        yield offer


def _trimmed(
    taken: list[WorkerOffer], ranked: Sequence[WorkerOffer], target: float
) -> list[WorkerOffer]:
    """A cheaper set: replace the last worker by the cheapest one that closes the gap, and drop spare ones.

    `taken` meets the target and needs its last worker for that.
    """
    chosen = {offer.name for offer in taken[:-1]}
    gap = target * (1 - COST_SLACK) - sum([offer.mu for offer in taken[:-1]])
    closing = [offer for offer in ranked if offer.name not in chosen and offer.mu >= gap]
    taken = [*taken[:-1], min(closing, key=lambda offer: (offer.usd_per_h, -offer.mu))]
    spare = sum([offer.mu for offer in taken]) - target * (1 - COST_SLACK)
    # Drop workers that are not needed any more, the most expensive first.
    for offer in sorted(taken, key=lambda offer: -offer.usd_per_h):
        if offer.mu <= spare:
            taken.remove(offer)
            spare -= offer.mu
    return taken


@dataclass(frozen=True, slots=True)
class _Fractions:
    """The LP bound: offers in the order of rho, of which the last may be taken in part."""

    offers: Sequence[WorkerOffer]
    # Entry n of these two is the sum over the first n offers.
    mu: tuple[float, ...]
    usd: tuple[float, ...]

    @staticmethod
    def of(offers: Sequence[WorkerOffer]) -> "_Fractions":
        mu = accumulate((offer.mu for offer in offers), initial=0.0)
        return _Fractions(
            offers, tuple(mu), tuple(accumulate((offer.usd_per_h for offer in offers), initial=0.0))
        )

    def usd_per_h(self, first: int, mu: float) -> float:
        """The least cost of this much mu, with offers from `first` on; infinite if they make less."""
        last = bisect_left(self.mu, self.mu[first] + mu * (1 - COST_SLACK), lo=first)
        if last >= len(self.mu):
            return float("inf")
        if last == first:
            return 0.0
        over = max(0.0, self.mu[last] - self.mu[first] - mu) / self.offers[last - 1].mu
        return self.usd[last] - self.usd[first] - over * self.offers[last - 1].usd_per_h


_Set = tuple[float, float, int]  # usd/h, mu, the offers as bits


def _best(
    ranked: Sequence[WorkerOffer], target: float, greedy: Sequence[WorkerOffer]
) -> tuple[list[WorkerOffer], bool]:
    """The best set, and whether it is certainly the best (no sets were merged on the way)."""
    fractions, enough, exact = _Fractions.of(ranked), target * (1 - COST_SLACK), True
    best_usd, best = sum(offer.usd_per_h for offer in greedy), 0
    frontier: list[_Set] = [(0.0, 0.0, 0)]
    for index, offer in enumerate(ranked):
        with_it = [
            (usd + offer.usd_per_h, mu + offer.mu, bits | 1 << index) for usd, mu, bits in frontier
        ]
        for usd, mu, bits in with_it:
            if mu >= enough and usd < best_usd:
                best_usd, best = usd, bits
        # A set is worth keeping only if its best conceivable completion beats the best set so far.
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
    """The Pareto frontier of both: sets that make more than every set that costs less."""
    kept: list[_Set] = []
    for usd, mu, bits in sorted([*one, *other], key=lambda each: (each[0], -each[1])):
        if not kept or mu > kept[-1][1]:
            kept.append((usd, mu, bits))
    return kept


def _coarse(sets: Sequence[_Set], target: float) -> list[_Set]:
    """Among sets of nearly the same mu, keep the set that makes most."""
    kept = {int(mu / target * FRONTIER_MAX): (usd, mu, bits) for usd, mu, bits in sets}
    return list(kept.values())
