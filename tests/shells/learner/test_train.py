"""A whole run of the learner, with a real model, real files and a scripted coordinator."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from echo2d.client import (
    Batch,
    Evaluation,
    Group,
    IntegrityFault,
    OperatorFault,
    PeerFault,
    PromptsOver,
    Sampling,
    StepFigures,
)
from echo2d.learner import train
from echo2d.learner.batch.packing import PackedAnswer, parts
from echo2d.learner.config import LearnerConfig
from echo2d.learner.metrics.tracking import SampleTable, TrackedRun
from tests.support.learner import learn
from tests.support.poison import with_poison
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS, ScriptedCoordinator


def test_a_run_publishes_commits_and_checkpoints_in_order(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    rows = learn(config, coordinator)
    assert coordinator.events[:2] == [("session", 0), ("publish", 0)]
    assert coordinator.said("commit") == [1, 2, 3, 4]
    assert coordinator.said("publish") == [0, 1, 2, 3, 4]
    for step in (
        1,
        2,
        3,
    ):  # a version goes out while the next step is trained, and is out before the one after it
        committed, published = (
            coordinator.events.index((what, step)) for what in ("commit", "publish")
        )
        assert committed < published < coordinator.events.index(("publish", step + 1))
    assert coordinator.said("checkpoint") in (
        [0, 3],
        [3],
    )  # two that become complete together are reported together
    assert coordinator.events[-1] == ("checkpoint", 3)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["staleness"] for row in rows] == [{"0": 16}, *[{"1": 16}] * 3]
    assert {(row["reward_mean"], row["tokens"]) for row in rows} == {(0.5, GROUPS * GROUP_SIZE * 9)}
    assert {"train", "layout", "publish", "commit", "check", "wait"} <= rows[1]["seconds"].keys()
    assert not list(config.snapshot_root.iterdir())


def test_every_row_reaches_the_boards_that_were_asked_for(
    config: LearnerConfig, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, list[object]] = {"tensorboard": [], "wandb": []}

    class Board:
        def __init__(self, name: str, run: Callable[[], TrackedRun]) -> None:
            self._seen, found = shown[name], run()
            assert (found.name, found.resumed_at) == (coordinator.run_id, 0)
            assert found.settings["lr"] == config.lr
            assert not {"url", "checkpoint_url"} & found.settings.keys()

        def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
            self._seen.append((step, numbers["loss"]))

        def close(self) -> None:
            self._seen.append("closed")

    monkeypatch.setattr(
        train, "makers", lambda names, run: {name: partial(Board, name, run) for name in names}
    )
    rows = learn(dataclasses.replace(config, track=("tensorboard", "wandb")), coordinator)
    losses = [(row["step"], row["loss"]) for row in rows]
    assert shown == {"tensorboard": [*losses, "closed"], "wandb": [*losses, "closed"]}


def test_a_step_is_recorded_before_it_is_durable(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    rows: list[int] = []
    coordinator.checkpoint = lambda step: rows.append(  # type: ignore[method-assign]
        len((config.out_dir / "metrics.jsonl").read_text().splitlines())
    )
    learn(config, coordinator)
    assert rows in ([3, 4], [4, 4], [4])  # it is written while training goes on


def test_fresh_rollouts_have_an_importance_ratio_of_one(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.lag = 0
    for row in learn(config, coordinator):
        assert row["ratio_mean"] == pytest.approx(1.0, abs=0.01)
        assert row["clip_share"] == 0.0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_the_log_line_of_a_step_has_the_main_figures(
    config: LearnerConfig,
    coordinator: ScriptedCoordinator,
    caplog: pytest.LogCaptureFixture,
    kl_coef: float,
) -> None:
    with caplog.at_level("INFO", "echo2d.learner"):
        (row,) = learn(dataclasses.replace(config, steps=1, kl_coef=kl_coef), coordinator)
    (line,) = [each for each in caplog.messages if each.startswith("trained ")]
    facts = dict(each.split("=", 1) for each in line.split()[1:])
    assert float(facts["entropy_nats"]) == pytest.approx(row["entropy"], abs=1e-3)
    assert float(facts["kl_rollout_nats"]) == pytest.approx(row["kl"], abs=1e-4)
    assert float(facts["grad_norm"]) == pytest.approx(row["grad_norm"], rel=1e-2)
    assert float(facts["answer_tokens"]) == 9
    assert ("kl_base_nats" in facts) == bool(kl_coef)
    assert (row["kl_base"] is None) == (not kl_coef)
    told = StepFigures(
        row["entropy"], row["kl"], row["kl_base"], row["grad_norm"], 0.0, row["loss"], mfu=None
    )
    assert coordinator.figures[1] == told, "a CPU has no MFU"


def test_every_commit_carries_the_scores_of_its_trajectories(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.lag = 0
    learn(config, coordinator)
    for step in range(1, 5):
        names = [(score.group, score.sample) for score in coordinator.scores[step]]
        groups = range(GROUPS * step, GROUPS * (step + 1))
        assert sorted(names) == [(group, n) for group in groups for n in range(GROUP_SIZE)]
        # What is published is rounded to bfloat16.
        assert max(score.k for score in coordinator.scores[step]) < 0.1


@pytest.mark.parametrize(
    ("at_start", "answered", "published"),
    [(2, 2, [0, 2, 4]), (1, 3, [0, 3, 4]), (1, 1, [0, 1, 2, 3, 4])],
)
def test_a_learner_uses_the_coordinators_kappa(
    config: LearnerConfig,
    coordinator: ScriptedCoordinator,
    at_start: int,
    answered: int,
    published: list[int],
) -> None:
    coordinator.lag, coordinator.publish_every, coordinator.kappa_answered = 2, at_start, answered
    learn(config, coordinator)
    assert coordinator.said("publish") == published


def too_old(batch: Batch) -> Batch:
    """A batch with a trajectory that is one step older than a session's S = 2 allows."""
    group = batch.groups[1]
    spans = tuple(
        dataclasses.replace(span, version=span.version - 3) for span in group.trajectories[2].spans
    )
    old = dataclasses.replace(group.trajectories[2], spans=spans)
    members = (*group.trajectories[:2], old, *group.trajectories[3:])
    return dataclasses.replace(
        batch,
        groups=(
            batch.groups[0],
            dataclasses.replace(group, trajectories=members),
            *batch.groups[2:],
        ),
    )


