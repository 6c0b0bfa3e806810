"""On-policy distillation, and the KL in the reward: whole runs of the learner, and what it refuses at the start."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from echo2d.client import Batch, Coordinator, OperatorFault, Session, Trajectory
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.learner.__main__ import main
from echo2d.learner.batch.packing import MicroBatch, PackedAnswer, whole_answers
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.begun_step import StepLeftError
from echo2d.learner.model.logprobs import TokenScores
from echo2d.learner.model.policy import PoisonedGroupsError, Policy
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.train import Learner
from tests.support.batches import RULES
from tests.support.learner import learn, record, write_config
from tests.support.scripted_coordinator import ScriptedCoordinator, answer_logprobs

STEPS = 20


class SamplingCoordinator(ScriptedCoordinator):
    """Its answers are drawn from the version that the step names."""

    def take_batch(self, step: int) -> Batch:
        batch = super().take_batch(step)
        dice = torch.Generator().manual_seed(step)

        def drawn(prompt: Any, each: Trajectory) -> Trajectory:
            model, row = self._models[each.spans[0].version], prompt.tolist()
            with torch.inference_mode():
                for _ in each.tokens:
                    logits = model(input_ids=torch.tensor([row])).logits[0, -1]
                    row.append(int(torch.multinomial(logits.softmax(-1), 1, generator=dice)))
                tokens_bt = np.array([row], dtype=np.int64)
                answer_bt = np.arange(len(row))[None] >= len(prompt)
                logprobs = answer_logprobs(model, tokens_bt, answer_bt, 1.0).numpy()
            tokens = np.array(row[len(prompt) :], dtype=np.int32)
            return dataclasses.replace(each, tokens=tokens, logprobs=logprobs)

        groups = tuple(
            dataclasses.replace(
                group, trajectories=tuple(drawn(group.prompt, each) for each in group.trajectories)
            )
            for group in batch.groups
        )
        return dataclasses.replace(batch, groups=groups)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has one layer more than the policy, and knows the task a little."""
    recipe = TinyRecipe(accuracy_stop=0.02, batch=64)
    return make_tiny_model(tmp_path_factory.mktemp("teachers"), recipe)


@pytest.mark.parametrize("objective", ["distill", pytest.param("grpo", marks=pytest.mark.nightly)])
def test_the_policy_comes_closer_to_its_teacher(
    config: LearnerConfig, tmp_path: Path, teacher: Path, objective: Any, caplog: Any
) -> None:
    taught = dataclasses.replace(
        config, steps=STEPS, teacher=teacher, objective=objective, lr=3e-3, warmup_steps=0
    )
    with caplog.at_level("INFO", "echo2d.learner"):
        rows = learn(taught, SamplingCoordinator(tmp_path / "taken"))
    distances = [row["kl_teacher"] for row in rows]
    print([f"{each:.3f}" for each in distances])  # noqa: T201
    assert np.mean(distances[-5:]) < 0.7 * np.mean(distances[:3])
    assert [row["kl_base"] for row in rows] == [None] * STEPS
    assert f"kl_teacher_nats={distances[0]:.4f}" in caplog.text


def with_token(model: Path, directory: Path, token: str) -> Path:
    """A copy of the model with another token in place of its first one."""
    shutil.copytree(model, directory)
    text = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first = min(vocabulary, key=vocabulary.__getitem__)
    vocabulary[token] = vocabulary.pop(first)
    text["added_tokens"] = [each for each in text["added_tokens"] if each["content"] != first]
    (directory / "tokenizer.json").write_text(json.dumps(text))
    return directory


def test_a_teacher_that_does_not_fit_is_refused_in_one_line(
    config: LearnerConfig,
    coordinator: ScriptedCoordinator,
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = with_token(teacher, tmp_path / "other", "another")
    damaged = shutil.copytree(teacher, tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    for directory, line in (
        (other, r"learner\.teacher: expected the tokenizer of .*, in which .* is token .*; found "),
        (tmp_path / "nothing", r"learner\.teacher: there is no directory"),
        (damaged, r"learner\.teacher: .*damaged has no safetensors files"),
    ):
        with pytest.raises(OperatorFault, match=line):
            learn(dataclasses.replace(config, teacher=directory), coordinator)
    assert coordinator.events == []
    path = write_config(tmp_path / "run.toml", config, teacher=str(other))
    assert main(["--config", str(path), "--plan"]) == 2
    assert "learner.teacher: expected the tokenizer" in capsys.readouterr().err


def test_no_row_is_longer_than_the_teacher_can_read(
    config: LearnerConfig,
    coordinator: ScriptedCoordinator,
    teacher: Path,
    tmp_path: Path,
    caplog: Any,
) -> None:
    short = shutil.copytree(teacher, tmp_path / "short")
    facts = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**facts, "max_position_embeddings": 12}))
    for given, teaches, limit in (
        (0, short, 12),
        (99, short, 12),
        (11, short, 11),
        (0, teacher, 0),
    ):
        caplog.clear()
        taught = dataclasses.replace(
            config, teacher=teaches, row_tokens_max=given, out_dir=tmp_path / f"{given}-{limit}"
        )
        learner = Learner(taught, cast("Coordinator", coordinator), BatchPrefetch(), resume=False)
        assert learner._config.row_tokens_max == limit
        said = "row_tokens_max is 12, because learner.teacher reads no more" in caplog.text
        assert said == (limit == 12)


