"""A learner that must stop in the middle of a train step, and the one that continues."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echo2d.client import Batch
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.saving.checkpoint import Checkpoints
from echo2d.learner.stopping import StopClock
from tests.support.learner import config_in, learn, record, rows_of, throwing_dice
from tests.support.recorded_learner import Recording

STEPS, PARTS = 4, 2
TOLD = ("loss", "grad_norm", "ratio_mean", "ratio_max", "kl", "entropy", "tokens", "batch")


@pytest.fixture(scope="module")
def batches(base: Path) -> list[Batch]:
    return record(base, STEPS)


@pytest.fixture
def config(tmp_path: Path, base: Path) -> LearnerConfig:
    """Two optimizer steps of several micro-batches, with dropout: each number that is drawn matters."""
    return config_of(tmp_path / "struck", base)


def config_of(directory: Path, base: Path, **changes: Any) -> LearnerConfig:
    directory.mkdir()
    settings: dict[str, Any] = {
        "steps": STEPS,
        "checkpoint_every": 1,
        "optimizer_steps": PARTS,
        "micro_batch_tokens": 60,
        "warmup_steps": 0,
        "stop_within_s": 0.0,
        **changes,
    }
    return config_in(directory, throwing_dice(base, directory / "model"), **settings)


class StopInAStep:
    """Counts the micro-batches that are trained, and stops the learner after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained = 0
        self._stop_at, self._prefetch = 0, BatchPrefetch()
        accumulate = Policy._accumulate

        def count(policy: Policy, *rest: Any) -> Any:
            found = accumulate(policy, *rest)
            self.trained += 1
            if self.trained == self._stop_at:
                self._prefetch.stop()
            return found

        monkeypatch.setattr(Policy, "_accumulate", count)

    def after(self, micro_batches: int) -> BatchPrefetch:
        """The prefetch with which a learner is stopped after this many more micro-batches."""
        self._stop_at, self._prefetch = self.trained + micro_batches, BatchPrefetch()
        return self._prefetch


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> StopInAStep:
    return StopInAStep(monkeypatch)


@pytest.fixture
def straight(tmp_path: Path, base: Path, batches: list[Batch], stop: StopInAStep) -> "Straight":
    return Straight(tmp_path / "straight", base, batches, stop)


class Straight:
    """What a learner trains that is never stopped. micro: micro-batches of a step."""

    def __init__(
        self,
        directory: Path,
        base: Path,
        batches: list[Batch],
        stop: StopInAStep,
        **changes: Any,
    ) -> None:
        config, before = config_of(directory, base, **changes), stop.trained
        recording = Recording(directory, batches)
        self.rows = learn(config, recording)
        self.lines = recording.lines()
        self.micro = (stop.trained - before) // STEPS
        self.weights = load_file(directory / "taken" / str(STEPS) / "model.safetensors")
        assert (stop.trained - before) % STEPS == 0

    def is_trained_by(self, config: LearnerConfig) -> None:
        """The last row of each step, the scores of each trajectory, and the bits of the last version."""
        rows = {row["step"]: row for row in rows_of(config)}
        assert list(rows) == list(range(1, STEPS + 1))
        for expected in self.rows:
            found = rows[expected["step"]]
            assert {name: found[name] for name in TOLD} == pytest.approx(
                {name: expected[name] for name in TOLD}
            )
        weights = load_file(config.out_dir.parent / "taken" / str(STEPS) / "model.safetensors")
        assert all(torch.equal(tensor, weights[name]) for name, tensor in self.weights.items())


def checkpoints_of(config: LearnerConfig) -> list[str]:
    return sorted(path.name for path in (config.out_dir / "checkpoints").glob("*"))


