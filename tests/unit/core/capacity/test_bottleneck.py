"""The bottleneck of a run, in one sentence."""

import re
from dataclasses import replace

import pytest

from echo2d.core.capacity.bottleneck import Situation, bottleneck
from echo2d.core.capacity.model import Demand, judge

DEMAND = Demand(
    100.0, 256, 4, 3, 60.0, "exclusive"
)  # needs 3.2/s; with broadcasts that take no time 2.56/s
BUSY = Situation(
    0.01,
    DEMAND,
    3.5,
    active=7,
    standby=2,
    rewards=0.0,
    unscored=0,
    missing=4,
    verdict=judge(DEMAND),
)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {},
            "learner",
            "it waits 1.0% of its time; 7 workers make 12,600 trajectories/h, the learner needs 11,520",
        ),
        ({"bubble": None}, "unknown", "has not done two train steps"),
        (
            {"bubble": 0.3, "mu_pool": 2.0},
            "rollout",
            "waits 30.0% .* make 7,200 .* 2 workers stand by",
        ),
        (
            {"bubble": 0.1, "mu_pool": 2.8},
            "dissemination",
            "takes 60 s, a refit 0 s, kappa = 3 train steps 300 s, S = 4",
        ),
        (
            {"bubble": 0.1, "rewards": 0.7, "unscored": 4},
            "reward",
            "70% of that for rewards alone; now 4 groups lack",
        ),
        ({"bubble": 0.1, "rewards": 0.2, "unscored": 4}, "rollout", "7 workers .*enough by now"),
        (
            {"bubble": 0.1, "unscored": 4, "demand": None},
            "rollout",
            "what the learner needs is not measured yet",
        ),
        (
            {"bubble": 0.5, "demand": replace(DEMAND, mode="background", pause_s=290.0)},
            "dissemination",
            "a refit 290 s",
        ),
        (
            {"bubble": 0.5, "demand": replace(DEMAND, t_bcast_s=250.0, t_gen_s=220.0)},
            "dissemination",
            r"no number would be enough \(data would be too old: .* S = 7.*; do: policy.staleness_max = 7",
        ),
        (
            {
                "bubble": 0.5,
                "demand": replace(DEMAND, t_bcast_s=10.0, t_gen_s=220.0),
                "active": 1,
                "standby": 1,
            },
            "rollout",
            "1 worker makes .*no number would be enough .* 1 worker stands by",
        ),
    ],
)
def test_the_sentence_names_the_bottleneck_of_a_run(
    change: dict[str, object], kind: str, words: str
) -> None:
    situation = replace(BUSY, **change)  # type: ignore[arg-type]
    if situation.demand is not None:
        situation = replace(situation, verdict=judge(situation.demand))
    said = bottleneck(situation)
    assert said.kind == kind
    assert re.search(words, said.text), said.text


def test_no_larger_staleness_is_advised_if_boxes_are_missing() -> None:
    """The sentence is that of the capacity card; auto has chosen the largest kappa for want of workers."""
    demand = replace(DEMAND, publish_every=5, t_bcast_s=10.0)
    made = demand.trajectories_per_step / demand.t_train_s / 40
    verdict = judge(demand, 2 * made)
    said = bottleneck(replace(BUSY, bubble=0.98, demand=demand, mu_pool=made, verdict=verdict)).text
    assert f"no number would be enough ({verdict.why_not}): about 40 times as many workers" in said
    assert "no single change would do" in said
    assert "do: policy.staleness_max" not in said
    assert "about" not in bottleneck(replace(BUSY, mu_pool=2.0)).text
