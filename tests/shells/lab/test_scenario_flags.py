"""Scenarios from the flags of `echo2d bench broadcast`."""

from typing import Any

import pytest

from echo2d.errors import OperatorFault
from echo2d.plan.kernel.scenario import MBIT, PeerSpec, Scenario
from echo2d_lab.bench.broadcast.scenario_flags import scenario_of

FLAGS: dict[str, Any] = {
    "peers": 2, "uplink": "100mbit", "uplinks": None, "downlink": None, "rtt": "50ms", "loss": 0.001, "size": "64MiB",
    "shape": "auto", "rng_seed": 3,
}  # fmt: skip


def test_flags_make_a_scenario() -> None:
    spec = PeerSpec(100 * MBIT, 100 * MBIT, 0.0125, 0.001)
    assert scenario_of(**FLAGS) == Scenario((spec,) * 3, 64 << 20, rng_seed=3)


def test_flags_may_set_unequal_uplinks() -> None:
    scenario = scenario_of(**{**FLAGS, "uplinks": "320,160,40"})
    assert [spec.uplink / MBIT for spec in scenario.peers] == [320, 160, 40]
    assert {spec.downlink / MBIT for spec in scenario.peers} == {320}


@pytest.mark.parametrize(
    "wrong", [{"uplinks": "320"}, {"uplinks": "320,x"}, {"uplink": "0mbit"}, {"size": "0"}]
)
def test_bad_flags_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(OperatorFault, match="expected"):
        scenario_of(**{**FLAGS, **wrong})
