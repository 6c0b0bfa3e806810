"""Which workers generate: the cheapest that keep the learner busy, changed rarely, but at once when one is lost.

    standby --activate--> active --deactivate (it drains)--> standby        every review, see below
                             +--- lost, or about to be ---> (replaced at once)

Reviews, one a publish period, compare mu_pool, the measured throughput of the active workers, with mu_min:

    mu_pool < mu_min                          PATIENCE reviews in a row: the cheapest more, up to gamma * mu_min
    without a worker still >= (gamma + SURPLUS) * mu_min    likewise: the dearest such worker goes
    the cheapest set costs SAVING less        likewise: it replaces the present one
    anything else                             nothing: noise in mu must not move workers about

mu_pool is of those that are here, each in full: who goes is replaced at once, so its availability counts in rho alone.
After a change there is none for cool_down_s (a broadcast and a warm-up: until then it does not show), and who was
activated stays for hold_s. Nobody goes for the sake of a guess: a newcomer that looks cheaper works beside the others
until its own work has shown what it makes; who has shown it makes up the cheapest set for which others go.
At the start, and when reviews have found too little, nothing is waited with: until the target has been met, whoever is
here or comes is activated at once. Nor when an active worker is lost: until as much is made as before, or the target
has been met. That more is needed than there was is for reviews to find, and a loss neither interrupts nor delays them:
else, where somebody is lost every few minutes, one high estimate of mu_min would be followed at once, and what is too
dear or too little would stay so. Where no throughput is enough, mu_min is infinite. Without `by_cost` (an ablation) the
order given takes the place of rho.
Not here: what workers cost and make (`worker_cost`, `estimators`), mu_min (`model`), how they are told.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from echo2d.core.capacity.model import GAMMA
from echo2d.core.capacity.worker_cost import SLACK, WorkerOffer, by_rho, choose, in_order

PATIENCE = 3  # reviews in a row
SURPLUS = (
    0.1  # of mu_min, above the target: who goes must not be missed at the next breath of noise
)
NOTHING_ENOUGH = "no throughput is enough: all work"
TOO_LITTLE = "too few work"
LOST = "one was lost, or is about to be"
IF_TRUE = "cheaper, if they make what is expected of them"
SAVING = 0.1  # of the cost: a smaller one is not worth that workers warm up


@dataclass(frozen=True, slots=True)
class ActivationRules:
    """hold_s: nobody who was activated is deactivated earlier. review_s: between two reviews."""

    review_s: float
    cool_down_s: float = 0.0
    hold_s: float = 0.0
    gamma: float = GAMMA
    by_cost: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Names. why: for logs, empty if nothing changes."""

    activate: tuple[str, ...] = ()
    deactivate: tuple[str, ...] = ()
    why: str = ""


@dataclass(slots=True)
class _Streaks:
    """How many reviews in a row found the same."""

    short: int = 0
    surplus: int = 0
    dear: int = 0


