"""The whole learner, with a real model and real files, against a scripted coordinator."""

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import learner.__main__ as program
from echo2d.client import (
    Batch,
    Coordinator,
    IntegrityFault,
    NotResumable,
    OperatorFault,
    PeerFault,
    StoreFault,
)
from echo2d.demo.tiny_model import TinyRecipe, held_out_prompts, make_tiny_model, sampled_accuracy
from learner import train
from learner.__main__ import main, stop_on_signals
from learner.batch_prefetch import BatchPrefetch
from learner.checkpoint import Checkpoints
from learner.config import LearnerConfig
from learner.model import Policy, answer_logprobs, keeps_answers_apart, load_model
from learner.packing import Answer, micro_batches
from learner.ranks import Ranks
from learner.train import Learner
from tests.support.full_disk import files_up_to
from tests.support.learner import config_in, learn, make_base, throwing_dice, write_config
from tests.support.polling import poll
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS, ScriptedCoordinator

STEPS = 4
NARROW = TinyRecipe(accuracy_stop=0.0, batch=8, layers=1, hidden_size=64)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path, base: Path) -> LearnerConfig:
    (tmp_path / "snapshots").mkdir()
    return config_in(tmp_path, base, steps=STEPS, checkpoint_every=3)


@pytest.fixture
def coordinator(tmp_path: Path) -> ScriptedCoordinator:
    return ScriptedCoordinator(tmp_path / "taken", lag=1)