def test_the_learner_follows_the_runs_staleness(
    config: LearnerConfig, coordinator: ScriptedCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator has changed S: the learner does not refuse what the coordinator now admits."""
    coordinator.spoil[3] = lambda batch: dataclasses.replace(too_old(batch), staleness_max=5)
    rows = learn(config, coordinator)
    assert coordinator.refused == {}
    assert "4" in rows[2]["staleness"]
    assert "staleness_max is 5 from step 3 on; it was 2" in caplog.text


def test_a_bad_group_is_refused_and_never_trained(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.spoil[3] = too_old
    rows = learn(config, coordinator)
    assert coordinator.refused == {13: "trajectory 2: version -2 in step 3 with staleness bound 2"}
    assert coordinator.said("commit") == [1, 2, 3, 4]
    assert [row["staleness"] for row in rows[1:]] == [{"1": 16}] * 3


def test_a_train_step_can_be_slowed_down(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    rows = learn(dataclasses.replace(config, steps=2, step_floor_s=0.1), coordinator)
    assert all(row["t_train_s"] >= 0.1 for row in rows)


def test_trained_groups_are_refused_and_a_damaged_batch_is_taken_again(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    damaged = [IntegrityFault("a batch's bytes are not what its digest says")] * 2

    def spoil(batch: Batch) -> Batch:
        if damaged:
            raise damaged.pop()
        trained = dataclasses.replace(batch.groups[2], group_id=7)
        return dataclasses.replace(batch, groups=(*batch.groups[:2], trained, batch.groups[3]))

    coordinator.spoil[3] = spoil
    learn(config, coordinator)
    assert coordinator.refused == {7: "it was trained in step 1"}
    assert not damaged
    assert coordinator.said("commit") == [1, 2, 3, 4]


def test_a_fault_while_taking_ends_the_learner(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    def fenced(batch: Batch) -> Batch:
        raise PeerFault("fenced")

    coordinator.spoil[2] = fenced
    with pytest.raises(PeerFault, match="fenced"):
        learn(config, coordinator)


@pytest.mark.parametrize("name", ["out_dir", "snapshot_root"])
def test_a_directory_that_cannot_be_made_is_named_before_the_session(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    change: dict[str, Any] = {name: tmp_path / "file" / "x"}
    with pytest.raises(OperatorFault, match=rf"learner\.{name}: cannot make"):
        learn(dataclasses.replace(config, **change), coordinator)
    assert coordinator.events == []


def test_every_recipe_trains_alike_on_fresh_rollouts(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """All answers have the same length, so every mean is the same, and no ratio is far from 1."""
    coordinator.lag = 0
    (plain,) = learn(dataclasses.replace(config, steps=1), coordinator)
    recipes: list[dict[str, Any]] = [
        {"proximal": "recomputed", "micro_batch_tokens": 50},
        {"proximal": "loglinear", "correction": "icepop"},
        {"correction": "none", "packing": False},
        {"objective": "gspo", "correction": "sequence_mask", "kl_coef": 0.1},
    ]
    for number, recipe in enumerate(recipes):
        changed = dataclasses.replace(config, steps=1, out_dir=tmp_path / str(number), **recipe)
        (row,) = learn(changed, coordinator)
        assert row["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
        assert row["loss"] == pytest.approx(plain["loss"], abs=1e-4)
        assert row["by_staleness"]["0"]["answers"] == GROUPS * GROUP_SIZE


def test_dr_grpo_and_several_optimizer_steps_train(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    choices: dict[str, Any] = {
        "objective": "dr_grpo",
        "loss_tokens": 9,
        "proximal": "recomputed",
        "optimizer_steps": 2,
    }
    choices["recompute"] = "all"
    rows = learn(dataclasses.replace(config, steps=2, kl_coef=0.1, **choices), coordinator)
    assert coordinator.said("commit") == [1, 2]
    assert rows[1]["kl_base"] > 0.0
    assert (
        rows[0]["ratio_max"] > 1.0
    )  # the second optimizer step finds other weights than the rollouts'
    assert rows[0]["by_staleness"]["0"]["tokens"] == rows[0]["tokens"] == GROUPS * GROUP_SIZE * 9


def test_a_run_whose_prompts_end_publishes_its_last_version(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    def over(batch: Batch) -> Batch:
        raise PromptsOver("the prompts of task 'sums' have ended")

    coordinator.publish_every = coordinator.kappa_answered = 3
    coordinator.lag = 2
    coordinator.spoil[3] = over
    learn(config, coordinator)
    assert coordinator.said("commit") == [1, 2]
    assert coordinator.said("publish") == [0, 2]


def test_a_task_that_is_sampled_at_temperature_0_is_refused(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.samplings = {"sums": Sampling(0.6), "cold": Sampling(0.0)}
    with pytest.raises(OperatorFault, match=r"task 'cold' is trained on, so .* above 0"):
        learn(config, coordinator)
    assert coordinator.said("publish") == []


def test_answers_that_have_no_room_are_refused_at_the_start(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.answer_tokens = 12
    short = dataclasses.replace(config, row_tokens_max=12)
    with pytest.raises(OperatorFault, match=r"may have 12 tokens .* may have 12 here"):
        learn(short, coordinator)
    assert coordinator.said("publish") == []


def test_the_share_of_answers_that_are_trained_in_part_is_reported(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.answer_tokens = 12
    short = dataclasses.replace(config, row_tokens_max=12, too_long="truncate")
    rows = learn(short, coordinator)
    found = [coordinator.figures[step] for step in (1, 2)]
    assert [each.truncated for each in found if each] == [row["truncated"] for row in rows[:2]]
    assert 0 < rows[0]["truncated"] <= 1


def test_tokens_are_scored_at_the_temperature_of_their_group(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """Groups of one batch may have been drawn at different temperatures."""
    coordinator.temperatures = (1.0, 0.5)
    rows = learn(config, coordinator)
    assert rows[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert max(abs(score.k) for score in coordinator.scores[1]) < 1e-5


def evaluation(number: int, version: int) -> Evaluation:
    return Evaluation(
        number, "held", version, "00", 9, 10, 1, 0.5, 0.1, {"1": 0.5}, {"form": 1.0}, 0.0, 7.0, 1.0
    )


def test_evaluations_have_their_own_rows_and_the_learner_waits_for_the_last_one(
    config: LearnerConfig, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "BEAT_S", 0.0)
    coordinator.evals = {1: [evaluation(1, 0)], 3: [evaluation(2, 2)], 4: [evaluation(3, 4)]}
    coordinator.unfinished = [["held"], ["held"], []]
    rows = learn(config, coordinator)
    found = [(row["step"], row["eval"]["held"]["version"]) for row in rows if "eval" in row]
    assert found == [(1, 0), (3, 2), (4, 4)]
    assert coordinator.said("evaluate") == [4, 4, 4]
    row = next(row for row in rows if "eval" in row)["eval"]["held"]
    assert (row["mean"], row["rows"], row["of"], row["pass_at"]) == (0.5, 9, 10, {"1": 0.5})


def test_the_boards_get_samples_every_few_steps(
    config: LearnerConfig, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, Any]] = []

    class Board:
        def show(self, step: int, numbers: Mapping[str, float], samples: SampleTable) -> None:
            shown.append((step, samples))

        def close(self) -> None:
            pass

    monkeypatch.setattr(train, "makers", lambda *_: {"board": Board})
    learn(dataclasses.replace(config, track_samples_every=2), coordinator)
    assert coordinator.said("samples") == [2, 4]
    assert shown == [(1, []), (2, []), (3, []), (4, [])]


def test_a_learner_at_its_end_does_not_wait_for_ever_for_an_evaluation(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.evals = {1: [evaluation(1, 0)]}
    coordinator.unfinished = [["held"]] * 9
    learn(dataclasses.replace(config, eval_wait_s=0.0), coordinator)
    assert coordinator.said("evaluate") == [4]


def test_a_resumed_learner_records_no_evaluation_twice(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.evals = {1: [evaluation(1, 0)], 2: [evaluation(2, 2)]}
    learn(dataclasses.replace(config, steps=2), coordinator)
    rows = learn(config, coordinator, resume=True)
    assert [row["eval"]["held"]["number"] for row in rows if "eval" in row] == [1, 2]


def test_a_step_whose_answers_were_all_cut_off_changes_nothing(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    def cut(batch: Batch) -> Batch:
        groups = [
            dataclasses.replace(
                group,
                trajectories=tuple(
                    dataclasses.replace(each, finish="length") for each in group.trajectories
                ),
            )
            for group in batch.groups
        ]
        return dataclasses.replace(batch, groups=tuple(groups))

    coordinator.spoil = dict.fromkeys(range(1, 3), cut)
    rows = learn(dataclasses.replace(config, cut_off="filter", steps=2), coordinator)
    assert [row["cut_off"] for row in rows] == [1.0, 1.0]
    assert [row["grad_norm"] for row in rows] == [0.0, 0.0]
    before, after = [
        load_file(coordinator.published(version) / "model.safetensors") for version in (0, 2)
    ]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rows_contain_answer_lengths_and_the_rewards_of_each_task(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    def tagged(batch: Batch) -> Batch:
        def change(index: int, group: Group) -> Group:
            trajectories = tuple(
                dataclasses.replace(
                    each, task=f"task {index % 2}", reward_parts={"form": float(index)}
                )
                for each in group.trajectories
            )
            tags = {"level": str(index)}
            return dataclasses.replace(group, trajectories=trajectories, tags=tags)

        groups = [change(index, group) for index, group in enumerate(batch.groups)]
        return dataclasses.replace(batch, groups=tuple(groups))

    coordinator.spoil[1] = tagged
    row = learn(dataclasses.replace(config, steps=1), coordinator)[0]
    assert (row["answer_tokens"], row["answer_tokens_max"], row["cut_off"]) == (9.0, 9, 0.0)
    assert row["tasks"] == {
        f"task {number}": {
            "groups": 2,
            "reward_mean": 0.5,
            "answer_tokens": 9.0,
            "answer_tokens_max": 9,
            "given_tokens": 0.0,
            "turns": 1.0,
            "cut_off": 0.0,
            "parts": {"form": number + 1.0},
            "reward_by_tag": {f"level={number}": 0.5, f"level={number + 2}": 0.5},
        }
        for number in range(2)
    }


def test_a_group_whose_gradient_is_no_number_is_replaced(
    sensitive: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.spoil[2] = lambda batch: with_poison(batch, 8, 11)
    rows = learn(sensitive, coordinator)
    assert coordinator.refused.keys() == {8, 11}
    assert coordinator.said("commit") == [1, 2, 3, 4]
    assert [row["poisoned"] for row in rows] == [0, 2, 0, 0]
    assert all(math.isfinite(row["grad_norm"]) for row in rows)


def test_a_later_optimizer_step_with_poison_is_skipped(
    sensitive: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """Each group of a step is an optimizer step of its own; the last one of step 2 has poison."""
    config = dataclasses.replace(sensitive, optimizer_steps=GROUPS, steps=2)
    groups = [[each] for each in named(2 * GROUPS, GROUPS)]
    *_, (last,) = parts(groups, GROUPS, step=2, rng_seed=config.rng_seed)
    coordinator.spoil[2] = lambda batch: with_poison(batch, last.group_id)
    rows = learn(config, coordinator)
    assert coordinator.refused == {}
    assert [row["poisoned"] for row in rows] == [0, 1]


def test_a_learner_that_gets_poison_again_and_again_stops(
    sensitive: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    class Again(dict[int, Any]):
        def __delitem__(self, _: int) -> None:
            """Keep the entry, so that the batch with the replacements is poisonous too."""

    coordinator.spoil = Again({2: lambda batch: with_poison(batch, 9)})
    with pytest.raises(
        FloatingPointError, match="groups of step 2 were poisonous 2 times in a row"
    ):
        learn(dataclasses.replace(sensitive, poison_max=1), coordinator)
    assert coordinator.said("commit") == [1]


def named(first: int, count: int) -> list[PackedAnswer]:
    """One answer of each of this many groups."""
    nothing = np.zeros(0, dtype=np.float32)
    return [
        PackedAnswer(
            group,
            0,
            nothing.astype(np.int32),
            nothing > 0,
            nothing,
            nothing.astype(np.int64),
            np.float32(0),
        )
        for group in range(first, first + count)
    ]
