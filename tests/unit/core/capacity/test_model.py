"""The learner's demand: the worked example, the edges, and a fluid run of the same rules step by step."""

import math
from dataclasses import replace

import pytest

from echo2d.core.capacity.model import (
    Demand,
    bubble,
    judge,
    mu_min,
    period_s,
    publish_every_auto,
    share_of_bcast,
)
from echo2d.core.rules.run import DisseminationMode

PAPER = Demand(100.0, 256, 4, 3, 60.0, "exclusive")
OURS = replace(PAPER, mode="background", pause_s=5.0)


def test_the_model_gives_the_numbers_of_the_worked_example() -> None:
    assert mu_min(PAPER) == pytest.approx(3.2)
    assert bubble(PAPER, 0.9 * 3.2) == pytest.approx(0.0816, abs=1e-4)
    assert bubble(PAPER, 0.7 * 3.2) == pytest.approx(0.255, abs=1e-3)
    assert mu_min(OURS) == pytest.approx(768 / 295)
    assert mu_min(replace(OURS, staleness_max=1, publish_every=1)) == pytest.approx(6.4)


def test_workers_that_stop_later_than_the_publish_lose_less() -> None:
    """H = 45 s of B = 60 s; where one version comes after the other they always stand still."""
    late = replace(PAPER, still_share=share_of_bcast(45.0, 60.0))
    assert mu_min(late) == pytest.approx(768 / 255)
    assert bubble(late, 0.9 * 768 / 255) == pytest.approx(1 - 300 / (768 / (0.9 * 768 / 255) + 45))
    assert replace(late, t_bcast_s=20.0).lost_s == 15.0
    assert mu_min(replace(late, t_bcast_s=301.0)) is None
    assert replace(OURS, still_share=0.5).lost_s == 5.0
    assert (share_of_bcast(None, 60.0), share_of_bcast(61.0, 60.0), share_of_bcast(1.0, 0.0)) == (
        1.0,
        1.0,
        1.0,
    )


def test_computing_kv_caches_again_costs_as_a_pause_does_and_delays_what_is_fresh() -> None:
    """C = 10 s: H = P + C = 15 s in background mode, W + C = 70 s in exclusive mode."""
    again = replace(OURS, recompute_s=10.0)
    assert again.lost_s == 15.0
    assert mu_min(again) == pytest.approx(768 / 285)
    assert replace(PAPER, recompute_s=10.0).lost_s == 70.0
    assert again.delivery_s == OURS.delivery_s + 10.0
    assert mu_min(replace(again, staleness_max=1, publish_every=1)) == pytest.approx(256 / 30)
    skipping = replace(again, t_bcast_s=600.0, staleness_max=8)
    assert skipping.lost_s == pytest.approx(15.0 / 2), "only every second version is served"


def test_a_step_without_overlap_is_the_sum_of_its_parts() -> None:
    """S = 0: train, broadcast, generate, one after the other."""
    sequential = Demand(100.0, 256, 0, 1, 20.0, t_gen_s=10.0)
    assert mu_min(sequential) is None
    assert period_s(sequential, 2.56) == pytest.approx(100 + 20 + 10 + 100)


@pytest.mark.parametrize(
    ("t_bcast_s", "changes", "kappa"),
    [
        (50.0, {}, 1),
        (100.0, {}, 2),  # strictly longer than the broadcast
        (250.0, {}, 3),
        (9900.0, {}, 4),  # no kappa is longer
        # Refits cost a fifth of a step: with 2 steps a version 11 % less throughput is needed, with 3 hardly less.
        (10.0, {"pause_s": 20.0}, 2),
        (10.0, {"pause_s": 20.0, "t_gen_s": 280.0}, 1),  # long answers would be too old
        (10.0, {"pause_s": 20.0, "t_gen_s": 999.0}, 1),  # they are in any case
    ],
)
def test_the_publish_period_follows_the_time_of_a_broadcast(
    t_bcast_s: float, changes: dict[str, float], kappa: int
) -> None:
    demand = Demand(100.0, 256, 3, 1, t_bcast_s)
    assert publish_every_auto(replace(demand, **changes)) == kappa  # type: ignore[arg-type]


def test_a_publish_that_finds_another_one_spreading_waits() -> None:
    slow = Demand(100.0, 256, 6, 1, 250.0)
    assert slow.delivery_s == 500
    assert replace(slow, publish_every=3).delivery_s == 250


def test_a_run_without_workers_makes_no_progress() -> None:
    assert bubble(PAPER, 0.0) == 1.0
    assert judge(PAPER, 0.0).feasible is False


