"""Decides which workers generate: the cheapest set that keeps the learner busy.

    standby --activate--> active --deactivate (it drains)--> standby        at a review
                             +--- lost, or leaving ---> replaced at once

A review, once a publish period, compares mu_pool, the measured throughput of the active workers,
with mu_min. A finding must repeat in ACTIVATION_PATIENCE reviews in a row, so that noise moves no worker:

    mu_pool < mu_min                                 activate the cheapest, up to gamma * mu_min
    the learner waits all the same                   the same with a larger mu_min (`target_raise`)
    mu_pool without a worker is still at least
    (gamma + SURPLUS) * mu_min                       deactivate the dearest such worker
    and after a long time without a bubble, CALM_MARGIN * mu_min
    the cheapest set costs SAVING less               replace the present set

After a change come cool_down_s without another, and an activated worker stays for hold_s. A worker
whose own work has not shown its rate (`guessed`) replaces nobody: it works beside the others first.

Before the target has been met for the first time, and after a review found too little, workers are
activated as soon as they are here. The same holds after a loss, until mu_pool is back where it was;
a loss does not raise the goal beyond that, because one high estimate of mu_min would otherwise be
followed whenever somebody is lost. Without `by_cost` (an ablation) the order given replaces rho.
Not here: what workers make and cost (`measurements`, `worker_cost`), mu_min (`model`), and when to
review (`coordinator`).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from echo2d.core.capacity.model import GAMMA
from echo2d.core.capacity.target_raise import TargetRaise
from echo2d.core.capacity.worker_cost import COST_SLACK, WorkerOffer, by_rho, choose, in_order

# Reviews in a row that must find the same.
ACTIVATION_PATIENCE = 3
# Of mu_min, above the target: the worker that goes must not be missed when mu_min rises a little.
SURPLUS = 0.1
# Times mu_min: what has to stay after a calm time, however large gamma is.
CALM_MARGIN = 1.02
NOT_MEASURED = "what the learner needs is not measured yet: all work"
TOO_LITTLE = "too few work"
STILL_WAITS = "the learner waits, although they make what it was to need"
_LOST = "one was lost, or is about to be"
IF_TRUE = "cheaper, if they make what is expected of them"
# Of the cost: a smaller saving does not pay for the warm-up of other workers.
SAVING = 0.1


@dataclass(frozen=True, slots=True)
class ActivationRules:
    """Times in seconds. review_s: between two reviews. cool_down_s: without a change after one.

    hold_s: that an activated worker stays active at least. learner_usd_per_h: 0: not known.
    """

    review_s: float
    cool_down_s: float = 0.0
    hold_s: float = 0.0
    gamma: float = GAMMA
    by_cost: bool = True
    learner_usd_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The names of workers to activate and deactivate. why: for logs; empty if nothing changes."""

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
    """See the module docstring. `now` is monotonic seconds.

    active: the active workers, with the time of their activation. changes: those that reviews made.
    """

    active: dict[str, float] = field(default_factory=dict)
    changes: int = 0
    raised: TargetRaise = field(default_factory=TargetRaise)
    _streaks: _Streaks = field(default_factory=_Streaks)
    # Activate without waiting for a review, until the goal is met.
    _urgent: bool = True
    # mu_pool after the last decision.
    _made: float = math.inf
    # After a loss, the throughput to get back to; the goal is never above it.
    _wanted: float = math.inf
    _review_at: float = -math.inf
    _changed_at: float = -math.inf
    # At the last review: when it was, and for how long the learner had waited.
    _waited: tuple[float, float] | None = None

    def decide(
        self,
        rules: ActivationRules,
        offers: Sequence[WorkerOffer],
        mu_min: float | None,
        *,
        now: float,
        leaving: Collection[str] = (),
        waited_s: float | None = None,
    ) -> Decision:
        """What to change now.

        offers: the workers that are here, active or not, in the order to use without `by_cost`.
        leaving: those that announced that they leave; they count as lost. mu_min: None if it is not
        known yet. waited_s: for how long the learner has waited for rollouts so far; None: more
        workers would not make it wait less.
        """
        here = {offer.name: offer.present for offer in offers if offer.name not in leaving}
        lost = [name for name in self.active if name not in here]
        for name in lost:
            del self.active[name]
        if lost and not self._urgent:
            self._urgent, self._wanted = True, self._made
        reviews = not self._urgent and now >= self._review_at
        bubble = self._bubble(waited_s, now) if reviews or self._urgent else None
        waits = False
        if reviews and bubble is not None and mu_min:
            waits = self.raised.look(bubble, self._pool(here) / mu_min)
        needed = math.inf if mu_min is None else mu_min * self.raised.factor
        if self._urgent:
            still_here = tuple(name for name in lost if name in leaving)
            decision = self._refill(rules, here, needed, still_here)
        elif reviews:
            self._review_at = now + rules.review_s
            decision = self._review(rules, here, needed, now, waits=waits)
        else:
            return Decision()
        self._apply(decision, now)
        self._made = self._pool(here)
        if self._made >= self._goal(rules, needed) * (1 - COST_SLACK):
            self._urgent, self._wanted = False, math.inf
        return decision

    def waits_until(self) -> float:
        """When to call `decide` next, unless a worker is lost; -inf: when the next one comes."""
        return -math.inf if self._urgent else self._review_at

    # --- inside

    def _bubble(self, waited_s: float | None, now: float) -> float | None:
        """The share of the time since the last call for which the learner waited for rollouts."""
        before, self._waited = self._waited, None if waited_s is None else (now, waited_s)
        if before is None or waited_s is None or now <= before[0]:
            return None
        return (waited_s - before[1]) / (now - before[0])

    def _goal(self, rules: ActivationRules, mu_min: float) -> float:
        return min(self._wanted, rules.gamma * mu_min)

    def _apply(self, decision: Decision, now: float) -> None:
        for name in decision.deactivate:
            self.active.pop(name, None)
        self.active.update(dict.fromkeys(decision.activate, now))
        # A replacement restores what there was, so no cool-down follows it.
        if decision != Decision() and self._wanted == math.inf:
            self._changed_at = now

    def _refill(
        self,
        rules: ActivationRules,
        here: dict[str, WorkerOffer],
        mu_min: float,
        leaving: tuple[str, ...] = (),
        why: str = TOO_LITTLE,
    ) -> Decision:
        """Activate as many more as are needed, and deactivate the lost ones that are still here."""
        gap = self._goal(rules, mu_min) - self._pool(here)
        idle = [offer for name, offer in here.items() if name not in self.active]
        chosen = choose(idle, gap)
        more = chosen.offers if rules.by_cost else tuple(in_order(idle, gap))
        if not chosen.enough:
            # All of them, also workers of which nothing is known: `choose` leaves those out.
            more = tuple(idle)
        why = NOT_MEASURED if gap == math.inf else _LOST if self._wanted < math.inf else why
        changed = bool(more or leaving)
        return Decision(tuple(offer.name for offer in more), leaving, why if changed else "")

    def _review(
        self,
        rules: ActivationRules,
        here: dict[str, WorkerOffer],
        mu_min: float,
        now: float,
        *,
        waits: bool,
    ) -> Decision:
        """waits: the learner has waited for long enough, although mu_min was met."""
        pool, streaks = self._pool(here), self._streaks
        shown = sum(here[name].counts for name in self.active if not here[name].guessed)
        calm, margin = self.raised.calm, rules.gamma + SURPLUS
        spare = self._spare(rules, here, shown - (CALM_MARGIN if calm else margin) * mu_min, now)
        cheaper = self._cheaper(rules, here, mu_min, now)
        streaks.short = streaks.short + 1 if pool < mu_min else 0
        streaks.surplus = streaks.surplus + 1 if spare is not None else 0
        streaks.dear = streaks.dear + 1 if cheaper is not None else 0
        if waits:
            more = self._refill(rules, here, mu_min, why=STILL_WAITS)
            if self._pays(rules, here, more):
                self._urgent = True
                return self._counted(more)
            self.raised.undo()
        if now < self._changed_at + rules.cool_down_s:
            return Decision()
        if streaks.short >= ACTIVATION_PATIENCE:
            self._urgent = True
            return self._counted(self._refill(rules, here, mu_min))
        if cheaper is not None and streaks.dear >= ACTIVATION_PATIENCE:
            return self._counted(cheaper)
        goes = calm and spare is not None and here[spare].usd_per_h > 0
        if spare is not None and (goes or streaks.surplus >= ACTIVATION_PATIENCE):
            return self._counted(Decision((), (spare,), "more than enough without it"))
        return Decision()

    def _pays(self, rules: ActivationRules, here: dict[str, WorkerOffer], more: Decision) -> bool:
        """Whether these workers cost less than the waiting that they are to end."""
        if not rules.learner_usd_per_h:
            return True
        present = sum(here[name].usd_per_h for name in self.active)
        waiting = self.raised.bubble * (rules.learner_usd_per_h + present)
        return sum(here[name].usd_per_h for name in more.activate) <= waiting

    def _counted(self, decision: Decision) -> Decision:
        if decision.activate or decision.deactivate:
            self.changes, self._streaks = self.changes + 1, _Streaks()
        return decision

    def _pool(self, here: dict[str, WorkerOffer]) -> float:
        return sum([here[name].counts for name in self.active])

    def _held(self, rules: ActivationRules, name: str, now: float) -> bool:
        return now < self.active[name] + rules.hold_s

    def _spare(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], surplus: float, now: float
    ) -> str | None:
        """The dearest worker that makes at most the surplus; without `by_cost`, the last one."""
        active = [
            here[name] for name in here if name in self.active and not self._held(rules, name, now)
        ]
        ranked = by_rho(active) if rules.by_cost else active
        return next((offer.name for offer in reversed(ranked) if offer.counts <= surplus), None)

    def _cheaper(
        self, rules: ActivationRules, here: dict[str, WorkerOffer], mu_min: float, now: float
    ) -> Decision | None:
        """A change to a cheaper set of workers with measured rates.

        If only guessed rates make a set cheaper, its guessed workers are activated beside the
        others, so that their work shows their rates.
        """
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
        """Change to the cheapest set of `able` and the held workers, if that saves enough."""
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
        self.raised.check()
        assert min(self._streaks.short, self._streaks.surplus, self._streaks.dear) >= 0
        assert self._urgent or self._wanted == math.inf