def test_a_teacher_needs_the_groups_whose_rewards_are_all_equal(
    config: LearnerConfig, coordinator: ScriptedCoordinator, teacher: Path
) -> None:
    opened = coordinator.open_session

    def filtering(resume_step: int, **said: object) -> Session:
        return dataclasses.replace(opened(resume_step, **said), filter_zero_variance=True)

    coordinator.open_session = filtering  # type: ignore[method-assign]
    with pytest.raises(OperatorFault, match=r"^policy\.filter_zero_variance: expected false"):
        learn(dataclasses.replace(config, teacher=teacher), coordinator)
    assert coordinator.said("publish") == []


def test_a_token_that_the_teachers_head_lacks_ends_no_run(
    config: LearnerConfig, teacher: Path
) -> None:
    """Heads of one tokenizer may have different numbers of rows for no token, and a worker may send such a token."""
    policy = Policy(dataclasses.replace(config, teacher=teacher), Ranks())
    assert policy._teacher is not None
    last = policy.vocab_size - 1
    policy._teacher.model.config.vocab_size -= 2
    assert policy.vocab_size == last + 1

    def taught(token: int) -> torch.Tensor:
        tokens = np.array([3, 4, token], dtype=np.int32)
        drawn = PackedAnswer(
            1, 0, tokens, tokens == token, np.full(1, -1.0, np.float32), np.zeros(1, np.int64),
            np.float32(1.0), prompt=2,
        )  # fmt: skip
        (part,) = policy.lay_out([[drawn]])
        (logprobs_n,), _ = policy._taught(part, lambda _: False)
        assert logprobs_n is not None
        return logprobs_n

    assert torch.equal(taught(last), taught(last - 2))


def test_a_kl_in_the_reward_is_reported_and_moves_the_weights(
    config: LearnerConfig, tmp_path: Path
) -> None:
    found = {}
    for kl_coef in (0.05, 0.5):
        directory = tmp_path / str(kl_coef)
        (directory / "snapshots").mkdir(parents=True)
        changed = dataclasses.replace(
            config,
            objective="rloo",
            lr=3e-3,
            warmup_steps=0,
            kl_coef=kl_coef,
            kl_in="reward",
            kl_estimator="k1",
            snapshot_root=directory / "snapshots",
            out_dir=directory / "out",
        )
        found[kl_coef] = learn(changed, ScriptedCoordinator(directory / "taken"))
    # At first the policy is the base.
    assert [rows[0]["kl_base"] for rows in found.values()] == [0.0, 0.0]
    assert abs(found[0.5][-1]["kl_base"]) < abs(found[0.05][-1]["kl_base"])
    assert all(row["reward_mean"] == 0.5 for rows in found.values() for row in rows)


def test_the_kl_of_an_answer_counts_all_its_written_tokens(
    config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of an answer that is not in the loss. A learner that must stop leaves the step before its end."""
    (batch,) = record(config.model, 1)
    first, *others = batch.groups
    cut = dataclasses.replace(first.trajectories[0], finish="length")
    group = dataclasses.replace(first, trajectories=(cut, *first.trajectories[1:]))
    batch = dataclasses.replace(batch, groups=(group, *others))
    policy = Policy(dataclasses.replace(config, kl_coef=0.1, kl_in="reward"), Ranks())
    filtered = dataclasses.replace(RULES, trains_cut=False, staleness_max=-1)
    answers = whole_answers(batch, filtered)
    assert {len(each.logprobs_n) for each in answers} == {len(cut.tokens)}
    names = {(each.group_id, t.sample) for each in batch.groups for t in each.trajectories}
    assert policy.penalties(answers) == dict.fromkeys(names, 0.0)
    score = AnswerScorer.__call__

    def poisonous(scorer: AnswerScorer, micro: MicroBatch) -> TokenScores:
        """The base gives NaN for the answers of the first group."""
        found = score(scorer, micro)
        bad = [group == first.group_id for group, _ in micro.trajectories]
        bad_n = torch.tensor(bad)[torch.from_numpy(micro.answers_n)]
        bad_n &= scorer is policy._base
        return found._replace(logprobs_n=found.logprobs_n.masked_fill(bad_n, float("nan")))

    with monkeypatch.context() as patch:
        patch.setattr(AnswerScorer, "__call__", poisonous)
        with pytest.raises(PoisonedGroupsError, match="the KL to the base is not finite") as poison:
            policy.penalties(answers)
    assert poison.value.groups == [first.group_id]
    with pytest.raises(StepLeftError):
        policy.penalties(answers, lambda *_: True)