@dataclass(slots=True)
class Activation:
    """See the module docstring. `now` is monotonic seconds. active: since when."""

    active: dict[str, float] = field(default_factory=dict)
    changes: int = 0  # voluntary ones
    _streaks: _Streaks = field(default_factory=_Streaks)
    _urgent: bool = True  # since the start, a review that found too little, or a loss
    _made: float = math.inf  # mu_pool when it was looked at last
    _wanted: float = math.inf  # if the target is not lower: as much as there was before the loss
    _review_at: float = -math.inf
    _changed_at: float = -math.inf

    def decide(
        self, rules: ActivationRules, offers: Sequence[WorkerOffer], mu_min: float | None, *, now: float,
        leaving: Collection[str] = (),
    ) -> Decision:  # fmt: skip
        """offers: the workers that are here, active or not, in the order to use without `by_cost`.

        leaving: those that said that they will be taken away: they take no more leases.
        """
        here = {offer.name: offer.present for offer in offers if offer.name not in leaving}
        needed = math.inf if mu_min is None else mu_min
        lost = [name for name in self.active if name not in here]
        for name in lost:
            del self.active[name]
        if lost and not self._urgent:
            self._urgent, self._wanted = True, self._made
        if self._urgent:
            decision = self._refill(
                rules, here, needed, tuple(name for name in lost if name in leaving)
            )
        elif now >= self._review_at:
            self._review_at = now + rules.review_s
            decision = self._review(rules, here, needed, now)
        else:
            return Decision()
        self._apply(decision, now)
        self._made = self._pool(here)
        if self._made >= self._goal(rules, needed) * (1 - SLACK):
            self._urgent, self._wanted = False, math.inf
        return decision

    def waits_until(self) -> float:
        """When `decide` is to be asked next, if nobody is lost meanwhile; -inf: whenever somebody comes."""
        return -math.inf if self._urgent else self._review_at

    # --- inside

    def _goal(self, rules: ActivationRules, mu_min: float) -> float:
        return min(self._wanted, rules.gamma * mu_min)

    def _apply(self, decision: Decision, now: float) -> None:
        for name in decision.deactivate:
            self.active.pop(name, None)
        self.active.update(dict.fromkeys(decision.activate, now))
        if (
            decision != Decision() and self._wanted == math.inf
        ):  # what makes a loss good changes nothing
            self._changed_at = now

    def _refill(
        self,
        rules: ActivationRules,
        here: dict[str, WorkerOffer],
        mu_min: float,
        told: tuple[str, ...] = (),
    ) -> Decision:
        """As many more as are needed. told: who is lost, and is here still."""
        gap = self._goal(rules, mu_min) - self._pool(here)
        idle = [offer for name, offer in here.items() if name not in self.active]
        chosen = choose(idle, gap)
        more = chosen.offers if rules.by_cost else tuple(in_order(idle, gap))
        if not chosen.enough:
            more = tuple(idle)  # also those of whom nothing is known
        why = NOTHING_ENOUGH if gap == math.inf else LOST if self._wanted < math.inf else TOO_LITTLE
        return Decision(tuple(offer.name for offer in more), told, why if more or told else "")

    def _review(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], mu_min: float, now: float
    ) -> Decision:
        pool, streaks = self._pool(here), self._streaks
        shown = sum(here[name].counts for name in self.active if not here[name].guessed)
        spare = self._spare(rules, here, shown - (rules.gamma + SURPLUS) * mu_min, now)
        cheaper = self._cheaper(rules, here, mu_min, now)
        streaks.short = streaks.short + 1 if pool < mu_min else 0
        streaks.surplus = streaks.surplus + 1 if spare is not None else 0
        streaks.dear = streaks.dear + 1 if cheaper is not None else 0
        if now < self._changed_at + rules.cool_down_s:
            return Decision()
        if streaks.short >= PATIENCE:
            self._urgent = True
            return self._counted(self._refill(rules, here, mu_min))
        if cheaper is not None and streaks.dear >= PATIENCE:
            return self._counted(cheaper)
        if spare is not None and streaks.surplus >= PATIENCE:
            return self._counted(Decision((), (spare,), "more than enough without it"))
        return Decision()

    def _counted(self, decision: Decision) -> Decision:
        if decision.activate or decision.deactivate:
            self.changes, self._streaks = self.changes + 1, _Streaks()
        return decision

    def _pool(self, here: dict[str, WorkerOffer]) -> float:
        return sum(here[name].counts for name in self.active)

    def _held(self, rules: ActivationRules, name: str, now: float) -> bool:
        return now < self.active[name] + rules.hold_s

    def _spare(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], surplus: float, now: float
    ) -> str | None:
        """The dearest worker that makes no more than is too much; without `by_cost`, the last one of the order."""
        active = [
            here[name] for name in here if name in self.active and not self._held(rules, name, now)
        ]
        ranked = by_rho(active) if rules.by_cost else active
        return next((offer.name for offer in reversed(ranked) if offer.counts <= surplus), None)

    def _cheaper(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], mu_min: float, now: float
    ) -> Decision | None:
        """A change to a set that is cheaper as far as its workers have shown; else what a cheaper one lacks, to see."""
        if not rules.by_cost:
            return None
        shown = {name: offer for name, offer in here.items() if not offer.guessed}
        change = self._change(rules, here, shown, mu_min, now)
        if change is not None or len(shown) == len(here):
            return change
        hoped = self._change(rules, here, here, mu_min, now) or Decision()
        come = tuple(name for name in hoped.activate if here[name].guessed)
        return Decision(come, (), IF_TRUE) if come else None

    def _change(
        self,
        rules: ActivationRules,
        here: dict[str, WorkerOffer],
        able: dict[str, WorkerOffer],
        mu_min: float,
        now: float,
    ) -> Decision | None:
        """To the cheapest set of these and whoever is held, if that saves enough."""
        held = {name for name in self.active if self._held(rules, name, now)}
        rest = choose(
            [offer for name, offer in able.items() if name not in held],
            rules.gamma * mu_min - sum(able[name].counts for name in held & able.keys()),
        )
        wanted = {offer.name for offer in rest.offers} | held
        cost = sum(here[name].usd_per_h for name in wanted)
        present = sum(here[name].usd_per_h for name in self.active)
        if not rest.enough or cost >= (1 - SAVING) * present:
            return None
        come = tuple(name for name in here if name in wanted and name not in self.active)
        go = tuple(name for name in self.active if name not in wanted)
        return Decision(come, go, f"{1 - cost / present:.0%} cheaper, by rho")

    def check(self) -> None:
        assert min(self._streaks.short, self._streaks.surplus, self._streaks.dear) >= 0
        assert self._urgent or self._wanted == math.inf
