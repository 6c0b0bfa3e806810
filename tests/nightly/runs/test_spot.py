"""A learner of two processes on a machine that is taken away: it stops within a step, and one process continues."""

import signal
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import Batch
from echo2d.learner.saving.checkpoint import Checkpoints
from tests.support.learner import record, rows_of
from tests.support.ranks import LOSS_ERROR_MAX, STEPS, alone, config_of, together
from tests.support.recorded_learner import Recording

pytestmark = [pytest.mark.timeout(900)]

NORM_ERROR_MAX = 1e-3  # relative
STRUCK = 3  # the step that is left


@pytest.fixture(scope="module")
def batches(base: Path) -> list[Batch]:
    return record(base, STEPS)


# The share of the step's micro-batches after which rank 1 gets SIGTERM. In the first half nothing is applied.
@pytest.mark.parametrize(
    ("share", "changes", "trained"),
    [
        (0.25, {"proximal": "recomputed", "checkpoint_every": 10}, 0),
        (0.75, {"proximal": "recomputed", "checkpoint_every": 1}, 0),
        (0.75, {"proximal": "rollout", "checkpoint_every": 10}, 2),
    ],
    ids=["nothing applied", "a checkpoint of the step before", "half of the groups applied"],
)
def test_two_ranks_stop_within_a_step_together_and_one_process_goes_on(
    tmp_path: Path,
    base: Path,
    batches: list[Batch],
    share: float,
    changes: dict[str, Any],
    trained: int,
) -> None:
    """The batches, losses and scores are those of a learner that nobody stops."""
    straight, spot = tmp_path / "straight", tmp_path / "spot"
    straight.mkdir()
    spot.mkdir()
    expected = config_of(straight, base, **changes)
    alone(straight, expected, batches)

    url = f"file://{tmp_path}/bucket"
    config = config_of(spot, base, stop_within_s=0.0, checkpoint_url=url, **changes)
    (spot / "signal-within").write_text(f"{STRUCK} {share} 1 {int(signal.SIGTERM)}")
    done = together(spot, config, batches)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(config)] == list(range(1, STRUCK))
    found = Checkpoints(config.out_dir / "checkpoints", 2).find(None)
    assert (found.step, found.epoch) == (STRUCK - 1, 1)
    assert len((found.progress["begun"] or {"groups": ()})["groups"]) == trained

    # The disk is gone with the machine; the rows of metrics.jsonl are kept for the comparison.
    (config.out_dir / "checkpoints").rename(tmp_path / "lost")
    alone(spot, config, batches)
    rows = [rows_of(each) for each in (expected, config)]
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    for one, other in zip(*rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=LOSS_ERROR_MAX)
        for name in ("grad_norm", "ratio_mean", "ratio_max", "kl"):
            assert other[name] == pytest.approx(one[name], rel=NORM_ERROR_MAX, abs=1e-6)
        assert [other[name] for name in ("batch", "tokens")] == [
            one[name] for name in ("batch", "tokens")
        ]
    told = [Recording(directory, batches).lines() for directory in (straight, spot)]
    commits, scored = (
        [[line[1:] for line in lines if line[0] == what] for lines in told]
        for what in ("commit", "scores")
    )
    assert commits[0] == commits[1]
    for (step, scores), (again, others) in zip(*scored, strict=True):
        assert step == again
        assert [row[:2] for row in scores] == [row[:2] for row in others], "of both learners"