def test_the_reason_for_infeasibility_names_the_numbers_and_what_would_help() -> None:
    stuck = judge(replace(PAPER, t_bcast_s=300.0))
    assert stuck.mu_min is None
    assert (
        "a broadcast takes 300.0 s, as long as kappa = 3 train steps (300.0 s) or longer"
        in stuck.why_not
    )
    assert [change.text for change in stuck.changes] == [
        "S = 7 with kappa = 4",
        "T_bcast = 199.0 s",
    ]
    small = judge(PAPER, 3.0)
    assert "all workers together make 10,800 trajectories/h" in small.why_not
    assert "R = 218" in [change.text for change in small.changes]
    assert judge(PAPER, 3.6).why_not == ""


def test_a_demand_that_no_change_can_meet_is_reported() -> None:
    hopeless = judge(Demand(1.0, 256, 0, 1, 0.0, "background", pause_s=1000.0), 0.0)
    assert hopeless.changes == ()
    assert hopeless.why_not.endswith("no single change would do")
    late = judge(
        replace(PAPER, mode="background", staleness_max=2), 0.5
    )  # late, and too little at any S
    assert "data would be too old" in late.why_not
    assert (
        "make 1,800 trajectories/h; the learner needs 9,216 at the very least: no single"
        in late.why_not
    )


FRESH = (
    (4, 3, 60.0),
    (2, 1, 80.0),
    (1, 1, 40.0),
    (6, 6, 50.0),
    (4, 3, 150.0),
    (7, 1, 250.0),
)  # S, kappa, T_bcast
CASES = [
    ("exclusive", *FRESH[0], 1.0, 0.0),
    ("exclusive", *FRESH[0], 0.5, 0.0),
    ("exclusive", *FRESH[0], 0.5, 20.0),
    *(("background", *each, 1.0, 0.0) for each in FRESH),
    *(("background", *each, 1.0, 20.0) for each in FRESH[:3]),
]


@pytest.mark.parametrize("share", [0.7, 0.9, 1.0, 1.1])
@pytest.mark.parametrize(
    ("mode", "bound", "kappa", "t_bcast_s", "still_share", "recompute_s"), CASES
)
def test_a_fluid_run_agrees_with_the_model(
    mode: DisseminationMode,
    share: float,
    bound: int,
    kappa: int,
    t_bcast_s: float,
    still_share: float,
    recompute_s: float,
) -> None:
    demand = Demand(
        100.0, 256, bound, kappa, t_bcast_s, mode, pause_s=5.0, still_share=still_share,
        recompute_s=recompute_s,
    )  # fmt: skip
    needed = mu_min(demand)
    assert needed is not None
    assert Fluid(demand, share * needed).bubble() == pytest.approx(
        bubble(demand, share * needed), abs=0.01
    )


class Fluid:
    """Workers that are one liquid, admission by count as in `staleness`, a learner that takes batches in order.

    made[n]: of batch n. Who serves w works for the first batch n that is not full, if n - 1 - w <= S.
    """

    def __init__(self, demand: Demand, mu: float) -> None:
        self.demand, self.mu, self.now = demand, mu, 0.0
        self.made = [0.0] * 400
        self.trained, self.busy_until, self.published, self.serving = 0, math.inf, 0, 0
        self.spreading: tuple[float, int] | None = None  # served when, version
        self.waiting: int | None = None
        self.waited, self.recomputes_until = 0.0, 0.0

    def bubble(self, warm: int = 42, steps: int = 84, tick_s: float = 1.0) -> float:
        began = 0.0
        while self.trained < steps:
            self._generate(tick_s)
            self.now += tick_s
            self._learn(tick_s)
            self._spread()
            if self.trained < warm:
                self.waited, began = 0.0, self.now
        return self.waited / (self.now - began)

    def _generate(self, tick_s: float) -> None:
        exclusive = self.demand.mode == "exclusive"
        lost_s = (
            self.demand.still_share * self.demand.t_bcast_s if exclusive else self.demand.pause_s
        )
        silent = self.spreading is not None and self.now >= self.spreading[0] - lost_s
        silent |= self.now < self.recomputes_until
        work = 0.0 if silent else self.mu * tick_s
        for step in range(self.trained + 1, self.serving + self.demand.staleness_max + 2):
            part = min(work, self.demand.trajectories_per_step - self.made[step])
            self.made[step] += part
            work -= part

    def _learn(self, tick_s: float) -> None:
        if self.now >= self.busy_until:
            self.trained, self.busy_until = self.trained + 1, math.inf
            if self.trained - self.published >= self.demand.publish_every:
                self.published = self.waiting = self.trained
        if self.busy_until is math.inf:
            if self.made[self.trained + 1] >= self.demand.trajectories_per_step - 1e-6:
                self.busy_until = self.now + self.demand.t_train_s
            else:
                self.waited += tick_s

    def _spread(self) -> None:
        if self.spreading is not None and self.now >= self.spreading[0]:
            self.serving, self.spreading = self.spreading[1], None
            self.recomputes_until = self.now + self.demand.recompute_s
        if self.spreading is None and self.waiting is not None:
            self.spreading, self.waiting = (self.now + self.demand.t_bcast_s, self.waiting), None
