"""When workers are activated and deactivated, and that noise alone hardly changes the set."""

import random
from dataclasses import replace

import pytest

from echo2d.core.capacity.activation import (
    ACTIVATION_PATIENCE,
    Activation,
    ActivationRules,
    Decision,
)
from echo2d.core.capacity.worker_cost import WorkerOffer
from tests.support.pools import pools_of

RULES = ActivationRules(review_s=10.0, cool_down_s=20.0)


def fleet(
    count: int, usd_per_h: float = 1.0, mu: float = 1.0, name: str = "w"
) -> list[WorkerOffer]:
    return [WorkerOffer(f"{name}{index}", mu, usd_per_h) for index in range(count)]


def settled(
    offers: list[WorkerOffer], mu_min: float | None, rules: ActivationRules = RULES
) -> Activation:
    activation = Activation()
    activation.decide(rules, offers, pools_of(offers, mu_min), now=0.0)
    activation.check()
    return activation


def test_the_cheapest_workers_are_activated_up_to_the_target() -> None:
    activation = settled([*fleet(4, 2.0, name="dear"), *fleet(4)], 5.0)
    assert sorted(activation.active) == ["dear0", "w0", "w1", "w2", "w3"]


def test_a_worker_that_joins_late_is_activated_at_once_during_a_shortage() -> None:
    activation = settled(fleet(1), 5.0)
    assert activation.decide(RULES, fleet(3), pools_of(fleet(3), 5.0), now=0.1).activate == (
        "w1",
        "w2",
    )
    assert len(activation.decide(RULES, fleet(9), pools_of(fleet(9), 5.0), now=0.2).activate) == 2
    assert (
        activation.decide(RULES, fleet(9), pools_of(fleet(9), 9.0), now=0.3) == Decision()
    )  # not before the next review, and more


def test_a_lost_worker_is_replaced_at_once() -> None:
    activation = settled(fleet(9), 5.0)
    assert len(activation.active) == 5
    gone = activation.decide(RULES, fleet(9)[2:], pools_of(fleet(9)[2:], 5.0), now=1.0)
    assert (len(gone.activate), gone.deactivate) == (2, ())


def test_a_loss_is_replaced_up_to_the_throughput_before_it() -> None:
    """That more is needed by now has to last, whoever is lost meanwhile."""
    activation = settled(fleet(9), 5.0)
    lost = activation.decide(RULES, fleet(9)[1:], pools_of(fleet(9)[1:], 7.0), now=1.0)
    assert (len(lost.activate), len(activation.active)) == (1, 5)
    for review in range(1, ACTIVATION_PATIENCE):
        assert (
            activation.decide(
                RULES, fleet(9)[1:], pools_of(fleet(9)[1:], 7.0), now=50.0 + 10 * review
            )
            == Decision()
        )
        assert (
            len(
                activation.decide(
                    RULES,
                    fleet(9)[1 + review :],
                    pools_of(fleet(9)[1 + review :], 7.0),
                    now=51.0 + 10 * review,
                ).activate
            )
            == 1
        )
    assert (
        len(activation.decide(RULES, fleet(9)[1:], pools_of(fleet(9)[1:], 7.0), now=200.0).activate)
        == 2
    )
    assert activation.changes == 1


def test_an_expensive_set_is_replaced_although_workers_are_lost_again_and_again() -> None:
    dear, cheap = fleet(9, 2.0, name="dear"), fleet(5, 1.0)
    activation = settled(dear, 5.0)
    for review in range(1, ACTIVATION_PATIENCE):
        assert (
            activation.decide(
                RULES, [*dear, *cheap], pools_of([*dear, *cheap], 5.0), now=30.0 * review
            )
            == Decision()
        )
        dear = dear[1:]
        assert (
            len(
                activation.decide(
                    RULES, [*dear, *cheap], pools_of([*dear, *cheap], 5.0), now=30.0 * review + 1
                ).activate
            )
            == 1
        )
    assert activation.decide(
        RULES, [*dear, *cheap], pools_of([*dear, *cheap], 5.0), now=200.0
    ).deactivate
    assert {name[0] for name in activation.active} == {"w"}


def test_a_worker_with_a_notice_drains_and_is_replaced() -> None:
    activation = settled(fleet(9), 5.0)
    decision = activation.decide(RULES, fleet(9), pools_of(fleet(9), 5.0), now=1.0, leaving={"w0"})
    assert (len(decision.activate), decision.deactivate) == (1, ("w0",))
    assert "w0" not in activation.active


