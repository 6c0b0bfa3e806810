"""Fleets from files, and the forecasts of `plan`."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo2d.core.capacity.model import mu_min
from echo2d.core.capacity.pipeline import Pipeline
from echo2d.core.rules.run import DisseminationMode
from echo2d.errors import OperatorFault
from echo2d.plan.fleet.forecast import Ablation, Forecast, provision, what_if
from echo2d.plan.fleet.spec import FleetSpec, is_fleet, load_fleet, read_fleet
from echo2d.views.forecast import provision_picture
from tests.support.paths import REPO

SCENARIOS = REPO / "scenarios"
SMALL = SCENARIOS / "fleet-small.toml"


def document(**learner: Any) -> dict[str, Any]:
    """Twenty workers alike, unmetered."""
    return {
        "learner": {"t_train_s": 100, "trajectories_per_step": 256, "staleness_max": 4, "publish_every": 3,
                    "uplink_mbps": 1000, "usd_per_h": 12.0, **learner},
        "model": {"params": 1e9},
        "fleet": [{"name": "w", "count": 20, "trajectories_per_h": 720, "usd_per_h": 0.5}],
    }  # fmt: skip


def planned(ablation: Ablation | None = None, **learner: Any) -> Forecast:
    return provision(read_fleet(document(**learner)), ablation)


def test_the_plan_chooses_the_number_of_equal_workers_with_the_cheapest_step() -> None:
    found = planned()
    assert found.feasible
    assert found.why_not == ""
    assert found.mu_min == mu_min(found.demand)
    chosen = found.counts["w"]
    assert found.usd_per_step == pytest.approx((12.0 + 0.5 * chosen) * found.step_s / 3600)
    assert found.why.startswith(f"{chosen} workers cost {found.usd_per_step:.4g} usd a step; ")
    for count in (chosen - 2, chosen - 1, chosen + 1, chosen + 2):
        pool = found.pools.of(count)
        played = Pipeline(found.demand, [pool_slot(found)] * slots_of(found, count)).step_s()
        assert (12.0 + 0.5 * count) * played / 3600 > 0.99 * found.usd_per_step
        assert pool.step_s == pytest.approx(played, rel=0.05)
    (row,) = found.facts()["workers"]
    assert (row["name"], row["count"], row["rho"]) == ("w", chosen, pytest.approx(0.5 / 720))


def pool_slot(found: Forecast) -> float:
    return found.choice.offers[0].sample_s


def slots_of(found: Forecast, workers: int) -> int:
    return workers * found.choice.offers[0].slots


def test_a_worker_that_is_away_costs_nothing() -> None:
    """Twice as many homes that are there for half of the time are as good as those that are always there."""
    always = document()
    half = document()
    half["fleet"] = [{**half["fleet"][0], "count": 40, "availability": 0.5}]
    one, other = provision(read_fleet(always)), provision(read_fleet(half))
    assert (one.counts, one.usd_per_step) == (other.counts, other.usd_per_step)


def test_the_plan_predicts_the_cost_of_groups_and_their_tails() -> None:
    """S = 4, kappa = 3, groups of 32, sigma 1.3: as `simulate` finds it (docs/measurements/capacity.md)."""
    tails = {**document(t_train_s=900, trajectories_per_step=512), "policy": {"t_gen_s": 600.0},
             "simulate": {"group_size": 32, "gen_sigma": 1.3}}  # fmt: skip
    tails["fleet"] = [{"name": "w", "count": 120, "trajectories_per_h": 40, "usd_per_h": 0.4}]
    found = provision(read_fleet(tails))
    assert not found.feasible
    assert found.bubble > 0.3
    assert found.counts["w"] < 60
    fresh = provision(read_fleet({**tails, "learner": {**tails["learner"], "publish_every": 1}}))
    assert fresh.usd_per_step < 0.8 * found.usd_per_step
    cells = {(cell.staleness_max, cell.publish_every): cell for cell in what_if(read_fleet(tails))}
    assert cells[4, 1].usd_per_step < cells[4, 3].usd_per_step


def test_the_json_has_the_documented_keys() -> None:
    facts = planned().facts()
    promised = {
        "feasible",
        "why_not",
        "mu_min",
        "mu_pool",
        "bubble",
        "t_bcast_s",
        "usd_per_step",
        "workers",
    }
    assert promised <= facts.keys()
    hopeless = planned(staleness_max=0, publish_every=1).facts()
    assert hopeless["mu_min"] is None
    assert hopeless["why_not"]


def test_a_broadcast_without_peers_takes_longer_and_needs_more_workers() -> None:
    exclusive = {
        **document(),
        "policy": {"mode": "exclusive"},
        "model": {"params": 1e9, "wire_fraction": 0.2},
    }
    ours = provision(read_fleet(exclusive))
    star = provision(read_fleet(exclusive), Ablation(p2p=False))
    assert star.demand.t_bcast_s > 2 * ours.demand.t_bcast_s
    assert len(star.choice.offers) > len(ours.choice.offers)


def test_peers_never_make_a_step_more_expensive() -> None:
    """What goes up a metered line is paid for, so those who have one do not pass versions on."""
    fleet = load_fleet(SMALL)
    ours, star = provision(fleet), provision(fleet, Ablation(p2p=False))
    assert ours.usd_per_step <= star.usd_per_step
    assert ours.relays in ("unmetered", "none")
    assert star.relays == "none"
    assert star.broadcast.planned_s == pytest.approx(star.broadcast.star_s)


def test_trajectories_cost_what_a_metered_line_takes_for_them() -> None:
    """720 trajectories of 1 MB an hour at 0.1 usd a GB; 4.5 MB each fill an uplink of 7.2 Mbit/s."""
    made = document()
    made["fleet"][0] |= {"usd_per_gb_up": 0.1, "uplink_mbps": 7.2}

    def each(size: float) -> float:
        fleet = read_fleet({**made, "model": {"params": 1e6, "trajectory_bytes": size}})
        return provision(fleet).choice.offers[0].usd_per_h

    assert each(1e6) - each(0.0) == pytest.approx(720 * 1e-3 * 0.1)
    assert each(4.5e6) > each(1e6)
    with pytest.raises(
        OperatorFault, match=r"trajectories of one w take 7.36 Mbit/s; its uplink has 7.2"
    ):
        each(4.6e6)


def metered(mode: DisseminationMode, wire_fraction: float) -> FleetSpec:
    """Homes that are not enough, and two kinds of dear lines."""
    fleet = load_fleet(SCENARIOS / "mix-metered.toml")
    model, policy = (
        replace(fleet.model, wire_fraction=wire_fraction),
        replace(fleet.policy, mode=mode),
    )
    return replace(fleet, model=model, policy=policy)


def test_all_workers_pass_versions_on_unless_it_is_more_expensive() -> None:
    """The homes' lines are too thin for whole versions where workers stop for them, and not where they do not."""
    assert provision(metered("exclusive", 1.0)).relays == "all"
    assert provision(metered("background", 0.02)).relays in ("unmetered", "none")
    assert provision(metered("background", 0.02), Ablation(delta=False)).relays in (
        "unmetered",
        "none",
    )
    assert provision(metered("exclusive", 1.0), Ablation(p2p=False)).relays == "none"


