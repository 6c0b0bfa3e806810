"""How `echo2d bench broadcast` computes its result from its rounds. The measurement itself: `tests/nightly/lab`."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.plan.kernel.scenario import MBIT, PeerCrash, PeerSpec, Scenario
from echo2d.store.snapshots import scan_snapshot
from echo2d_lab.bench.broadcast.baselines import RivalRound
from echo2d_lab.bench.broadcast.plot import draw, measurements, run_plot
from echo2d_lab.bench.broadcast.result import DeltaTarget, Round, print_result
from echo2d_lab.bench.broadcast.run import (
    BroadcastBench,
    best_plan,
    result_of,
    with_rates,
    with_undialable,
)
from echo2d_lab.bench.delta.cost import DeltaCosts, delta_costs
from echo2d_lab.bench.lab.cpu import CpuShares
from echo2d_lab.bench.lab.real_versions import RealVersions
from echo2d_lab.standins.snapshots import write_model

EIGHT = Scenario.equal(8, PeerSpec(100 * MBIT, 100 * MBIT, 0.0125), wire_bytes=64 << 20)
MIXED = Scenario(
    tuple(PeerSpec(rate * MBIT, 320 * MBIT, 0.005) for rate in (320, 40, 160, 320)), 100 << 20
)
BUSY, QUIET = CpuShares(0.3, 0.5, 0.9), CpuShares(0.1, 0.2, 0.3)
ROUND = Round(
    version=0, kind="cold", shape="relay", t_verify_s=9.0, median_peer_s=8.0, plan_predicted_s=6.0, survivors=8,
    verified=8, seed_copies=1.06, relay_cpu_s_per_gb=1.0, frames_refetched=3, late_s=0.001, wire_bytes=64 << 20,
    cpu=CpuShares(0.3, 0.4, 0.75),
)  # fmt: skip


def test_eight_equal_peers_have_the_bound_of_the_formula() -> None:
    plan = best_plan(EIGHT)
    assert plan.bound_s == pytest.approx(5.369, abs=0.001)
    assert plan.bound_s < plan.predicted_s < 1.25 * plan.bound_s


def test_medians_count_only_the_warm_rounds() -> None:
    warm = replace(ROUND, kind="warm", verified=7)
    rounds = [ROUND, *(replace(warm, t_verify_s=float(time)) for time in (6, 8, 7))]
    result = result_of(
        BroadcastBench(EIGHT),
        rounds,
        ["a fault"],
        (1.0, 2.0),
        {
            "star": [
                RivalRound("cold", 54.0, 8.6, QUIET),
                RivalRound("warm", 44.0, 8.4, BUSY),
                RivalRound("warm", 46.0, 8.4, QUIET),
                RivalRound("warm", 45.0, 8.5, BUSY),
            ]
        },
    )
    assert (result.t_verify_s.median, result.t_verify_s.min, result.t_verify_s.max) == (
        7.0,
        6.0,
        8.0,
    )
    assert result.ratio == pytest.approx(7 / 5.369, abs=0.001)
    assert result.ratio_cold == pytest.approx(9 / 5.369, abs=0.001)
    star = result.against["star"]
    assert (star.median_s, star.min_s, star.max_s, star.seed_copies) == (45.0, 44.0, 46.0, 8.4)
    assert star.ratio == pytest.approx(45 / 5.369, abs=0.001)
    assert star.ratio_cold == pytest.approx(54 / 5.369, abs=0.001)
    assert star.over_ours == pytest.approx(45 / 7)
    assert star.over_ours_cold == 6.0
    assert star.cpu.is_bound
    assert not result.cpu.is_bound
    assert str(star.cpu) == "90% of all cores: emulator 30%, programs 50% (CPU-bound)"
    assert (result.peers, result.verified_peers, result.frames_refetched) == (8, 7, 3)


def test_the_table_says_which_rounds_are_warm_and_which_are_cold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warm = replace(ROUND, kind="warm", t_verify_s=7.0)
    star = [RivalRound("cold", 54.0, 8.6, QUIET), RivalRound("warm", 45.0, 8.4, QUIET)]
    print_result(result_of(BroadcastBench(EIGHT), [ROUND, warm], [], (0.0, 0.0), {"star": star}))
    shown = " ".join(capsys.readouterr().out.split())
    assert "rounds that count 1 cold, 1 warm" in shown
    assert "ratio to the bound warm 1.30, cold 1.68" in shown
    assert "star, warm 45.00 s (45.00-45.00), ratio 8.38, 6.43 x ours warm" in shown
    assert "star, cold 54.00 s, ratio 10.06, 6.00 x ours cold" in shown


def test_the_bound_counts_only_the_peers_that_survive() -> None:
    """The fastest of those with most uplink is gone: 160 + 40 + 320 of 840 Mbit/s are left."""
    lost = BroadcastBench(MIXED, kill=0.5)
    assert lost.lost == {3}
    assert replace(lost, partition=0.6).lost == {3, 2}
    mixed = replace(ROUND, wire_bytes=100 << 20)
    result = result_of(lost, [mixed], [], (0.0, 0.0), {})
    assert result.bound_s == best_plan(replace(MIXED, peers=MIXED.peers[:3])).bound_s
    scripted = BroadcastBench(replace(MIXED, faults=(PeerCrash(3, 1.0), PeerCrash(1, 1.0, 2.0))))
    assert result_of(scripted, [mixed], [], (0.0, 0.0), {}).bound_s == result.bound_s


def test_the_target_of_deltas_is_computed_from_their_costs() -> None:
    """2.5 times 1.25 MB at 12.5 MB/s, 0.5 s to encode, 8 times 0.2 s on 2 cores, and a second: 2.55 s."""
    costs = DeltaCosts(0.01, 1_250_000, 0.0064, 0.5, 0.2)
    warm = [
        replace(ROUND, wire_bytes=1_250_000, t_verify_s=time, costs=costs)
        for time in (2.0, 2.5, 9.0)
    ]
    target = DeltaTarget.of(warm, 8, 100 * MBIT, 2)
    assert target is not None
    assert target.target_s == pytest.approx(2.55)
    assert target.reached
    missed = DeltaTarget.of([*warm, warm[-1]], 8, 100 * MBIT, 2)
    assert missed is not None
    assert not missed.reached
    assert DeltaTarget.of([*warm, ROUND], 8, 100 * MBIT, 2) is None


def test_real_versions_are_repeated(tmp_path: Path) -> None:
    for number in (2, 10, 9):
        write_model(tmp_path / f"v{number}", [bytes([number, 0, 0, number]), bytes([0, number])])
    versions = RealVersions(tmp_path, 2)
    assert [versions.weights(index, 4).tolist() for index in range(2)] == [
        [9, 2304, 2304, 9],
        [10, 2560, 2560, 10],
    ]
    with pytest.raises(OperatorFault, match="at least 4"):
        RealVersions(tmp_path, 4)


def test_the_cost_of_a_delta_is_measured_only_if_its_result_is_right(tmp_path: Path) -> None:
    old = bytes(range(256)) * 64
    for name, data in (("old", old), ("new", b"\x01" + old[1:])):
        write_model(tmp_path / name, [data])
    costs = delta_costs(tmp_path / "old", tmp_path / "new", tmp_path / "out")
    assert scan_snapshot(tmp_path / "out") == scan_snapshot(tmp_path / "new")
    assert (tmp_path / "out" / "model-0.safetensors").read_bytes().endswith(b"\x01" + old[1:])
    words = sum(file.stat().st_size for file in (tmp_path / "new").iterdir()) // 2
    assert costs.changed_fraction == pytest.approx(1 / words, rel=0.01)
    assert 0 < costs.wire_bytes < 1000


@pytest.mark.parametrize(
    ("share", "closed"), [(0.0, []), (0.5, [2, 4, 6, 8]), (0.25, [4, 8]), (1.0, [*range(1, 9)])]
)
def test_peers_behind_nat_are_spread_over_the_swarm(share: float, closed: list[int]) -> None:
    peers = with_undialable(EIGHT, share).peers
    assert [node for node, spec in enumerate(peers) if not spec.reachable] == closed


def test_all_rates_can_be_halved() -> None:
    slower = with_rates(MIXED, 0.5)
    assert best_plan(slower).bound_s == pytest.approx(2 * best_plan(MIXED).bound_s)
    assert [spec.latency_s for spec in slower.peers] == [0.005] * 4


def test_a_crash_of_the_seed_is_refused() -> None:
    with pytest.raises(OperatorFault, match="seed"):
        BroadcastBench(replace(EIGHT, faults=(PeerCrash(0, 1.0, 2.0),)))


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": -1}, {"rounds": 101}, {"kill": 0.0}, {"corrupt": 1.5}, {"against": ("rsync",)}],
)
def test_options_that_cannot_be_measured_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OperatorFault, match="expected"):
        BroadcastBench(EIGHT, **wrong)  # type: ignore[arg-type]


def test_the_picture_has_a_curve_for_each_strategy(tmp_path: Path) -> None:
    five = BroadcastBench(replace(EIGHT, peers=EIGHT.peers[:6]), run_dir=tmp_path)
    wanted = list(measurements(five))
    assert [len(each.scenario.peers) - 1 for each in wanted] == [2, 4, 5]
    assert [each.run_dir for each in wanted] == [tmp_path / f"{count}-peers" for count in (2, 4, 5)]
    star = [RivalRound("cold", 44.0, 8.4, BUSY), RivalRound("warm", 46.0, 8.4, BUSY)]
    results = {
        n: result_of(each, [ROUND, ROUND], [], (0.0, 0.0), {"star": star})
        for n, each in enumerate(wanted, 2)
    }
    for name in ("picture.svg", "picture.png"):
        draw(results, tmp_path / name)
    drawn = (tmp_path / "picture.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("echo2d", "star", "lower bound"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["picture.gif", "no/folder.png"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_measurement(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(OperatorFault, match="--plot"):
        run_plot(BroadcastBench(EIGHT), tmp_path / name)
