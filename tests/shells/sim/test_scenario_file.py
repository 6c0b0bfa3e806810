"""Quantities that people write, and scenarios from files."""

from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.plan.kernel.scenario import MBIT, PeerCrash, PeerSpec, Scenario
from echo2d.plan.kernel.scenario_file import load_scenario
from echo2d.quantities import parse_bytes, parse_rate, parse_seconds
from tests.support.paths import REPO

MIXED = REPO / "scenarios" / "mixed.toml"
FILE = """
bytes = "100MiB"
shape = "chain"
rng_seed = 7
[[peers]]
uplink = "320mbit"
downlink = "1gbit"
rtt = "20ms"
[[peers]]
count = 2
uplink = "40mbit"
loss = 0.001
reachable = false
joins_at = "2s"
[[faults]]
peer = 1
at = "1s"
back = "5s"
silent = true
"""


def test_quantities_with_units_are_read() -> None:
    assert parse_rate("100mbit") == 12.5e6
    assert parse_rate("1.5 Gbit") == 187.5e6
    assert parse_bytes("64MiB") == 64 << 20
    assert parse_bytes("3MB") == 3_000_000
    assert parse_bytes(1000) == 1000
    assert parse_seconds("50ms") == 0.05
    assert parse_seconds(2) == 2


@pytest.mark.parametrize("text", ["", "fast", "100", "-1mbit", "1e3mbit", "10mb", None])
def test_a_text_that_is_no_rate_is_refused(text: str | None) -> None:
    with pytest.raises(OperatorFault, match="expected a rate such as 100mbit"):
        parse_rate(text)


def test_a_scenario_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(FILE)
    slow = PeerSpec(uplink=40 * MBIT, loss=0.001, reachable=False, joins_at_s=2.0)
    seed = PeerSpec(uplink=320 * MBIT, downlink=1000 * MBIT, latency_s=0.005)
    faults = (PeerCrash(1, 1.0, 5.0, silent=True),)
    assert load_scenario(path) == Scenario(
        (seed, slow, slow), 100 << 20, 64 << 10, shape="chain", rng_seed=7, faults=faults
    )  # fmt: skip


def test_the_peers_of_a_swarm_are_drawn_within_their_limits() -> None:
    scenario = load_scenario(MIXED)
    drawn = [spec.uplink / MBIT for spec in scenario.peers[1:]]
    assert (min(drawn) > 20, max(drawn) < 500, len(set(drawn))) == (True, True, 64)
    assert all(spec.downlink == max(300 * MBIT, 2 * spec.uplink) for spec in scenario.peers[1:])
    assert all(0.01 <= 4 * spec.latency_s <= 0.2 for spec in scenario.peers[1:])
    assert (scenario.churn, scenario.frame_bytes, scenario.limit_s) == (0.01, 256 << 10, 21600)
    assert load_scenario(MIXED) == scenario
    assert load_scenario(MIXED, rng_seed=2).peers != scenario.peers


def test_arguments_replace_values_of_a_file() -> None:
    scenario = load_scenario(MIXED, peers=10, bytes="80MB", shape="star", churn=None)
    assert (len(scenario.peers), scenario.wire_bytes, scenario.shape) == (11, 80_000_000, "star")
    assert (scenario.frame_bytes, scenario.churn) == (64 << 10, 0.01)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('bytes = "100MiB"', 'bytes = "much"'),
        ('bytes = "100MiB"', ""),
        ("loss = 0.001", "loss = 1.5"),
        ("loss = 0.001", "mood = 1"),
        ("peer = 1", "peer = 9"),
        ("[[peers]]", "[peers]"),
        ("[[peers]]", "[[peers"),
        ("rng_seed = 7", 'colour = "red"'),
        ("rng_seed = 7", "churn = 2.0"),
        ('uplink = "40mbit"', 'uplink = ["40mbit"]'),
        ('uplink = "40mbit"', 'uplink = ["0mbit", "40mbit"]'),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(OperatorFault, match=r"bad\.toml"):
        load_scenario(path)


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text('bytes = "1MB"\nshape = "ring"\n[[peers]]\nuplink = "1mbit"\ncount = 2\n')
    with pytest.raises(OperatorFault, match=r"shape: expected .*star.*; found 'ring'"):
        load_scenario(file)
