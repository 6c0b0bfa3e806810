"""Decides which workers generate: those with which a train step costs least.

    standby --activate--> active --deactivate (it drains)--> standby        at a review
                             +--- lost, or leaving ---> replaced at once

A review, once a publish period, compares what a step costs with the active workers and with the cheapest pool
(`pools`). If another set has been cheaper by SAVING in ACTIVATION_PATIENCE reviews in a row, it replaces the present
one; so noise moves no worker. If the learner waits longer than predicted, pools are priced again (`target_raise`).

No change follows another within cool_down_s, and an activated worker stays active for hold_s. A worker whose rate is
still a guess (`guessed`) does not replace another worker: it works beside the others first.

Until the cheapest pool is reached for the first time, and after a review that found too few workers for it, workers
are activated as soon as they are here. The same holds after a loss, but only until mu_pool is back at its former level.
Otherwise each loss could make the run adopt an estimate that is too high by chance. Without `by_cost` (an ablation)
workers are taken in the given order instead of by rho.
Not here: what workers make and cost (`measurements`, `worker_cost`), and when to review (`coordinator`).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from echo2d.core.capacity.pools import Pools
from echo2d.core.capacity.target_raise import TargetRaise
from echo2d.core.capacity.worker_cost import COST_SLACK, WorkerOffer, choose, in_order

# This many reviews in a row must find that another set is cheaper.
ACTIVATION_PATIENCE = 3
# A smaller saving, as a share of a step's price, does not pay for the warm-up of other workers.
SAVING = 0.03
# This share of the cheapest pool's throughput is enough: measurements have moved a little since it was priced.
ENOUGH = 0.98
NOT_MEASURED = "what the learner needs is not measured yet: all workers work"
TOO_LITTLE = "too few workers work"
_LOST = "a worker was lost, or announced that it leaves"
IF_TRUE = "cheaper, if these workers make what is expected of them"


@dataclass(frozen=True, slots=True)
class ActivationRules:
    """When reviews and changes may happen, and whether prices count."""

    # Seconds between two reviews.
    review_s: float
    # Seconds without a change after a change.
    cool_down_s: float = 0.0
    # An activated worker stays active for at least this many seconds.
    hold_s: float = 0.0
    by_cost: bool = True

    @property
    def trial_s(self) -> float:
        """A worker whose rate is still a guess stays active for at least this many seconds."""
        # A worker on trial stays for at least eight reviews.
        return max(self.hold_s, 8 * self.review_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """The names of workers to activate and deactivate."""

    activate: tuple[str, ...] = ()
    deactivate: tuple[str, ...] = ()
    # The reason, for logs; empty if nothing changes.
    why: str = ""


@dataclass(slots=True)
class Activation:
    """See the module docstring. `now` is monotonic seconds."""

    # The active workers, with the time of their activation.
    active: dict[str, float] = field(default_factory=dict)
    # How many changes reviews have made.
    changes: int = 0
    raised: TargetRaise = field(default_factory=TargetRaise)
    # Reviews in a row that found another set cheaper.
    _cheaper: int = 0
    # Reviews in a row in which all workers that are here were active, and more would be cheaper.
    _short: int = 0
    # Activate without waiting for a review, until the goal is met.
    _urgent: bool = True
    # mu_pool after the last decision.
    _made: float = math.inf
    # After a loss, the throughput before it: until this is reached again, it is the upper limit of the goal.
    _wanted: float = math.inf
    _review_at: float = -math.inf
    _changed_at: float = -math.inf
    # The time of the last review, and for how long the learner had waited by then.
    _waited: tuple[float, float] | None = None

    def reviews(self, now: float) -> bool:
        """Whether the next decision is a review, or the first one."""
        return now >= self._review_at and (not self._urgent or self._review_at == -math.inf)

    def decide(
        self,
        rules: ActivationRules,
        offers: Sequence[WorkerOffer],
        pools: Pools | None,
        *,
        now: float,
        leaving: Collection[str] = (),
        waited_s: float = 0.0,
    ) -> Decision:
        """What to change now.

        offers: the workers that are here, active or not, in the order to use without `by_cost`.
        leaving: the workers that announced that they leave; they count as lost. pools: None while the learner's demand
        is not known. waited_s: the seconds that the learner has waited for rollouts so far.
        """
        here = {offer.name: offer for offer in offers if offer.name not in leaving}
        lost = [name for name in self.active if name not in here]
        for name in lost:
            del self.active[name]
        if lost and not self._urgent:
            self._urgent, self._wanted = True, self._made
        reviews = not self._urgent and now >= self._review_at
        bubble = self._bubble(waited_s, now) if reviews or self._urgent else None
        if reviews and bubble is not None and pools is not None:
            self.raised.look(bubble, pools.bubble(self._pool(here)))
        goal = self._goal(pools)
        if self._urgent:
            still_here = tuple(name for name in lost if name in leaving)
            decision = self._refill(rules, here, goal, still_here)
        elif reviews and pools is not None:
            self._review_at = now + rules.review_s
            decision = self._review(rules, here, pools, now)
        else:
            return Decision()
        self._apply(decision, now)
        self._made = self._pool(here)
        if self._made >= goal * (1 - COST_SLACK):
            self._urgent, self._wanted = False, math.inf
        return decision

    def waits_until(self) -> float:
        """When to call `decide` next, unless a worker is lost; -inf: as soon as another worker is here."""
        return -math.inf if self._urgent else self._review_at

    # --- inside

    def _bubble(self, waited_s: float, now: float) -> float | None:
        """The share of the time since the last call for which the learner waited for rollouts."""
        before, self._waited = self._waited, (now, waited_s)
        if before is None or now <= before[0]:
            return None
        return (waited_s - before[1]) / (now - before[0])

    def _goal(self, pools: Pools | None) -> float:
        if pools is None or not pools.best.workers:
            return self._wanted
        return min(self._wanted, ENOUGH * pools.best.mu)

    def _apply(self, decision: Decision, now: float) -> None:
        for name in decision.deactivate:
            self.active.pop(name, None)
        self.active.update(dict.fromkeys(decision.activate, now))
        # A replacement restores what there was, so no cool-down follows it.
        if decision != Decision() and self._wanted == math.inf:
            self._changed_at = now
            self.raised.changed()

    def _refill(
        self,
        rules: ActivationRules,
        here: dict[str, WorkerOffer],
        goal: float,
        leaving: tuple[str, ...] = (),
    ) -> Decision:
        """Activate as many more workers as are needed, and deactivate the leaving ones that are still here."""
        gap = goal - self._pool(here)
        idle = [offer for name, offer in here.items() if name not in self.active]
        chosen = choose(idle, gap)
        more = chosen.offers if rules.by_cost else tuple(in_order(idle, gap))
        if not chosen.enough:
            # Take all of them, also those of unknown rate, which `choose` leaves out.
            more = tuple(idle)
        why = NOT_MEASURED if gap == math.inf else _LOST if self._wanted < math.inf else TOO_LITTLE
        changed = bool(more or leaving)
        return Decision(tuple(offer.name for offer in more), leaving, why if changed else "")

    def _review(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], pools: Pools, now: float
    ) -> Decision:
        short = len(self.active) == len(here) and self._pool(here) < pools.best.mu * (1 - SAVING)
        self._short = self._short + 1 if short else 0
        if self._short >= ACTIVATION_PATIENCE:
            self._short, self._urgent = 0, True  # a worker that comes is activated at once
            return Decision()
        cheaper = self._change(rules, here, pools, now)
        self._cheaper = self._cheaper + 1 if cheaper is not None else 0
        if now < self._changed_at + rules.cool_down_s or self._cheaper < ACTIVATION_PATIENCE:
            return Decision()
        assert cheaper is not None
        self.changes, self._cheaper = self.changes + 1, 0
        return cheaper

    def _pool(self, here: dict[str, WorkerOffer]) -> float:
        return sum([here[name].mu for name in self.active])

    def _change(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], pools: Pools, now: float
    ) -> Decision | None:
        """A change to a cheaper set of workers with measured rates.

        If a set that replaces workers is cheaper only by guessed rates, some of its guessed workers are activated
        beside the present ones, so that their work shows their rates.
        """
        shown = {name: offer for name, offer in here.items() if not offer.guessed}
        change = self._change_to(rules, here, shown, pools, now)
        if change is not None or len(shown) == len(here):
            return change
        hoped = self._change_to(rules, here, here, pools, now) or Decision()
        if not hoped.deactivate:
            return hoped if hoped.activate else None
        guessed = [name for name in hoped.activate if here[name].guessed]
        # At most one guessed worker for every ten active ones, but at least one, works beside the others at a
        # time, until its own work shows its rate.
        tried = tuple(guessed[: max(1, int(0.1 * len(self.active)))])
        return Decision(tried, (), IF_TRUE) if tried else None

    def _change_to(
        self,
        rules: ActivationRules,
        here: dict[str, WorkerOffer],
        able: dict[str, WorkerOffer],
        pools: Pools,
        now: float,
    ) -> Decision | None:
        """Change to the cheapest set of `able` and the held workers, if that saves enough."""
        held = {
            name
            for name, since in self.active.items()
            if now < since + (rules.hold_s if name in able else rules.trial_s)
        }
        gap = ENOUGH * pools.best.mu - sum(able[name].mu for name in held & able.keys())
        free = [self._kept(offer) for name, offer in able.items() if name not in held]
        rest = choose(free, gap).offers if rules.by_cost else tuple(in_order(free, gap))
        wanted = {offer.name for offer in rest} | held
        cost, present = self._usd(here, wanted, pools), self._usd(here, self.active, pools)
        if cost >= (1 - SAVING) * present:
            return None
        more = tuple(name for name in here if name in wanted and name not in self.active)
        fewer = tuple(name for name in self.active if name not in wanted)
        return Decision(more, fewer, f"{1 - cost / present:.0%} cheaper a step: {pools.why()}")

    def _kept(self, offer: WorkerOffer) -> WorkerOffer:
        """This offer for a choice: an active worker costs a little less, so that it is not replaced by an equal one."""
        if offer.name not in self.active:
            return offer
        # An active worker stays unless another one is more than 5 % cheaper.
        return replace(offer, usd_per_h=0.95 * offer.usd_per_h)

    def _usd(self, here: dict[str, WorkerOffer], names: Collection[str], pools: Pools) -> float:
        """What a step costs with these workers."""
        mu = sum([here[name].mu for name in names])
        return pools.usd_per_step(mu, sum([here[name].usd_per_h for name in names]))

    def check(self) -> None:
        self.raised.check()
        assert min(self._cheaper, self._short) >= 0
        assert self._urgent or self._wanted == math.inf
