"""The quality of each worker's answers."""

import pytest

from echo2d.core.base.ids import PeerId, Version
from echo2d.core.cluster.worker_quality import (
    LEARNER_Z_MAX,
    QUALITY_MEMORY,
    QUALITY_WORKERS_MAX,
    WorkerQualities,
    WorkerQuality,
)
from echo2d.core.protocol.trajectory import AuthoredSpan, TrajectoryRecord, TrajectoryScore
from tests.support.coordinator_world import version_digest

GOOD, BAD = PeerId("good"), PeerId("bad")


def answer(worker: PeerId, reward: float, tokens: int = 4) -> TrajectoryRecord:
    span = AuthoredSpan(0, tokens, Version(0), version_digest(0), worker)
    return TrajectoryRecord(0, bytes(4 * tokens), bytes(4 * tokens), (span,), "stop", reward)


def quality(qualities: WorkerQualities, worker: PeerId) -> WorkerQuality:
    found = qualities.of(worker)
    assert found is not None
    return found


def test_a_single_worker_has_means_but_no_comparison() -> None:
    qualities = WorkerQualities()
    qualities.scored([answer(GOOD, 1.0, 2), answer(GOOD, 0.0, 4)])
    assert qualities.of(BAD) is None
    assert quality(qualities, GOOD) == WorkerQuality(2, 0.5, 3.0, 0, None)


def test_workers_that_share_prompts_are_compared() -> None:
    """However hard the prompts are."""
    qualities = WorkerQualities()
    for base in (0.0, 5.0):
        qualities.scored([answer(GOOD, base + 1), answer(GOOD, base + 1), answer(BAD, base)])
    assert quality(qualities, GOOD).above == pytest.approx(1.0)
    assert quality(qualities, BAD).above == pytest.approx(-1.0)
    assert quality(qualities, GOOD).reward == pytest.approx(3.5)


def test_old_answers_lose_weight() -> None:
    qualities = WorkerQualities()
    qualities.scored([answer(GOOD, 0.0)] * 5000)
    qualities.scored([answer(GOOD, 1.0)] * (3 * QUALITY_MEMORY))
    assert quality(qualities, GOOD).reward > 0.9


def test_the_number_of_remembered_workers_is_limited() -> None:
    qualities = WorkerQualities()
    qualities.scored(
        [answer(PeerId(str(number)), 1.0) for number in range(2 * QUALITY_WORKERS_MAX)]
    )
    assert qualities.of(PeerId("0")) is None
    assert qualities.of(PeerId(str(2 * QUALITY_WORKERS_MAX - 1))) is not None


def score(k: float, z: float) -> TrajectoryScore:
    return TrajectoryScore(0, 0, k, z)


def test_scores_of_the_learner_are_averaged_for_each_author() -> None:
    qualities = WorkerQualities()
    qualities.scored([answer(GOOD, 1.0)])
    assert (quality(qualities, GOOD).learner_k, quality(qualities, GOOD).learner_z) == (None, None)
    qualities.scored_by_learner(
        [
            (answer(GOOD, 1.0), score(0.0, 1.0)),
            (answer(BAD, 0.0), score(4.0, 9.0)),
            (answer(GOOD, 1.0), score(0.5, -2.0)),
        ]
    )
    assert quality(qualities, GOOD) == WorkerQuality(1, 1.0, 4.0, 0, None, 2, 0.25, -0.5)
    assert quality(qualities, BAD) == WorkerQuality(learned=1, learner_k=4.0, learner_z=9.0)


def test_an_answer_of_two_workers_counts_for_neither_of_them() -> None:
    qualities = WorkerQualities()
    spans = (
        AuthoredSpan(0, 2, Version(0), version_digest(0), BAD),
        AuthoredSpan(2, 4, Version(0), version_digest(0), GOOD),
    )
    shared = TrajectoryRecord(0, bytes(16), bytes(16), spans, "stop", 1.0)
    qualities.scored_by_learner([(shared, score(4.0, 9.0))])
    assert qualities.of(GOOD) is qualities.of(BAD) is None


def test_scores_of_the_learner_lose_weight_and_one_trajectory_cannot_outweigh_all() -> None:
    qualities = WorkerQualities()
    qualities.scored_by_learner([(answer(GOOD, 0.0), score(0.0, 0.0))] * 5000)
    qualities.scored_by_learner([(answer(GOOD, 0.0), score(1.0, 1e6))])
    assert quality(qualities, GOOD).learner_z == pytest.approx(LEARNER_Z_MAX / QUALITY_MEMORY)
    qualities.scored_by_learner([(answer(GOOD, 0.0), score(1.0, -1e6))] * (3 * QUALITY_MEMORY))
    assert quality(qualities, GOOD).learner_k == pytest.approx(1.0, abs=0.1)
    assert quality(qualities, GOOD).learner_z == pytest.approx(-LEARNER_Z_MAX, rel=0.1)
