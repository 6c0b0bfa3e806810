"""Fleets in virtual time: results agree with the formulas, whatever happens to the workers."""

import json
from cProfile import Profile
from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.capacity import pipeline
from echo2d.core.capacity.model import bubble, mu_min
from echo2d.core.capacity.pipeline import Pipeline
from echo2d.core.rules.run import DisseminationMode
from echo2d.errors import Fault
from echo2d.plan.fleet.forecast import Ablation, provision
from echo2d.plan.fleet.spec import FleetSpec, load_fleet, read_fleet
from echo2d.plan.fleet.world import FleetWorld
from tests.support.paths import REPO

# Python calls for each trajectory trained on; with 923 a day took 60 s of CPU. Pools that are played in 36 minutes.
CALLS_MAX, PLAYS_MAX = 650.0, 80


def fleet(
    workers: int, *, t_gen_s: float = 20.0, mode: DisseminationMode = "background", **changes: Any
) -> FleetSpec:
    """Workers alike of four slots, 0.2 trajectories/s each; versions take them about 55 s."""
    kind = {
        "name": "w",
        "count": workers,
        "trajectories_per_h": 720,
        "usd_per_h": 0.5,
        "downlink_mbps": 291,
    }
    document = {
        "learner": {"t_train_s": 100, "trajectories_per_step": 64, "staleness_max": 4, "publish_every": 3,
                    "uplink_mbps": 10_000, "usd_per_h": 12.0, **changes.pop("learner", {})},
        "model": {"params": 1e9},
        "fleet": [{**kind, "uplink_mbps": 1000, **changes.pop("kind", {})}],
        "policy": {"pause_s": 5, "t_gen_s": t_gen_s, "mode": mode, **changes.pop("policy", {})},
        "simulate": {"hours": 2.6, "gen_sigma": 0.3, "group_size": 1, **changes},
    }  # fmt: skip
    return read_fleet(document)


@pytest.mark.parametrize("mode", ["background", "exclusive"])
@pytest.mark.parametrize("workers", [3, 4])
def test_too_few_workers_wait_as_long_as_the_formula_says(
    mode: DisseminationMode, workers: int
) -> None:
    """About 0.9 and 1.2 of mu_min in background mode, 0.75 and 1.0 in exclusive mode; 30 publish periods."""
    world = FleetWorld(fleet(workers, mode=mode))
    facts = world.run()
    assert len(world.demands) >= 20
    assert facts["bubble"] == pytest.approx(bubble(world.demand(), workers * 0.2), abs=0.03)
    assert facts["max_staleness"] <= 4
    assert (
        sum(facts["staleness_histogram"].values())
        == facts["trajectories"]["trained"]
        == 64 * facts["steps"]
    )


def test_a_worker_that_stops_later_than_the_publish_waits_less_and_that_is_measured() -> None:
    world = FleetWorld(fleet(3, mode="exclusive", policy={"still_share": 0.4}, hours=1.5))
    facts, demand = world.run(), world.demand()
    assert demand.still_share == pytest.approx(0.4, abs=0.01)
    assert facts["bubble"] == pytest.approx(bubble(demand, 3 * 0.2), abs=0.03)
    assert facts["bubble"] < bubble(replace(demand, still_share=1.0), 3 * 0.2) - 0.04


@pytest.mark.parametrize("mode", ["background", "exclusive"])
def test_computing_kv_caches_again_makes_the_learner_wait_as_the_formula_says(
    mode: DisseminationMode,
) -> None:
    """It is measured, and no worker looks slower for it."""
    world = FleetWorld(fleet(3, mode=mode, policy={"recompute_s": 30.0, "still_share": 0.4}))
    facts, demand = world.run(), world.demand()
    assert demand.recompute_s == pytest.approx(30.0)
    assert facts["bubble"] == pytest.approx(bubble(demand, 3 * 0.2), abs=0.03)
    assert facts["bubble"] > bubble(replace(demand, recompute_s=0.0), 3 * 0.2) + 0.03
    assert facts["mu_pool"] == pytest.approx(3 * 0.2, rel=0.1)