def test_a_learner_can_stop_after_every_micro_batch(
    config: LearnerConfig, batches: list[Batch], straight: Straight, stop: StopInAStep
) -> None:
    """A learner is stopped after each micro-batch of step 2 in turn, until none is left. Its batch comes again."""
    recording = Recording(config.out_dir.parent, batches)
    learn(config, recording, prefetch=stop.after(straight.micro + 1))
    for micro_batches in range(2, straight.micro):
        learn(config, recording, resume=True, prefetch=stop.after(micro_batches))
        assert [row["step"] for row in rows_of(config)] == [1], "no part of step 2 is reported"
        assert checkpoints_of(config) == ["step-00000001-epoch-1"], "nothing is saved in between"
    learn(config, recording, resume=True)
    straight.is_trained_by(config)
    commits = [line[1:] for line in recording.lines() if line[0] == "commit"]
    assert commits == [line[1:] for line in straight.lines if line[0] == "commit"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8])
def test_steps_applied_since_the_newest_checkpoint_are_saved(
    config: LearnerConfig,
    batches: list[Batch],
    straight: Straight,
    stop: StopInAStep,
    share: float,
) -> None:
    """Checkpoints are due every 10 steps. A stop in the second part comes after the first part is applied."""
    rare = dataclasses.replace(config, checkpoint_every=10)
    recording = Recording(rare.out_dir.parent, batches)
    in_step_3 = max(1, round(share * straight.micro))
    learn(rare, recording, prefetch=stop.after(2 * straight.micro + in_step_3))
    assert checkpoints_of(rare) == ["step-00000002-epoch-1"]
    begun = progress_of(rare)["begun"]
    trained = set() if begun is None else set(begun["groups"])
    assert len(trained) == (0 if share < 0.5 else 2)

    before = stop.trained
    learn(rare, recording, resume=True)
    straight.is_trained_by(rare)
    parts = 1 if trained else PARTS
    assert stop.trained - before == straight.micro * (parts / PARTS + 1), "none is trained twice"
    commits = [line[1:] for line in recording.lines() if line[0] == "commit"]
    assert commits == [line[1:] for line in straight.lines if line[0] == "commit"]
    scores = {line[1]: line[2] for line in recording.lines() if line[0] == "scores"}
    for step, each in ((line[1], line[2]) for line in straight.lines if line[0] == "scores"):
        assert [row[:2] for row in scores[step]] == [row[:2] for row in each], "of both learners"
        assert scores[step] == [pytest.approx(row, abs=1e-6) for row in each]


def progress_of(config: LearnerConfig) -> dict[str, Any]:
    found = Checkpoints(config.out_dir / "checkpoints", 2).find(None)
    return found.progress


def test_a_learner_can_stop_in_the_rest_of_an_interrupted_step(
    tmp_path: Path, base: Path, config: LearnerConfig, batches: list[Batch], stop: StopInAStep
) -> None:
    """The second stop saves nothing: a checkpoint of this step exists, and a name is used only once."""
    straight = Straight(tmp_path / "four", base, batches, stop, optimizer_steps=4)
    part = straight.micro // 4
    rare = dataclasses.replace(config, checkpoint_every=10, optimizer_steps=4)
    recording = Recording(rare.out_dir.parent, batches)
    learn(rare, recording, prefetch=stop.after(straight.micro + part + 1))
    assert len(progress_of(rare)["begun"]["groups"]) == 1
    learn(rare, recording, resume=True, prefetch=stop.after(part + 1))
    assert checkpoints_of(rare) == ["step-00000001-epoch-1"]
    learn(rare, recording, resume=True)
    straight.is_trained_by(rare)


