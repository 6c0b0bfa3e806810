"""The code computes the numbers of the worked examples in docs/design."""

import numpy as np
import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.model import Demand, bubble, judge, mu_min, period_s
from echo2d.core.relay.credit import Credit
from echo2d.core.topology.plan import Job, Plan
from echo2d.core.topology.planner import plan_auto, plan_chains, plan_star
from echo2d.core.topology.repair import repair
from echo2d.core.weights.delta import ChunkMode, encode_chunk, encode_twice
from echo2d.core.weights.delta_words import encode_sparse, find_changes
from tests.support.numpy_split import encode_split
from tests.support.plans import JOB, MB, ONE, facts


def trees(plan: Plan) -> list[tuple[float, dict[str, str]]]:
    return [
        (round(stripe.weight, 2), {str(k): str(v) for k, v in stripe.tree.parents.items()})
        for stripe in plan.stripes
    ]


def test_the_code_gives_the_worked_example_of_planning_and_repair() -> None:
    job, seed = Job(JOB.form, 100 * MB, 64 << 10), facts("seed", 10 * MB, None)
    peers = [facts(name, uplink * MB, 40 * MB) for name, uplink in (("a", 10), ("b", 5), ("c", 5))]
    star, chain = plan_star(ONE, job, seed, peers), plan_chains(ONE, job, seed, peers, 1)
    assert (round(star.predicted_s), round(chain.predicted_s), star.bound_s) == (30, 20, 10)
    best = plan_auto(ONE, job, seed, peers)
    assert best.predicted_s == pytest.approx(10.03, abs=0.005)
    assert trees(best) == [
        (0.5, {"a": "seed", "b": "a", "c": "a"}),
        (0.25, {"a": "b", "b": "seed", "c": "b"}),
        (0.25, {"a": "c", "b": "c", "c": "seed"}),
        (0.0, {"a": "seed", "b": "seed", "c": "seed"}),
    ]
    assert trees(repair(best, PeerId("b"))) == [
        (0.5, {"a": "seed", "c": "a"}),
        (0.25, {"a": "seed", "c": "a"}),
        (0.25, {"a": "c", "c": "seed"}),
        (0.0, {"a": "seed", "c": "seed"}),
    ]


def test_the_code_gives_the_worked_example_of_credits() -> None:
    """The root has 320 Mbit/s, a and b have 160 and 40."""
    mbit = 125_000
    peers = [facts(name, uplink * mbit, 40 * MB) for name, uplink in (("a", 160), ("b", 40))]
    plan = plan_auto(ONE, JOB, facts("seed", 320 * mbit, None), peers)
    assert JOB.wire_bytes / plan.bound_s / mbit == pytest.approx(260)
    assert [stripe.weight * 260 for stripe in plan.stripes] == pytest.approx([160, 40, 60])
    credit, seen = Credit(), list[int]()
    for _ in range(2):  # round trips, in which a passes on all that it was given
        for _ in range(credit.frames):
            assert not credit.allows(credit.passed + credit.frames, 0.0), "it is used up"
            credit.passed_on(credit.passed + 1, 0, 0.0)
        seen.append(credit.frames)
    assert seen == [6, 12]


def test_the_code_gives_the_worked_example_of_deltas() -> None:
    base = np.arange(100, 120, dtype="<u2")
    new = base.copy()
    new[1] += 1
    new[7] -= 1
    new[19] += 5
    changes = find_changes(new.tobytes(), base.tobytes())
    assert changes is not None
    assert changes.places.tolist() == [1, 7, 19]
    assert changes.differences.tolist() == [1, 2**16 - 1, 5]
    assert np.diff([-1, *changes.places]).tolist() == [2, 6, 12], "gaps 1, 5, 11"
    assert encode_chunk(new.tobytes(), base.tobytes()).mode == ChunkMode.RAW


def test_the_code_gives_the_worked_example_of_a_chunk_with_one_percent_changed() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 4 << 20).astype(np.float32)
    base = (weights.view("<u4") >> 16).astype("<u2")
    new, places = base.copy(), rng.choice(base.size, base.size // 100, replace=False)
    new[places] += np.where(rng.random(places.size) < 0.5, 1, 0xFFFF).astype("<u2")
    encoded, kept = encode_twice(new.tobytes(), base.tobytes())
    assert encoded is kept
    assert encoded.mode == ChunkMode.SPARSE
    assert len(encoded.payload) == pytest.approx(47_877, rel=0.01)  # zstd may differ by a little


def test_the_code_gives_the_worked_example_of_capacity() -> None:
    exclusive = Demand(100, 256, 4, 3, 60, mode="exclusive")
    assert mu_min(exclusive) == pytest.approx(3.2)
    assert period_s(exclusive, 0.9 * 3.2) == pytest.approx(326.7, abs=0.05)
    assert bubble(exclusive, 0.9 * 3.2) == pytest.approx(0.082, abs=0.0005)
    assert mu_min(Demand(100, 256, 4, 3, 60, pause_s=5)) == pytest.approx(2.60, abs=0.005)
    assert mu_min(Demand(100, 256, 1, 1, 60, pause_s=5)) == pytest.approx(6.4)
    again = Demand(100, 256, 4, 3, 60, pause_s=5, recompute_s=10)
    assert mu_min(again) == pytest.approx(2.69, abs=0.005)
    assert again.lost_s == pytest.approx(15)
    verdict = judge(Demand(100, 256, 1, 2, 60, pause_s=5))
    assert [change.text for change in verdict.changes] == ["S = 2", "kappa = 1"]


def test_the_code_gives_the_worked_example_of_a_chunk_with_small_changes() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 4 << 20).astype(np.float32)
    base = (weights.view("<u4") >> 16).astype("<u2")
    moved = (base.astype("<u4") << 16).view(np.float32) + rng.normal(0, 1e-6, base.size).astype(
        "<f4"
    )
    new = ((moved.view("<u4") + 0x8000) >> 16).astype("<u2")
    changes = find_changes(new.tobytes(), base.tobytes())
    assert changes is not None
    assert changes.places.size == 49_588
    sparse, split = (
        encode_sparse(new.tobytes(), changes),
        encode_split(new.tobytes(), base.tobytes(), changes),
    )
    assert len(sparse) == pytest.approx(68_524, rel=0.01)  # zstd may differ by a little
    assert len(split) == 31_310