def test_the_loop_finds_the_rates_of_workers_although_the_file_is_wrong() -> None:
    """Each makes another amount than it is said to; what was measured counts."""
    world = FleetWorld(fleet(16, kind={"speed_sigma": 0.5}))
    facts = world.run()
    assert facts["bubble"] < 0.05
    needed = mu_min(world.demand())
    assert needed is not None
    assert needed <= facts["mu_pool"] <= 2.5 * needed, "some are tried beside the others"


def test_plan_and_simulation_agree_on_a_quiet_fleet() -> None:
    planned, played = provision(fleet(12)), FleetWorld(fleet(12)).run()
    assert [row["count"] for row in played["workers"]] == [planned.counts["w"]]
    assert played["usd_per_step"] == pytest.approx(
        planned.usd_per_step, rel=0.06
    )  # the start included
    assert played["t_bcast_s"] == pytest.approx(planned.demand.t_bcast_s, rel=0.05)


def test_workers_that_come_and_go_are_replaced() -> None:
    churning = fleet(14, kind={"stay_h": 1.0, "availability": 0.7}, hours=3.0)
    facts = FleetWorld(churning).run()
    assert facts["bubble"] < 0.08
    assert facts["trajectories"]["dropped"] < 0.1 * facts["trajectories"]["trained"]
    warned = fleet(14, kind={"stay_h": 1.0, "availability": 0.7, "notice_s": 120.0}, hours=3.0)
    assert FleetWorld(warned).run()["bubble"] < 0.08


