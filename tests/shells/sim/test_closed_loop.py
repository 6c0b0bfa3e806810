"""A running coordinator decides by its own measurements: the real CoordinatorState, workers and messages."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from echo2d.core.base.ids import RunId
from echo2d.core.rules.prices import NamedPrice, Price
from echo2d.core.rules.run import ActivationTable, DisseminationMode, DisseminationTable, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.status.schema import Status
from echo2d.plan.fleet.forecast import provision
from echo2d.plan.fleet.from_status import fleet_of
from echo2d_lab.faults.engine import STOP, VOCAB
from echo2d_lab.faults.fault_schedule import Schedule, WorkerSpec
from echo2d_lab.faults.world import SimulatedRun

WORKERS, SLOTS, TOKEN_S, TOKENS_MAX = (
    6,
    4,
    2.0,
    4,
)  # a sample takes 5 s on average: 0.8 trajectories/s a worker
PER_STEP, PERIOD_S = 32, 20.0  # 1.6 trajectories/s are needed, at kappa = 1
SETTLED = 15  # periods
PRICES = tuple(
    NamedPrice(f"w{number}", Price(usd_per_h=0.2 + 0.05 * number))
    for number in range(1, WORKERS + 1)
)


def closed(
    rng_seed: int,
    periods: int,
    mode: DisseminationMode = "background",
    tokens_max: int = TOKENS_MAX,
    token_s: float = TOKEN_S,
    **changes: Any,
) -> SimulatedRun:
    task = TaskRules(max_new_tokens=tokens_max, stop_token_ids=(STOP,))
    rules = RunRules(
        run_id=RunId("run-1"),
        staleness_max=3,
        publish_every=1,
        trajectories_per_step=PER_STEP,
        group_size=2,
        tasks=(task,),
        vocab_size=VOCAB,
        over_stale="drop",
        filter_zero_variance=False,
        group_patience=0.0,
        prices=PRICES,
        **changes,
        dissemination=DisseminationTable(mode=mode),
        activation=ActivationTable(mode="auto"),
    )
    worker = WorkerSpec(SLOTS, 0.005, token_s, 0.0, 0.0, 0.0, "")
    return SimulatedRun(
        Schedule(rng_seed, rules, (worker,) * WORKERS, (), periods * PERIOD_S, PERIOD_S, 1, 0.0)
    )


def status(loop: SimulatedRun) -> Status:
    return loop.coordinator.state.status()


def active(loop: SimulatedRun) -> list[str]:
    return sorted(
        each.name for each in status(loop).workers if each.active and each.state == "joined"
    )


def at_period(loop: SimulatedRun, period: float, act: Callable[[], None]) -> None:
    loop._clock.at(period * PERIOD_S, act)


def test_the_cheapest_sufficient_workers_are_active_and_a_plan_is_made_for_them() -> None:
    loop = closed(0, 30)
    loop.run()
    seen = status(loop)
    assert active(loop) == ["w1", "w2", "w3"]
    provision_, standby = seen.provision, [each for each in seen.workers if not each.active]
    assert provision_.mu_min == pytest.approx(PER_STEP / PERIOD_S, rel=0.15)
    assert provision_.mu_pool == pytest.approx(3 * 0.8, rel=0.25)
    assert (provision_.shortfall or 0.0) < 0
    assert all(each.lag is not None and each.lag <= 1 for each in standby)
    assert all(each.leases == 0 for each in standby)
    assert provision_.bottleneck.kind == "learner"
    planned = provision(fleet_of(seen)).facts()
    assert planned["feasible"]
    assert len(planned["workers"]) == 3
    assert provision_.estimates.t_bcast_s is not None
    assert planned["t_bcast_s"] == provision_.estimates.t_bcast_s.value
    for fact, value in (("leaving", True), ("serving", None), ("state", "suspected")):
        changed: Any = {fact: value}
        first, *others = seen.workers
        fewer = fleet_of(replace(seen, workers=(replace(first, **changed), *others)))
        assert len(fewer.workers) == WORKERS - 1, "one that does not count is no part of a plan"


def test_a_workers_pause_for_a_version_does_not_count_as_slowness_but_as_lost_time() -> None:
    loop = closed(0, 8, mode="exclusive")
    loop.run()
    seen = status(loop)
    provision_, measured = seen.provision, seen.provision.estimates
    assert measured.still_s is not None
    assert measured.t_bcast_s is not None
    assert measured.t_train_s is not None
    still_s, t_bcast_s = measured.still_s.value, measured.t_bcast_s.value
    assert 0.05 < still_s < t_bcast_s, "they stop once the version has a root"
    assert provision_.mu_min == pytest.approx(PER_STEP / (measured.t_train_s.value - still_s))
    assert provision_.mu_available == pytest.approx(WORKERS * 0.8, rel=0.25)
    assert fleet_of(seen).policy.still_share == pytest.approx(still_s / t_bcast_s)


@pytest.mark.parametrize("rng_seed", range(3))
def test_a_loss_of_half_of_the_active_workers_is_replaced_within_three_periods(
    rng_seed: int,
) -> None:
    loop, waited = closed(rng_seed, 30), list[float]()

    def strike() -> None:
        for name in active(loop)[: (len(active(loop)) + 1) // 2]:
            worker = loop.workers[int(name[1:]) - 1]
            loop._control.vanish(worker)
            loop._kill_worker(worker, None)
            loop._gone.add(worker.number)

    at_period(loop, SETTLED, strike)
    for period in (SETTLED + 3, SETTLED + 13):
        at_period(
            loop,
            period,
            lambda: waited.append(loop.coordinator.state._statistics.learner.starved_s),
        )
    loop.run()
    assert (waited[1] - waited[0]) / (10 * PERIOD_S) < 0.05
    assert len(active(loop)) >= 3


@pytest.mark.parametrize(
    "rng_seed", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2))]
)
def test_noise_in_the_rates_of_workers_changes_hardly_any_activation(rng_seed: int) -> None:
    """Each is up to 30 % faster or slower from one period to the next."""
    periods, chance, changes = 70, random.Random(rng_seed), list[int]()
    loop = closed(rng_seed, periods)

    def shake() -> None:
        for worker in loop.workers:
            worker.pace.token_s = TOKEN_S / chance.uniform(0.7, 1.3)

    for period in range(1, periods):
        at_period(loop, period, shake)
    for period in (SETTLED, periods - 1):
        at_period(loop, period, lambda: changes.append(status(loop).provision.changes))
    loop.run()
    assert changes[1] - changes[0] <= (periods - SETTLED) / 10


def test_a_worker_with_a_notice_gets_no_more_leases_and_is_replaced_at_once() -> None:
    loop = closed(1, 20)
    at_period(loop, SETTLED, partial(loop.workers[0].leave))
    seen = list[list[str]]()
    for moment in (SETTLED - 0.1, SETTLED + 0.1):
        at_period(loop, moment, lambda: seen.append(active(loop)))
    loop.run()
    before, after = seen
    assert "w1" in before
    assert "w1" not in after
    # What it made is made good: one may do, or two that were measured to be a little slower.
    assert len(before) <= len(after) <= len(before) + 1


@pytest.mark.nightly
@pytest.mark.parametrize("rng_seed", range(3))
def test_answers_that_grow_longer_make_no_standby_worker_look_cheap(rng_seed: int) -> None:
    """All become slower by 1.8 in 30 periods: one more worker is needed, and nobody is swapped for one who is measured
    no more.

    Answers have up to 32 tokens: a worker that told up to four slow ones at once would be silent for longer than a
    lease may be left alone."""
    loop = closed(rng_seed, 55, tokens_max=32, token_s=0.3)

    def slower() -> None:
        for worker in loop.workers:
            worker.pace.token_s *= 1.8 ** (1 / 15)

    for period in range(15):
        at_period(loop, SETTLED + 2 * period, slower)
    changes, mus = list[int](), list[dict[str, float | None]]()
    at_period(loop, SETTLED, lambda: changes.append(status(loop).provision.changes))
    at_period(loop, 54, lambda: mus.append({each.name: each.mu for each in status(loop).workers}))
    loop.run()
    assert status(loop).provision.changes - changes[0] <= 2
    assert len(active(loop)) == 4
    [seen] = mus
    working = [seen[name] or 0.0 for name in active(loop)]
    idle = [mu or 0.0 for name, mu in seen.items() if name not in active(loop)]
    assert max(idle) < 1.35 * min(working), seen


@pytest.mark.nightly
def test_a_seed_that_pays_for_its_bytes_does_not_hold_up_the_learner() -> None:
    """Once T_train and T_bcast are measured; with no price it also sends what no relay takes, to everybody."""
    spares: dict[float, list[float]] = {}
    bubbles: dict[float, float | None] = {}
    for price in (0.0, 0.09):
        loop, sent = closed(0, 2 * SETTLED, seed_usd_per_gb_up=price), list[float]()

        def look(loop: SimulatedRun = loop, sent: list[float] = sent) -> None:
            transmission = loop.coordinator.state._publishing.spreading
            assert transmission is not None
            if transmission.plan is None:  # it is not encoded yet
                loop._clock.after(1.0, look)
                return
            sent.append(max(stripe.spare for stripe in transmission.plan.stripes))

        for period in range(1, SETTLED):
            at_period(loop, period - 0.25, look)
        loop.run()
        # The bubble of the newest 16 steps. In the first ones the pool was not known yet.
        spares[price], bubbles[price] = sent, status(loop).provision.bubble
    assert spares[0.0] == [1.0] * (SETTLED - 1)
    assert spares[0.09][0] == 1.0
    assert spares[0.09][3:] == [0.0] * (SETTLED - 4)
    assert bubbles[0.09] == pytest.approx(bubbles[0.0], abs=0.01)