@pytest.fixture
def served(
    coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> ScriptedCoordinator:
    """It is the one that the learner's program finds."""
    monkeypatch.setattr(
        program, "Coordinator", lambda *_, **__: contextlib.nullcontext(coordinator)
    )
    return coordinator


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """The learner's program sets them; the test runner gets its own back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    )  # two that are whole at once are told at once
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
        def __init__(self, name: str) -> None:
            self._seen = shown[name]

        def show(self, step: int, numbers: Mapping[str, float]) -> None:
            self._seen.append((step, numbers["loss"]))

        def close(self) -> None:
            self._seen.append("closed")

    monkeypatch.setattr(
        train, "makers", lambda names, _: {name: partial(Board, name) for name in names}
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


def test_published_files_are_the_bases_in_bfloat16(
    config: LearnerConfig, coordinator: ScriptedCoordinator, base: Path
) -> None:
    learn(config, coordinator)
    first, last = coordinator.published(0), coordinator.published(STEPS)
    assert {path.name for path in last.iterdir()} == {path.name for path in base.iterdir()}
    assert (first / "config.json").read_bytes() == (base / "config.json").read_bytes()
    old, new = load_file(base / "model.safetensors"), load_file(last / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in new.items()} == {
        name: (t.shape, t.dtype) for name, t in old.items()
    }
    assert all(
        torch.equal(tensor, old[name])
        for name, tensor in load_file(first / "model.safetensors").items()
    )
    assert sampled_accuracy(last, held_out_prompts()) > sampled_accuracy(base, held_out_prompts())


def test_fresh_rollouts_have_ratio_one(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    coordinator.lag = 0
    for row in learn(config, coordinator):
        assert row["ratio_mean"] == pytest.approx(1.0, abs=0.01)
        assert row["clip_share"] == 0.0


@pytest.mark.parametrize(
    ("at_start", "answered", "published"),
    [(2, 2, [0, 2, 4]), (1, 3, [0, 3, 4]), (1, 1, [0, 1, 2, 3, 4])],
)
def test_kappa_is_the_coordinators(
    config: LearnerConfig,
    coordinator: ScriptedCoordinator,
    at_start: int,
    answered: int,
    published: list[int],
) -> None:
    coordinator.lag, coordinator.publish_every, coordinator.kappa_answered = 2, at_start, answered
    learn(config, coordinator)
    assert coordinator.said("publish") == published


def test_a_bad_group_is_refused_and_never_trained(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    def too_old(batch: Batch) -> Batch:
        group = batch.groups[1]
        spans = tuple(
            dataclasses.replace(span, version=span.version - 3)
            for span in group.trajectories[2].spans
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

    coordinator.spoil[3] = too_old
    rows = learn(config, coordinator)
    assert coordinator.refused == {13: "trajectory 2: version -2 in step 3 with staleness bound 2"}
    assert coordinator.said("commit") == [1, 2, 3, 4]
    assert [row["staleness"] for row in rows[1:]] == [{"1": 16}] * 3


def test_a_stopped_learner_resumes_to_the_same_weights(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    learn(config, coordinator)
    straight = load_file(coordinator.published(STEPS) / "model.safetensors")

    config = dataclasses.replace(config, out_dir=tmp_path / "other")
    again = ScriptedCoordinator(tmp_path / "taken2", lag=1)
    prefetch = BatchPrefetch()
    again.on_commit = lambda step: prefetch.stop() if step == 2 else None
    learn(config, again, prefetch=prefetch)
    assert again.events[-1] == (
        "checkpoint",
        0,
    )  # if this one were damaged, the base model would be the one before
    rows = learn(config, again, resume=True)
    assert again.events[again.events.index(("session", 2)) + 1] == ("publish", 2)
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    resumed = load_file(again.published(STEPS) / "model.safetensors")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


def test_a_stopped_learner_does_not_wait_for_a_batch(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    prefetch = BatchPrefetch()
    prefetch.stop()
    Learner(config, cast("Coordinator", coordinator), prefetch, resume=False).run()
    assert coordinator.events == [("session", 0), ("publish", 0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_end_and_saves_it(
    config: LearnerConfig, coordinator: ScriptedCoordinator, number: signal.Signals
) -> None:
    prefetch = BatchPrefetch()
    stop_on_signals(lambda _: prefetch.stop())
    coordinator.on_commit = lambda step: signal.raise_signal(number) if step == 2 else None
    learn(config, coordinator, prefetch=prefetch)
    assert coordinator.said("commit") == [1, 2]
    assert [path.name for path in (config.out_dir / "checkpoints").iterdir()] == [
        "step-00000002-epoch-1"
    ]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_step_can_be_slowed_down(config: LearnerConfig, coordinator: ScriptedCoordinator) -> None:
    rows = learn(dataclasses.replace(config, steps=2, step_floor_s=0.1), coordinator)
    assert all(row["t_train_s"] >= 0.1 for row in rows)


def test_checkpoints_are_not_overwritten_by_accident(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    learn(config, coordinator)
    assert sorted(path.name for path in (config.out_dir / "checkpoints").iterdir()) == [
        "step-00000003-epoch-1",
        "step-00000004-epoch-1",
    ]
    with pytest.raises(OperatorFault, match="use --resume"):
        learn(config, coordinator)
    learn(config, coordinator, resume=True)
    assert coordinator.events[-2:] == [("session", STEPS), ("publish", STEPS)]


def test_after_a_damaged_checkpoint_the_one_before_is_used(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """The same batches are there for it, because the damaged one was not said to be durable."""
    learn(config, coordinator)
    os.truncate(config.out_dir / "checkpoints" / "step-00000004-epoch-1" / "__0_0.distcp", 1000)
    rows = learn(config, coordinator, resume=True)
    assert coordinator.said("session") == [0, 3]
    assert max(coordinator.said("checkpoint")) == 3
    assert rows[4]["loss"] == rows[3]["loss"]
    learn(config, coordinator, resume=True)
    assert coordinator.said("session") == [0, 3, 4]


class KilledError(BaseException):
    """Nothing that the learner could react to."""


@pytest.mark.parametrize("killed_at", [3, 5, 6])
def test_killed_and_resumed_is_the_same_as_straight(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path, killed_at: int
) -> None:
    """Losses, weights and optimizer, bit for bit, with a model that throws dice."""
    model = throwing_dice(config.model, tmp_path / "dice")
    config = dataclasses.replace(config, model=model, steps=6, checkpoint_every=2)
    straight = learn(config, coordinator)

    last = (killed_at - 1) // 2 * 2

    def kill(step: int) -> None:
        if step == killed_at:
            poll(
                lambda: (
                    not last
                    or (other.out_dir / "checkpoints" / f"step-{last:08d}-epoch-1").exists()
                )
            )
            raise KilledError

    other = dataclasses.replace(config, out_dir=tmp_path / "other")
    again = ScriptedCoordinator(tmp_path / "taken2", lag=1)
    again.on_commit = kill
    with pytest.raises(KilledError):
        learn(other, again)
    again.on_commit = lambda step: None
    torch.rand(3)  # the process that goes on is another one
    rows = {row["step"]: row for row in learn(other, again, resume=True)}
    assert again.said("session") == [0, last]
    told = ("loss", "grad_norm", "ratio_mean", "reward_mean", "tokens")
    assert [[rows[row["step"]][name] for name in told] for row in straight] == [
        [row[name] for name in told] for row in straight
    ]
    for name in ("model.safetensors", "config.json"):
        assert (again.published(6) / name).read_bytes() == (
            coordinator.published(6) / name
        ).read_bytes()
    assert _same(*(checkpointed(each) for each in (config, other)))


def checkpointed(config: LearnerConfig) -> dict[str, Any]:
    """All that a learner would go on with."""
    state = Policy(config, Ranks()).state()
    progress = Checkpoints(config.out_dir / "checkpoints", 2).load_newest(state)
    return {**state, **progress}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("size", "line"),
    [(100, "cannot write .*(snapshot|metrics)"), (1 << 20, "cannot write the checkpoint")],
)
def test_a_full_disk_ends_the_learner_in_one_line_and_it_goes_on_later(
    config: LearnerConfig, coordinator: ScriptedCoordinator, size: int, line: str
) -> None:
    config = dataclasses.replace(config, checkpoint_every=1)
    prefetch = BatchPrefetch()
    coordinator.on_commit = lambda step: prefetch.stop() if step == 2 else None
    learn(config, coordinator, prefetch=prefetch)
    coordinator.on_commit = lambda step: None
    with files_up_to(size), pytest.raises(StoreFault, match=line):
        learn(config, coordinator, resume=True)
    assert not list((config.out_dir / "checkpoints").glob(".tmp*"))
    assert not list(config.snapshot_root.iterdir()) or size > 100
    learn(config, coordinator, resume=True)
    assert coordinator.said("session") == [0, 2, 2]


def test_a_checkpoint_of_another_model_is_told(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    learn(config, coordinator)
    model = make_tiny_model(tmp_path / "models", NARROW)
    with pytest.raises(OperatorFault, match="does not fit"):
        learn(dataclasses.replace(config, model=model), coordinator, resume=True)


def test_a_learner_that_comes_late_takes_the_newest_checkpoint(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """The older one was at work until this one had its session."""
    config = dataclasses.replace(config, checkpoint_every=1)
    prefetch = BatchPrefetch()
    coordinator.on_commit = lambda step: prefetch.stop() if step == 1 else None
    learn(config, coordinator, prefetch=prefetch)
    coordinator.on_commit = lambda step: None
    late = Learner(config, cast("Coordinator", coordinator), BatchPrefetch(), resume=True)
    learn(config, coordinator, resume=True)
    coordinator.lowest = STEPS - 1
    late.run()
    assert coordinator.said("session") == [0, 1, STEPS]
    shutil.rmtree(config.out_dir)
    with pytest.raises(NotResumable, match="cannot resume"):
        learn(config, coordinator)


def test_groups_that_were_trained_are_refused_and_damaged_bytes_asked_for_again(
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


def test_what_a_fenced_learner_left_is_removed(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    for name in (
        "run-epoch-1-version-7",
        ".tmp-run-epoch-1-version-8",
        "mine",
        "other-epoch-0-version-7",
    ):
        (config.snapshot_root / name).mkdir()
    coordinator._epoch = 1
    learn(config, coordinator)
    assert {path.name for path in config.snapshot_root.iterdir()} == {
        "mine",
        "other-epoch-0-version-7",
    }


def test_what_was_left_is_no_reason_for_want_of_room(
    config: LearnerConfig, coordinator: ScriptedCoordinator
) -> None:
    """Else no restart would help. What the learner before this one has may still be in use."""
    for epoch in (0, 1):
        (config.snapshot_root / f"run-epoch-{epoch}-version-7").mkdir()
    coordinator._epoch = 1
    found: list[set[str]] = []
    taken = coordinator.publish

    def publish(version: int, directory: Path) -> object:
        found.append({path.name for path in config.snapshot_root.iterdir()} - {directory.name})
        return taken(version, directory)

    coordinator.publish = publish  # type: ignore[assignment, method-assign]
    learn(config, coordinator)
    assert (found[0], found[-1]) == ({"run-epoch-1-version-7"}, set())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_is_the_operators_fault(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path, name: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in config.model.iterdir():
        if path.name != name:
            (model / path.name).hardlink_to(path)
    with pytest.raises(OperatorFault, match=r"learner\.model"):
        learn(dataclasses.replace(config, model=model), coordinator)


def test_a_model_without_one_of_its_weights_is_the_operators_fault(
    config: LearnerConfig, tmp_path: Path
) -> None:
    model = shutil.copytree(config.model, tmp_path / "lacking")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperatorFault, match=r"lacking lacks the weights model\.norm\.weight"):
        load_model(model)


def test_a_truncated_model_is_the_operators_fault(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(config.model, model)
    os.truncate(model / "model.safetensors", 5000)
    with pytest.raises(OperatorFault, match=r"learner\.model: cannot load"):
        learn(dataclasses.replace(config, model=model), coordinator)


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
    """All answers are as long as each other, so every mean is the same, and no ratio is far from 1."""
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
    choices["gradient_checkpointing"] = True
    rows = learn(dataclasses.replace(config, steps=2, kl_coef=0.1, **choices), coordinator)
    assert coordinator.said("commit") == [1, 2]
    assert (
        rows[0]["ratio_max"] > 1.0
    )  # the second optimizer step finds other weights than the rollouts'
    assert rows[0]["by_staleness"]["0"]["tokens"] == rows[0]["tokens"] == GROUPS * GROUP_SIZE * 9


def test_rows_shared_by_several_answers_give_the_same_logprobs(base: Path) -> None:
    model = load_model(base).eval()
    assert keeps_answers_apart(model)
    rng = np.random.default_rng(0)
    answers = [
        Answer(
            rng.integers(0, 17, length, dtype=np.int32),
            np.arange(length) > 2,
            np.zeros(length - 3, dtype=np.float32),
            np.zeros(length - 3, dtype=np.int64),
            np.float32(index),
        )
        for index, length in enumerate((20, 4, 9, 7, 12, 5))
    ]
    found = []
    for packed in (False, True):
        (micro,) = micro_batches(answers, 1000, packed=packed)
        with torch.inference_mode():
            logprobs = answer_logprobs(
                model, micro.tokens_bt, micro.answer_bt, 1.0, micro.positions_bt
            )
        found.append({index: logprobs[micro.advantages_n == index] for index in range(6)})
    assert all(torch.allclose(found[0][index], found[1][index], atol=1e-5) for index in range(6))


def test_the_file_is_read_back_as_written(config: LearnerConfig, tmp_path: Path) -> None:
    assert LearnerConfig.load(write_config(tmp_path / "run.toml", config)) == config


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lr": "high"}, "learner.lr: expected a number, more than 0.0; found 'high'"),
        ({"lr": 0}, "learner.lr: expected a number, more than 0.0; found 0"),
        ({"steps": 1.5}, "learner.steps: expected an integer, at least 1; found 1.5"),
        ({"steps": True}, "learner.steps: expected an integer, at least 1; found True"),
        ({"betas": [0.9]}, "learner.betas: expected [a number, a number]"),
        ({"betas": [0.9, 1.0]}, "learner.betas: expected [a number, a number]"),
        (
            {"objective": "ppo"},
            'learner.objective: expected "grpo" or "dr_grpo" or "gspo"; found \'ppo\'',
        ),
        ({"speed": 1}, "learner.speed: unknown key; expected one of objective, "),
    ],
)
def test_a_wrong_key_is_one_line_and_exit_code_2(
    config: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    line: str,
) -> None:
    assert main(["--config", str(write_config(tmp_path / "run.toml", config, **changes))]) == 2
    assert capsys.readouterr().err.startswith(f"learner: {line}")


def test_a_gradient_that_is_no_number_would_be_none_again(
    config: LearnerConfig,
    served: ScriptedCoordinator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first step leaves weights with which nothing can be reckoned. A service must not begin again for ever."""
    path = write_config(tmp_path / "run.toml", config, lr=1e30, warmup_steps=0)
    assert main(["--config", str(path)]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("learner: the gradient of train step 2 has norm ")
    )
    assert served.said("commit") == [1]


@pytest.mark.usefixtures("served")
def test_what_nobody_expected_has_a_traceback_and_a_last_word(
    config: LearnerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So other ranks do not wait for this one, nor it for what libraries do at the end."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Policy, "train_step", full)
    assert main(["--config", str(write_config(tmp_path / "run.toml", config))]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last):" in said
    assert said.splitlines()[-1] == "learner: OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[learner]\nlr = 1", "learner.url: expected "),
        ("[run]", "expected a table [learner]"),
        ("a = ", "is not TOML"),
    ],
)
def test_a_file_without_a_whole_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main(["--config", str(path)]) == 2
    assert line in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none.toml")]) == 2