def test_no_group_is_left_out_when_groups_are_dealt_to_other_parts(
    config: LearnerConfig, batches: list[Batch], straight: Straight, stop: StopInAStep
) -> None:
    """The learner that resumes deals the batch to four optimizer steps; half of its groups are already trained."""
    rare = dataclasses.replace(config, checkpoint_every=10)
    recording = Recording(rare.out_dir.parent, batches)
    learn(rare, recording, prefetch=stop.after(straight.micro * 3 // 2 + 1))
    trained = set(progress_of(rare)["begun"]["groups"])
    seen: list[set[int]] = []
    lay_out = Policy.lay_out

    def see(policy: Policy, parts: Any) -> Any:
        seen.append({answer.group_id for part in parts for answer in part})
        return lay_out(policy, parts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Policy, "lay_out", see)
        learn(dataclasses.replace(rare, optimizer_steps=4), recording, resume=True)
    groups = {group.group_id for group in batches[1].groups}
    assert (seen[0] | trained, seen[0] & trained) == (groups, set())


def test_a_step_whose_proximal_logprobs_cannot_be_recomputed_is_finished(
    config: LearnerConfig, batches: list[Batch], straight: Straight, stop: StopInAStep
) -> None:
    rare = dataclasses.replace(config, checkpoint_every=10, proximal="recomputed")
    recording = Recording(rare.out_dir.parent, batches)
    learn(rare, recording, prefetch=stop.after(straight.micro * 3 // 2 + 1))
    assert checkpoints_of(rare) == ["step-00000002-epoch-1"]
    assert progress_of(rare)["begun"] is None
    learn(rare, recording, resume=True, prefetch=stop.after(1))
    assert [row["step"] for row in rows_of(rare)] == [1, 2], "nothing is applied: it may leave"


def test_a_learner_stopped_before_its_first_checkpoint_leaves_the_base_model(
    config: LearnerConfig,
    batches: list[Batch],
    straight: Straight,
    stop: StopInAStep,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recording = Recording(config.out_dir.parent, batches)
    with caplog.at_level("INFO", "echo2d.learner"):
        learn(config, recording, prefetch=stop.after(straight.micro - 1))
    assert caplog.messages[-1] == "stopped before the end of the first step: nothing was saved"
    assert checkpoints_of(config) == []
    learn(config, recording, resume=True)
    straight.is_trained_by(config)


def test_a_step_that_ends_in_time_is_finished(
    config: LearnerConfig, batches: list[Batch], straight: Straight, stop: StopInAStep
) -> None:
    patient = dataclasses.replace(config, stop_within_s=3600.0)
    recording = Recording(patient.out_dir.parent, batches)
    learn(patient, recording, prefetch=stop.after(2 * straight.micro + 1))
    assert [row["step"] for row in rows_of(patient)] == [1, 2, 3]
    assert checkpoints_of(patient) == ["step-00000002-epoch-1", "step-00000003-epoch-1"]


class Times:
    """A clock for `StopClock`, and the time at which it was told to stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.stopped_at = 100.0, None  # type: float, float | None
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


# The step before took 40 s in 8 micro-batches. The learner is told to stop after `done` of them, and has 25 s.
@pytest.mark.parametrize(
    ("done", "took_s", "save_s", "busy_s", "leaves"),
    [
        (4, 20.0, 4.0, 0.0, False),  # 20 s + 4 s
        (4, 20.0, 6.0, 0.0, True),  # 20 s + 6 s
        (0, 0.0, 1.0, 0.0, True),  # 40 s
        (7, 35.0, 4.0, 22.0, True),  # the checkpoint before ends later than the step
        (7, 35.0, None, 0.0, True),  # the time of a checkpoint is not known
        (4, 30.0, 0.0, 0.0, True),  # this step is slower
        (4, 10.0, 4.0, 0.0, False),  # this step is faster, but the estimate uses the slower pace
    ],
)
def test_a_step_that_would_end_too_late_is_interrupted(
    times: Times, done: int, took_s: float, save_s: float | None, busy_s: float, leaves: bool
) -> None:
    clock = StopClock(Ranks(), 25.0, lambda: times.stopped_at)
    clock.begin_step()
    assert not clock.leaves(0, 8, save_s=save_s, busy_s=busy_s)
    times.now += 40.0
    clock.end_step()
    clock.begin_step()
    times.now += took_s
    times.stopped_at = times.now
    assert clock.leaves(done, 8, save_s=save_s, busy_s=busy_s) is leaves
    assert not clock.leaves(done, 8, save_s=save_s, busy_s=busy_s, may=False)
    assert clock.told


def test_the_first_step_has_no_known_pace(times: Times) -> None:
    clock = StopClock(Ranks(), 25.0, lambda: times.stopped_at)
    clock.begin_step()
    times.stopped_at = times.now
    assert clock.leaves(0, 8, save_s=0.0, busy_s=0.0)