def test_a_choice_without_prices_costs_more_and_depends_on_the_rng_seed() -> None:
    fleet = load_fleet(SMALL)
    cost = [
        provision(fleet, Ablation(by_cost=False, rng_seed=seed)).usd_per_step for seed in range(4)
    ]
    assert len(set(cost)) > 1
    assert provision(fleet, Ablation(by_cost=False, rng_seed=1)).usd_per_step == cost[1]


def test_all_workers_work_if_no_choice_is_enough() -> None:
    found = planned(t_train_s=1.0)
    assert not found.feasible
    assert found.counts == {"w": 20}
    assert 0 < found.bubble < 1


def test_the_what_if_table_has_a_cell_for_the_present_settings() -> None:
    fleet = load_fleet(SMALL)
    cells = what_if(fleet)
    found = provision(fleet)
    (here,) = [
        c for c in cells if (c.staleness_max, c.publish_every) == (4, found.demand.publish_every)
    ]
    assert here.usd_per_step == pytest.approx(found.usd_per_step)
    assert all(cell.publish_every <= cell.staleness_max + 1 for cell in cells)


def test_the_picture_shows_every_figure_of_the_forecast() -> None:
    fleet = load_fleet(SMALL)
    found = provision(fleet)
    console = Console(width=120, record=True, file=StringIO())
    console.print(provision_picture(found, what_if(fleet)))
    text = console.export_text()
    for words in (
        "the learner stays busy",
        "4090",
        "usd a step",
        "kappa = 3",
        "bubble 0.",
        "would cost",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fleet": []}, r"\[\[fleet\]\]: expected at least one"),
        ({"fleet": {"name": "w"}}, "double brackets"),
        ({"fleet": [{"name": "w"}]}, "fleet.trajectories_per_h: expected"),
        ({"fleet": [{"name": "w", "trajectories_per_h": 1}] * 2}, "fleet.name: expected different ones"),
        ({"fleet": [{"name": "w", "trajectories_per_h": 1, "count": 4096}, {"name": "v", "trajectories_per_h": 1}]},
         "at most 4096 workers"),
        ({"fleet": [{"name": "w", "trajectories_per_h": -1}]}, "fleet.trajectories_per_h: .*at least 0"),
        ({"fleet": [{"name": "w", "trajectories_per_h": float("nan")}]}, "fleet.trajectories_per_h"),
        ({"model": {"params": float("inf")}}, "model.params"),
        ({"fleet": [{"name": "w", "trajectories_per_h": 1, "usd_per_h": float("inf")}]}, "fleet.usd_per_h"),
        ({"workers": {}}, r"\[workers\]: unknown table"),
    ],
)  # fmt: skip
def test_mistakes_in_a_fleet_file_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OperatorFault, match=words):
        read_fleet({**document(), **change})


def test_a_kappa_above_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="a larger value deadlocks"):
        read_fleet(document(publish_every=6))
    path = tmp_path / "bad.toml"
    path.write_text("[learner]\n")
    with pytest.raises(OperatorFault, match=r"bad\.toml: .*t_train_s"):
        load_fleet(path)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("fleet-*.toml")), ids=lambda path: path.stem)
def test_every_fleet_file_of_the_scenarios_can_be_read(path: Path) -> None:
    assert is_fleet(path)
    assert isinstance(load_fleet(path), FleetSpec)
    assert not is_fleet(SCENARIOS / "mixed.toml")


def test_the_bytes_that_the_learner_sends_are_paid_for_and_few() -> None:
    model = {"params": 1e9, "wire_fraction": 0.1}
    free, paid = (
        provision(read_fleet({**document(uplink_mbps=10_000, usd_per_gb_up=price), "model": model}))
        for price in (0.0, 0.09)
    )
    assert free.facts()["seed_copies"] > paid.facts()["seed_copies"] == pytest.approx(1.0)
    assert free.facts()["seed_usd_per_h"] == 0
    versions_per_h = 3600 / paid.demand.period_s
    assert paid.facts()["seed_usd_per_h"] == pytest.approx(0.09 * 0.2 * versions_per_h)
    assert paid.usd_per_h == pytest.approx(
        12.0 + paid.choice.usd_per_h + paid.facts()["seed_usd_per_h"]
    )
    assert paid.mu_min == free.mu_min
