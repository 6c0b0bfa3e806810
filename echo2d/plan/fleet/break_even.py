"""When a run on far-away workers is cheaper than a data centre; `echo2d plan` of a file with `[centralized]` shows it.

Per train step, as a share of what the data centre bills:

    c        the share of the data centre's bill that is for rollouts; the rest is for the learner
    p        usd per trajectory here, over usd per trajectory in the data centre
    gamma    trajectories that are paid for, over those that are trained on
    delta    how much more the learner costs here, as a share: its steps take longer; a spot host also changes the price

    saving = 1 - ((1 + delta) (1 - c) + gamma p c) = c (1 - gamma p) - delta (1 - c)

The saving is 0 at p = (1 - delta (1 - c) / c) / gamma, and at c = delta / (1 - gamma p + delta). Not here: what a run
on these workers costs (`forecast`).
"""

from dataclasses import dataclass

from echo2d.plan.fleet.forecast import Forecast
from echo2d.plan.fleet.spec import FleetSpec
from echo2d.plan.fleet.spot_learner import SpotLearner


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The comparison, with the symbols of the module docstring."""

    rollout_share: float  # c
    price_ratio: float  # p
    margin: float  # gamma
    longer: float  # delta
    centralized_usd: float  # a step in the data centre
    # The same if its machines generate and train by turns; None: the file does not say how long that takes.
    synchronous_usd: float | None = None

    @property
    def saving(self) -> float:
        """The share of the data centre's bill that a step here saves; negative: it costs more."""
        return self.saving_at(self.rollout_share, self.price_ratio)

    def saving_at(self, rollout_share: float, price_ratio: float) -> float:
        """The saving at another share of rollouts and another price ratio."""
        paid = self.margin * price_ratio
        return rollout_share * (1.0 - paid) - self.longer * (1.0 - rollout_share)

    @property
    def price_ratio_max(self) -> float:
        """Up to this price ratio a run here is cheaper; 0 or less: it never is."""
        if self.rollout_share <= 0:
            return 0.0
        spent_longer = self.longer * (1.0 - self.rollout_share) / self.rollout_share
        return (1.0 - spent_longer) / self.margin

    @property
    def rollout_share_min(self) -> float | None:
        """From this share of rollouts on a run here is cheaper; None: it never is."""
        gain = 1.0 - self.margin * self.price_ratio
        if gain <= 0:
            return None
        if self.longer <= 0:
            return 0.0
        return self.longer / (gain + self.longer)

    def facts(self) -> dict[str, float | None]:
        """For JSON: shares and ratios, and usd a step."""
        return {
            "centralized_usd_per_step": self.centralized_usd,
            "synchronous_usd_per_step": self.synchronous_usd,
            "saving": self.saving,
            "rollout_share": self.rollout_share,
            "price_ratio": self.price_ratio,
            "price_ratio_max": self.price_ratio_max,
            "rollout_share_min": self.rollout_share_min,
        }


def break_even(fleet: FleetSpec, found: Forecast) -> BreakEven | None:
    """Compare a run here with the data centre. None: the file has no `[centralized]`, or no step is ever finished here.

    The price of trajectories includes the cost of the bubble and of versions on the wire.
    """
    there = fleet.centralized
    if there is None or not found.mu_pool or found.usd_per_step == float("inf"):
        return None
    said = there.learner_usd_per_h
    learner_there = min(1.0, (fleet.learner.usd_per_h if said is None else said) / there.usd_per_h)
    rollouts_there = (1.0 - learner_there) * there.usd_per_step
    demand, spot = found.demand, SpotLearner.of(fleet.learner)
    learner_here = spot.paid * fleet.learner.usd_per_h * spot.longer * spot.t_train_s / 3600.0
    longer = learner_here / (learner_there * there.usd_per_step) - 1.0 if learner_there else 0.0
    rollouts_here = found.usd_per_step - learner_here
    margin = found.mu_pool * found.step_s / demand.trajectories_per_step
    ratio = rollouts_here / rollouts_there / margin if rollouts_there else 0.0
    return BreakEven(
        1.0 - learner_there,
        ratio,
        margin,
        longer,
        there.usd_per_step,
        there.synchronous_usd_per_step,
    )
