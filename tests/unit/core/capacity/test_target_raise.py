"""The bubble changes the target: soon, without windup or flapping, and never for long without effect."""

import random
from dataclasses import dataclass, field

import pytest

from echo2d.core.capacity.activation import ACTIVATION_PATIENCE, Activation, ActivationRules
from echo2d.core.capacity.target_raise import (
    CALM_PERIODS,
    RAISE_MAX,
    RAISE_PERIODS,
    RAISE_STEP,
    VAIN_PERIODS,
    TargetRaise,
)
from echo2d.core.capacity.worker_cost import WorkerOffer
from tests.support.pools import pools_of

PERIOD_S = 10.0
RULES = ActivationRules(review_s=PERIOD_S)


@dataclass
class Loop:
    """Workers that make 1 each, how many the model predicts that a learner needs, and how many it really needs.

    noise: by this share either way a period's bubble is as if the workers made more or less. learner_usd_per_h: in
    usd/h of a worker.
    """

    workers: int
    predicted: float
    needs: float
    noise: float = 0.0
    learner_usd_per_h: float = 100.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    activation: Activation = field(default_factory=Activation)
    now: float = 0.0
    waited_s: float = 0.0
    bubble: float = 0.0

    def period(self) -> bool:
        """Returns whether a worker was activated or deactivated."""
        offers = [WorkerOffer(f"w{number}", 1.0, 1.0) for number in range(self.workers)]
        pools = pools_of(
            offers,
            self.predicted,
            learner_usd_per_h=self.learner_usd_per_h,
            slower=self.activation.raised.factor,
        )
        decision = self.activation.decide(
            RULES, offers, pools, now=self.now, waited_s=self.waited_s
        )
        self.activation.check()
        self.now += PERIOD_S
        made = self.active * (1.0 + self.rng.uniform(-self.noise, self.noise))
        self.bubble = max(0.0, 1.0 - made / self.needs)
        self.waited_s += self.bubble * PERIOD_S
        return bool(decision.activate or decision.deactivate)

    @property
    def active(self) -> int:
        return len(self.activation.active)


SOON = 2 + RAISE_PERIODS + ACTIVATION_PATIENCE


def test_the_target_is_raised_after_a_prediction_that_is_too_low() -> None:
    loop = Loop(workers=60, predicted=20.0, needs=24.2)
    loop.period()
    assert loop.active == 20
    for _ in range(SOON):
        loop.period()
    assert 24 <= loop.active < 1.1 * 24.2
    assert loop.bubble < 0.01
    assert not any(loop.period() for _ in range(CALM_PERIODS))


def test_the_target_does_not_grow_without_a_worker_to_activate() -> None:
    loop = Loop(workers=22, predicted=20.0, needs=40.0)
    for _ in range(100):
        loop.period()
    assert loop.active == 22
    loop.workers, loop.needs = 60, 20.0
    loop.period()
    assert loop.active <= RAISE_MAX * 20.0 + 1
    for _ in range(60 * CALM_PERIODS):
        loop.period()
    assert loop.activation.raised.factor == 1.0
    assert loop.active <= 22


@pytest.mark.parametrize("rng_seed", range(10))
def test_noise_changes_the_target_in_at_most_one_period_of_ten(rng_seed: int) -> None:
    loop = Loop(60, 20.0, 20.0, noise=0.3, rng=random.Random(rng_seed))
    for _ in range(50):
        loop.period()
    assert sum(loop.period() for _ in range(400)) <= 40, f"rng_seed={rng_seed}"


@pytest.mark.parametrize(("learner_usd_per_h", "more"), [(100.0, True), (1.0, False)])
def test_no_worker_that_costs_more_than_the_waiting_is_activated(
    learner_usd_per_h: float, more: bool
) -> None:
    """17 % of a learner and 20 workers at 1 usd/h, against 4 workers more."""
    loop = Loop(60, 20.0, 24.2, learner_usd_per_h=learner_usd_per_h)
    for _ in range(2 * SOON):
        loop.period()
    assert (loop.active > 20) == more


def test_a_lost_half_of_the_pool_is_replaced_within_three_periods() -> None:
    loop = Loop(workers=60, predicted=20.0, needs=20.0)
    for _ in range(5):
        loop.period()
    before = set(loop.activation.active)
    here = [WorkerOffer(f"w{number}", 1.0, 1.0) for number in range(60)]
    lost = set(sorted(before)[: len(before) // 2])
    periods = 0
    while loop.active < len(before) or not lost.isdisjoint(loop.activation.active):
        left = [offer for offer in here if offer.name not in lost]
        pools = pools_of(left, 20.0)
        loop.activation.decide(RULES, left, pools, now=loop.now, waited_s=loop.waited_s)
        loop.now += PERIOD_S
        periods += 1
    assert periods <= 3


def test_a_bubble_that_comes_in_bursts_counts_by_its_mean() -> None:
    target = TargetRaise()
    assert [target.look(bubble, 0.0) for bubble in (0.0, 0.5, 0.0, 0.5, 0.0, 0.5)] == [
        False
    ] * 5 + [True]
    assert target.factor == pytest.approx(1.0 / 0.75)


def test_a_predicted_bubble_does_not_raise_the_target_and_calm_lowers_it() -> None:
    target = TargetRaise()
    assert not any(target.look(0.3, 0.29) for _ in range(10 * RAISE_PERIODS))
    assert any(target.look(0.1, 0.0) for _ in range(RAISE_PERIODS))
    target.changed()
    raised = target.factor
    for period in range(CALM_PERIODS):
        assert target.look(0.0, 0.0) == (period == CALM_PERIODS - 1)
    assert target.factor == pytest.approx(raised - RAISE_STEP)


def test_a_raise_in_vain_is_taken_back_and_not_tried_again_soon() -> None:
    target = TargetRaise()
    for _ in range(RAISE_PERIODS):
        target.look(0.2, 0.0)
    assert target.factor > 1.0
    target.changed()  # more workers, and the learner waits as before
    for _ in range(RAISE_PERIODS):
        target.look(0.2, 0.0)
    assert target.factor == 1.0
    assert not any(target.look(0.2, 0.0) for _ in range(VAIN_PERIODS - 1))