def test_a_short_shortage_activates_no_worker() -> None:
    activation = settled(fleet(9), 5.0)
    for review in range(1, ACTIVATION_PATIENCE):
        assert (
            activation.decide(RULES, fleet(9), pools_of(fleet(9), 7.0), now=50.0 + 10 * review)
            == Decision()
        )
    assert len(activation.decide(RULES, fleet(9), pools_of(fleet(9), 7.0), now=100.0).activate) == 2
    assert activation.changes == 1


def test_surplus_workers_are_deactivated_one_by_one_and_the_most_expensive_first() -> None:
    offers = [*fleet(4, 2.0, name="dear"), *fleet(4)]
    activation = settled(offers, 7.0)
    rules = replace(RULES, cool_down_s=0.0)
    decisions = [
        activation.decide(rules, offers, pools_of(offers, 6.1), now=10.0 * review)
        for review in range(1, 1 + ACTIVATION_PATIENCE)
    ]
    assert [name[:4] for name in decisions[-1].deactivate] == ["dear"]
    assert decisions[:-1] == [Decision()] * (ACTIVATION_PATIENCE - 1)


def test_a_much_cheaper_set_takes_over_and_a_little_cheaper_one_does_not() -> None:
    activation = settled(fleet(5, 2.0, name="dear"), 5.0)
    dear = fleet(5, 2.0, name="dear")
    for review in range(1, 20):
        assert (
            activation.decide(
                RULES,
                [*dear, *fleet(5, 1.85)],
                pools_of([*dear, *fleet(5, 1.85)], 5.0),
                now=10.0 * review,
            )
            == Decision()
        )
    for review in range(20, 20 + ACTIVATION_PATIENCE):
        decision = activation.decide(
            RULES,
            [*dear, *fleet(5, 1.0)],
            pools_of([*dear, *fleet(5, 1.0)], 5.0),
            now=10.0 * review,
        )
    assert (len(decision.activate), len(decision.deactivate)) == (5, 5)


def test_no_worker_changes_its_state_during_the_cool_down_or_a_hold() -> None:
    rules = replace(RULES, cool_down_s=100.0)
    activation = settled(fleet(9), 4.0, rules)
    assert [
        activation.decide(rules, fleet(9), pools_of(fleet(9), 7.0), now=10.0 * review)
        for review in range(1, 10)
    ] == [Decision()] * 9
    assert activation.decide(rules, fleet(9), pools_of(fleet(9), 7.0), now=100.0).activate
    held = replace(RULES, hold_s=1000.0)
    activation = settled(fleet(9), 6.0, held)
    assert [
        activation.decide(held, fleet(9), pools_of(fleet(9), 2.0), now=10.0 * review)
        for review in range(1, 99)
    ] == [Decision()] * 98
    later = [
        activation.decide(held, fleet(9), pools_of(fleet(9), 2.0), now=1000.0 + 10 * review)
        for review in range(ACTIVATION_PATIENCE)
    ]
    assert later[-1].deactivate


def test_all_workers_work_if_no_set_is_enough() -> None:
    activation = Activation()
    assert len(activation.decide(RULES, fleet(3), pools_of(fleet(3), None), now=0.0).activate) == 3


def test_workers_with_unknown_rates_work_too_if_the_known_ones_are_too_few() -> None:
    """They are never measured otherwise."""
    activation = settled([*fleet(2), *fleet(2, mu=0.0, name="new")], 5.0)
    assert sorted(activation.active) == ["new0", "new1", "w0", "w1"]
    alone = settled(fleet(1, mu=0.0), 5.0)
    assert sorted(alone.active) == ["w0"]


def test_no_worker_is_replaced_by_one_with_a_guessed_rate() -> None:
    dear = fleet(5, 2.0, name="dear")
    activation = settled(dear, 5.0)
    lie = WorkerOffer("lie", 100.0, 1.0, guessed=True)
    decisions = [
        activation.decide(RULES, [*dear, lie], pools_of([*dear, lie], 5.0), now=10.0 * review)
        for review in range(1, 9)
    ]
    assert [(each.activate, each.deactivate) for each in decisions if each != Decision()] == [
        (("lie",), ())
    ]
    shown = replace(lie, mu=0.1, guessed=False)
    for review in range(9, 30):
        activation.decide(RULES, [*dear, shown], pools_of([*dear, shown], 5.0), now=10.0 * review)
    assert {offer.name for offer in dear} <= activation.active.keys()


