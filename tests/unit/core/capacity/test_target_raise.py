"""The target follows the bubble: without windup, without flapping, and soon."""

import random
from dataclasses import dataclass, field, replace

import pytest

from echo2d.core.capacity.activation import Activation, ActivationRules
from echo2d.core.capacity.target_raise import (
    CALM_PERIODS,
    RAISE_MAX,
    RAISE_PATIENCE,
    RAISE_STEP,
    TargetRaise,
)
from echo2d.core.capacity.worker_cost import WorkerOffer

PERIOD_S = 10.0
RULES = ActivationRules(review_s=PERIOD_S)


@dataclass
class Loop:
    """Workers that make 1 each, a mu_min that the model predicts, and what the learner really needs.

    noise: by this share either way a period's bubble is as if the workers made more or less.
    """

    workers: int
    mu_min: float
    needs: float
    noise: float = 0.0
    usd_per_h: float = 1.0
    rules: ActivationRules = RULES
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    activation: Activation = field(default_factory=Activation)
    now: float = 0.0
    waited_s: float = 0.0
    bubble: float = 0.0

    def period(self) -> bool:
        """Returns whether a worker was activated or deactivated."""
        offers = [WorkerOffer(f"w{number}", 1.0, self.usd_per_h) for number in range(self.workers)]
        decision = self.activation.decide(
            self.rules, offers, self.mu_min, now=self.now, waited_s=self.waited_s
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


def test_a_prediction_that_is_too_low_is_made_good() -> None:
    """The pool is a tenth above what was predicted, and the learner waits for 9 % of its time."""
    loop = Loop(workers=60, mu_min=20.0, needs=24.2)
    for _ in range(2 + RAISE_PATIENCE):
        loop.period()
    assert loop.active >= 24.2
    assert loop.bubble == 0.0
    assert loop.active < 1.1 * 1.15 * 24.2
    assert not any(loop.period() for _ in range(CALM_PERIODS))


def test_without_anybody_to_activate_nothing_winds_up() -> None:
    loop = Loop(workers=22, mu_min=20.0, needs=40.0)
    for _ in range(100):
        loop.period()
    assert loop.active == 22
    assert loop.activation.raised.factor <= RAISE_MAX
    loop.workers, loop.needs = 60, 20.0
    loop.period()
    wound_up = loop.active
    assert wound_up <= 1.1 * RAISE_MAX * 20.0 + 1
    for _ in range(60 * CALM_PERIODS):
        loop.period()
    assert loop.activation.raised.factor == 1.0
    assert loop.active <= 25


@pytest.mark.parametrize("rng_seed", range(10))
def test_noise_changes_at_most_one_period_in_ten(rng_seed: int) -> None:
    loop = Loop(60, 20.0, 20.0, noise=0.3, rng=random.Random(rng_seed))
    for _ in range(50):
        loop.period()
    assert sum(loop.period() for _ in range(400)) <= 40, f"rng_seed={rng_seed}"


@pytest.mark.parametrize(("learner_usd_per_h", "more"), [(0.0, True), (100.0, True), (1.0, False)])
def test_nobody_is_activated_who_costs_more_than_the_waiting(
    learner_usd_per_h: float, more: bool
) -> None:
    """9 % of a learner and 22 workers at 1 usd/h, against 5 workers more; 0: its price is not known."""
    loop = Loop(workers=60, mu_min=20.0, needs=24.2)
    loop.rules = replace(RULES, learner_usd_per_h=learner_usd_per_h)
    for _ in range(10):
        loop.period()
    assert (loop.active > 22) == more
    assert (loop.activation.raised.factor > 1.0) == more


def test_after_a_calm_time_a_worker_goes_that_is_not_needed() -> None:
    """Whatever gamma is; one that costs nothing may stay."""
    loop = Loop(workers=30, mu_min=20.0, needs=20.0)
    loop.period()
    assert loop.active == 22
    for _ in range(3 * CALM_PERIODS):
        loop.period()
    assert loop.active == 21
    free = Loop(workers=30, mu_min=20.0, needs=20.0, usd_per_h=0.0)
    for _ in range(3 * CALM_PERIODS):
        free.period()
    assert free.active == 22


def test_a_lost_half_is_replaced_within_three_periods() -> None:
    loop = Loop(workers=60, mu_min=20.0, needs=20.0)
    for _ in range(5):
        loop.period()
    before = set(loop.activation.active)
    here = [WorkerOffer(f"w{number}", 1.0, 1.0) for number in range(60)]
    lost = set(sorted(before)[: len(before) // 2])
    periods = 0
    while loop.active < len(before) or not lost.isdisjoint(loop.activation.active):
        left = [offer for offer in here if offer.name not in lost]
        loop.activation.decide(RULES, left, 20.0, now=loop.now, waited_s=loop.waited_s)
        loop.now += PERIOD_S
        periods += 1
    assert periods <= 3


def test_one_long_wait_is_no_reason_and_calm_lowers_again() -> None:
    target = TargetRaise()
    assert not any(target.look(bubble, 1.1) for bubble in (0.5, 0.5, 0.0, 0.5, 0.5, 0.0))
    assert [target.look(0.1, 1.1) for _ in range(RAISE_PATIENCE)] == [False] * (
        RAISE_PATIENCE - 1
    ) + [True]
    assert target.factor == pytest.approx(1.1 / 0.9)
    for _ in range(CALM_PERIODS):
        assert not target.look(0.0, 1.3)
    assert target.factor == pytest.approx(1.1 / 0.9 - RAISE_STEP)


def test_what_is_too_little_anyway_is_not_held_against_the_prediction() -> None:
    target = TargetRaise()
    assert not any(target.look(0.5, 0.9) for _ in range(10 * RAISE_PATIENCE))
    assert target.factor == 1.0