def test_a_loss_of_half_of_the_active_fleet_is_replaced_within_three_periods() -> None:
    world = FleetWorld(fleet(16, hours=3.0))
    waited: list[float] = []

    def strike() -> None:
        active = [box for box in world.boxes.values() if box.here and box.peer.service.active]
        for box in active[: len(active) // 2]:
            world.lose(box)

    world.after(5400.0, strike)
    for periods in (3, 6):
        world.after(5400.0 + periods * 300.0, lambda: waited.append(world.learner.waited_s))
    world.run()
    assert (waited[1] - waited[0]) / 900.0 < 0.05


def test_the_same_rng_seed_simulates_the_same_day() -> None:
    def played() -> str:
        return json.dumps(
            FleetWorld(fleet(8, kind={"stay_h": 0.5, "availability": 0.8}, hours=0.7)).run()
        )

    assert played() == played()


def test_a_fleet_of_workers_without_output_trains_nothing() -> None:
    facts = FleetWorld(fleet(2, kind={"trajectories_per_h": 0}, hours=0.2)).run()
    assert (facts["steps"], facts["bubble"], facts["usd_per_step"], facts["feasible"]) == (
        0,
        1.0,
        None,
        False,
    )


def test_a_run_goes_on_after_its_whole_fleet_was_away() -> None:
    turns = {"staleness_max": 0, "publish_every": 1}
    world = FleetWorld(fleet(2, hours=1.5, learner=turns))
    away_at = 1800.0

    def all_leave() -> None:
        for box in list(world.boxes.values()):
            world.lose(box)
            world.after(600.0, lambda box=box: world._join(box.kind, box.name, box.price))  # type: ignore[misc]

    world.after(away_at, all_leave)
    before: list[int] = []
    world.after(away_at + 600.0, lambda: before.append(world.staleness.committed))
    assert world.run()["steps"] > before[0] + 2


def test_a_run_that_trains_nothing_ends_with_an_error() -> None:
    world = FleetWorld(fleet(8, hours=3.0))
    world.after(1800.0, lambda: setattr(world.learner, "train", lambda: None))
    with pytest.raises(Fault, match=r"nothing was trained for .* after step .* although workers"):
        world.run()


def test_every_version_is_sent_by_the_learner_without_peers() -> None:
    thin = fleet(8, hours=0.5, learner={"uplink_mbps": 500})
    star, ours = FleetWorld(thin, Ablation(p2p=False)).run(), FleetWorld(thin).run()
    assert star["egress_gb"] > 4 * ours["egress_gb"] > 0
    assert star["relayed_gb"] == 0
    assert (star["relays"], ours["relays"]) == ("none", "all")


def test_a_day_of_500_workers_stays_cheap() -> None:
    """Counted between its 18th and its 36th minute, for seconds depend on what else the machine does; pools are played
    a few times an hour, whatever is trained.
    """
    spec = load_fleet(REPO / "scenarios" / "fleet-500.toml")

    def counted(hours: float) -> tuple[int, int, int]:
        """Trajectories that were trained on, calls without those of plays, plays."""
        world = FleetWorld(replace(spec, simulate=replace(spec.simulate, hours=hours)))
        profile = Profile(builtins=False)
        facts = profile.runcall(world.run)
        calls = plays = 0
        for entry in profile.getstats():
            if isinstance(entry.code, str) or entry.code.co_filename == pipeline.__file__:
                plays += entry.callcount * (entry.code is Pipeline.step_s.__code__)
            else:
                calls += entry.callcount
        return facts["trajectories"]["trained"], calls, plays

    early, late = counted(0.3), counted(0.6)
    trained, calls = late[0] - early[0], late[1] - early[1]
    assert calls / trained < CALLS_MAX, calls / trained
    assert late[2] <= PLAYS_MAX, late[2]


def test_a_seed_without_time_to_spare_sends_as_many_copies_as_without_a_price() -> None:
    """Workers stop for a broadcast, or kappa = S leaves one step for broadcast, generation and batch."""
    for changes in ({"mode": "exclusive"}, {"learner": {"publish_every": 4}}):
        sent = [
            FleetWorld(fleet(8, **merged(changes, price))).run()["seed_copies"]
            for price in (0.0, 0.09)
        ]
        assert sent[0] == sent[1] > 1.5


def merged(changes: dict[str, Any], price: float) -> dict[str, Any]:
    learner = {**changes.get("learner", {}), "usd_per_gb_up": price}
    return {**changes, "hours": 1.0, "learner": learner}


@pytest.mark.nightly
def test_long_answers_are_finished_by_fast_workers() -> None:
    """Six hours of workers of three speeds, three times: with and without moving what a group waits for; then with
    patience. In one draw of four the learner waits no longer without moving, so three are added up."""
    mixed = load_fleet(REPO / "scenarios" / "mix-lengths.toml")
    found: dict[str, list[dict[str, Any]]] = {"moving": [], "staying": [], "patient": []}
    for rng_seed in range(3):
        simulate = replace(mixed.simulate, hours=6.0, rng_seed=rng_seed)
        patient = replace(mixed, simulate=simulate)
        moving = replace(patient, policy=replace(patient.policy, group_patience=0.0))
        staying = replace(moving, policy=replace(moving.policy, move_stragglers=False))
        for fleet_, runs in zip((moving, staying, patient), found.values(), strict=True):
            runs.append(FleetWorld(fleet_).run())

    moved, group_s, dropped, bubble = (
        {name: sum(map(figure, runs)) for name, runs in found.items()}
        for figure in (
            lambda run: run["samples_moved"],
            lambda run: run["group_s"]["p95"],
            lambda run: run["trajectories"]["dropped"],
            lambda run: run["bubble"],
        )
    )
    assert moved["staying"] == 0 < moved["moving"]
    assert group_s["moving"] < 0.85 * group_s["staying"]
    assert dropped["moving"] < 0.8 * dropped["staying"]
    assert bubble["moving"] <= bubble["staying"]
    assert dropped["patient"] < 0.6 * dropped["moving"]


def test_slots_stay_busy_while_tools_work_and_turns_go_back_to_their_worker() -> None:
    """Half an hour of a tenth of scenarios/tools.toml: 18 s of tools between answers of 15 s."""
    spec = load_fleet(REPO / "scenarios" / "tools.toml")
    spec = replace(
        spec,
        workers=(replace(spec.workers[0], count=4),),
        learner=replace(spec.learner, trajectories_per_step=128),
        simulate=replace(spec.simulate, hours=0.6),
    )
    facts = FleetWorld(spec).run()
    assert facts["episodes_parked"] > 40
    assert facts["slots_busy"] > 0.95
    assert facts["stayed"] > 0.9
    assert facts["prefill_ratio"] < 1.2
    assert facts["max_staleness"] <= spec.learner.staleness_max