def test_a_cheaper_worker_takes_over_once_its_guessed_rate_is_confirmed() -> None:
    dear = fleet(5, 2.0, name="dear")
    activation = settled(dear, 5.0)
    for review in range(1, 30):
        cheap = [replace(offer, guessed=review < 15) for offer in fleet(5)]
        activation.decide(RULES, [*dear, *cheap], pools_of([*dear, *cheap], 5.0), now=10.0 * review)
    assert sorted(activation.active) == [f"w{number}" for number in range(5)]


def test_the_order_of_workers_decides_if_they_cost_nothing() -> None:
    activation = Activation()
    offers = [*fleet(4, 2.0, name="dear"), *fleet(4)]
    decision = activation.decide(
        replace(RULES, by_cost=False), offers, pools_of(offers, 4.0), now=0.0
    )
    assert decision.activate == ("dear0", "dear1", "dear2", "dear3")


@pytest.mark.parametrize("rng_seed", range(8))
@pytest.mark.parametrize("smoothing", [0.25, 0.5])
def test_noise_changes_hardly_any_activation(rng_seed: int, smoothing: float) -> None:
    """+-30 % in every mu_i, smoothed as the estimators do: at most one change in ten periods once settled."""
    chance = random.Random(rng_seed)
    prices = [chance.uniform(0.8, 1.6) for _ in range(24)]
    seen = [1.0] * 24
    activation, changes = Activation(), []
    for period in range(120):
        seen = [(1 - smoothing) * one + smoothing * chance.uniform(0.7, 1.3) for one in seen]
        offers = [
            WorkerOffer(f"w{index}", mu, price)
            for index, (mu, price) in enumerate(zip(seen, prices, strict=True))
        ]
        decision = activation.decide(
            replace(RULES, cool_down_s=30.0), offers, pools_of(offers, 10.0), now=10.0 * period
        )
        activation.check()
        if period >= 20:
            changes.append(bool(decision.activate or decision.deactivate))
    assert sum(changes) <= len(changes) / 10, f"rng_seed={rng_seed}"


def test_no_worker_that_costs_nothing_is_deactivated() -> None:
    free = fleet(9, usd_per_h=0.0)
    activation = settled(free, None)
    for review in range(1, 9):
        decision = activation.decide(RULES, free, pools_of(free, 2.0), now=10.0 * review)
        assert decision == Decision()


def test_a_shortage_is_found_although_workers_are_often_lost() -> None:
    rules = replace(RULES, cool_down_s=20.0)
    here = fleet(40)
    activation = settled(here, 4.0, rules)
    for step in range(1, 12):
        lost = next(iter(activation.active))
        here = [offer for offer in here if offer.name != lost]
        assert activation.decide(rules, here, pools_of(here, 9.0), now=6.0 * step).activate
        activation.decide(rules, here, pools_of(here, 9.0), now=6.0 * step + 1.0)
    assert len(activation.active) == 9


def test_a_loss_during_a_general_shortage_counts_as_a_loss() -> None:
    activation = settled(fleet(9), 5.0)
    decision = activation.decide(RULES, fleet(9)[1:], pools_of(fleet(9)[1:], None), now=1.0)
    assert (len(decision.activate), len(activation.active)) == (1, 5)


def test_a_worker_that_joins_after_a_shortage_was_found_is_activated_at_once() -> None:
    """A box that was rented for it is paid for from the start."""
    activation = settled(fleet(5), 5.0)
    for review in range(1, ACTIVATION_PATIENCE + 3):
        assert (
            activation.decide(RULES, fleet(5), pools_of(fleet(5), 7.0), now=20.0 + 10.0 * review)
            == Decision()
        )
    assert len(activation.decide(RULES, fleet(9), pools_of(fleet(9), 7.0), now=75.1).activate) == 2
    assert activation.decide(RULES, fleet(9), pools_of(fleet(9), 9.0), now=75.2) == Decision()


def test_a_worker_without_output_does_not_keep_an_expensive_worker_active() -> None:
    """At the start all work, and some of those that are cheap are never asked for anything."""
    here = [*fleet(9, 2.0, name="dear"), *fleet(5), WorkerOffer("idle", 1.0, 0.9, guessed=True)]
    activation = settled(here, None)
    assert len(activation.active) == 15
    for review in range(1, 9):
        activation.decide(RULES, here, pools_of(here, 5.0), now=10.0 * review)
    assert (
        {offer.name for offer in fleet(5)}
        <= activation.active.keys()
        <= {*(f"w{n}" for n in range(5)), "idle"}
    )
