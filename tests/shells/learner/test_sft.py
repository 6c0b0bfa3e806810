"""Supervised fine-tuning: rows become batches, and the learner trains their answers."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from echo2d.cli import main as cli
from echo2d.client import Batch, Coordinator, OperatorFault
from echo2d.demo.results import read_rows
from echo2d.learner.__main__ import main
from echo2d.learner.batch.checks import BatchRules
from echo2d.learner.batch.packing import MicroBatch, answers_of
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.logprobs import TokenScores
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks, whole
from echo2d.learner.sft import SftConfig, SftSource
from echo2d.learner.sft_train import SftLearner
from tests.support.forked_ranks import outcomes_of
from tests.support.model_shapes import SMALL
from tests.support.polling import START_S
from tests.support.texts import DROPS, write_chat_model

ROWS = 10
CONFIG = """
[run]
base_model = "model"

[task]
kind = "rows"

[task.options]
files = "rows.jsonl"
prompt = "{question} Be brief."
answer = "solution"
answer_after = "####"
scorer = "own_judge:score"
held_out = 0.2

[learner]
steps = 500
lr = 1e-6
threads = 1
device = "cpu"
warmup_steps = 0
optimizer_steps = 4
kl_coef = 0.1
checkpoint_every = 2

[sft]
lr = 1e-2
rows_per_step = 4
heldout_every = 3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that reads bytes, and the tokens of Qwen's chat format."""
    directory = write_chat_model(tmp_path_factory.mktemp("chat") / "model")
    torch.manual_seed(0)
    shape = {**SMALL, "vocab_size": 272, "max_position_embeddings": 256, "initializer_range": 0.2}
    made = AutoModelForCausalLM.from_config(Qwen3Config(**shape, eos_token_id=259))
    made.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 259, "top_k": 7}')
    return directory


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """The config of a run on ten sums with solutions."""
    (tmp_path / "model").symlink_to(model)
    write_rows(
        tmp_path,
        [{"question": f"{n} + 1?", "solution": f"one more #### {n + 1}"} for n in range(ROWS)],
    )
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    torch.set_num_threads(1)
    return path


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def source_of(run: Path, *settings: str) -> SftSource:
    return SftSource(SftConfig.load(run, settings))


def train(
    run: Path, *settings: str, resume: bool = False, ranks: Ranks | None = None, stop_after: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The rows of metrics.jsonl, and the trained weights. stop_after: is told to stop at this step."""
    source, prefetch = source_of(run, *settings), BatchPrefetch()
    leads = ranks is None or ranks.leads
    take = source.take_batch

    def taken(step: int) -> Batch:
        if step == stop_after + 1 and stop_after:
            prefetch.stop()
        return take(step)

    source.take_batch = taken  # type: ignore[method-assign]
    learner = SftLearner(
        source.config,
        cast("Coordinator", source if leads else None),
        prefetch,
        resume=resume,
        ranks=ranks,
    )
    learner.run()
    weights = {
        name: whole(each).detach().clone() for name, each in learner._policy.weights().items()
    }
    return read_rows(source.config.out_dir / "metrics.jsonl"), weights


def texts_of(run: Path, batch: Batch) -> list[tuple[str, str]]:
    """The prompt and the output of each row."""
    reads = AutoTokenizer.from_pretrained(run.parent / "model")
    return [
        (reads.decode(each.prompt), reads.decode(each.trajectories[0].tokens))
        for each in batch.groups
    ]


def test_rows_are_batches_of_whole_solutions_in_another_order_each_epoch(run: Path) -> None:
    source = source_of(run)
    count, seen = len(source._rows), list[str]()
    for step in range(1, count + 1):
        batch = source.take_batch(step)
        assert (
            source_of(run).take_batch(step).groups[0].trajectories[0].row
            == batch.groups[0].trajectories[0].row
        )
        seen += [each.trajectories[0].row for each in batch.groups]
    assert count < ROWS
    assert len(set(seen[:count])) == len(set(seen[count : 2 * count])) == count
    assert seen[:count] != seen[count : 2 * count]
    held_out = source.held_out
    assert held_out is not None
    rows = {each.trajectories[0].row for each in held_out.groups}
    assert len(rows) == ROWS - count
    assert not rows & set(seen)
    prompt, output = texts_of(run, held_out)[0]
    assert prompt.endswith(" + 1? Be brief.<|im_end|>\n<|im_start|>assistant\n")
    # Not only what comes after ####, which is all that a scorer expects.
    assert output.startswith("one more #### ")
    assert output.endswith("<|im_end|>")


def with_evals(run: Path, *evals: str) -> None:
    test = [{"question": f"{n} + 1?", "solution": f"### {n + 1}"} for n in (2, 5, 7)]
    (run.parent / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
    run.write_text(run.read_text() + "".join(f"[[eval]]\n{each}\n" for each in evals))


def questions_of(run: Path, batch: Batch | None) -> set[str]:
    assert batch is not None
    return {prompt.rpartition("user\n")[2].split("?")[0] for prompt, _ in texts_of(run, batch)}


def trained_in(run: Path, *settings: str) -> set[str]:
    source = source_of(run, *settings)
    return questions_of(run, source._batch(source._rows, range(len(source._rows)), 1))


TEST_FILE = 'options = { files = "test.jsonl", split = "train" }'


@pytest.mark.parametrize(
    ("evals", "share", "same_as", "left_out"),
    [
        ([TEST_FILE], 0.0, 0.0, {"2 + 1", "5 + 1", "7 + 1"}),
        # The first one is measured, but both ask.
        (["every = 1", TEST_FILE], 0.2, 0.2, {"2 + 1", "5 + 1", "7 + 1"}),
        # Held-out rows count also if only one of them is asked.
        (["rows = 1\noptions = { held_out = 0.6 }"], 0.2, 0.6, set()),
    ],
    ids=["another file", "two evaluations", "a larger share"],
)
def test_rows_that_an_evaluation_of_the_run_asks_are_not_trained(
    run: Path,
    evals: list[str],
    share: float,
    same_as: float,
    left_out: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = trained_in(run, f"task.options.held_out={same_as}") - left_out
    before = trained_in(run, f"task.options.held_out={share}")
    with_evals(run, *evals)
    with caplog.at_level("INFO", "echo2d.learner"):
        trained = trained_in(run, f"task.options.held_out={share}")
    assert trained == expected < before
    left = len(before - trained)
    assert f"left out rows={left}: the run evaluates the model on them" in caplog.text
    # Also if sft trains on other rows.
    own = 'sft.rows={files = "rows.jsonl", held_out = 0.0}'
    assert trained_in(run, f"task.options.held_out={share}", own) <= {
        f"{n} + 1" for n in range(ROWS)
    } - (before - trained)


def test_an_evaluation_on_the_training_side_takes_only_the_rows_that_it_asks(run: Path) -> None:
    with_evals(run, 'rows = 4\noptions = { split = "train" }')
    measured = questions_of(run, source_of(run, "task.options.held_out=0.0").held_out)
    trained = trained_in(run, "task.options.held_out=0.0")
    assert (len(trained), len(measured)) == (ROWS - 4, 4)
    assert not trained & measured
    with pytest.raises(
        OperatorFault, match=r"^rows: each of the 10 rows is asked by an \[\[eval\]\]"
    ):
        source_of(run, "task.options.held_out=0.0", "eval.rows=0")


def test_the_held_out_loss_is_of_the_texts_that_are_trained(run: Path) -> None:
    """Options of an evaluation decide which rows are measured, and those of sft what is read from them."""
    with_evals(run, 'options = { answer_after = "###", files = "test.jsonl", split = "train" }')
    held_out = source_of(run, 'sft.rows.prompt="{question}"').held_out
    assert held_out is not None
    assert {prompt.rpartition("user\n")[2][:8] for prompt, _ in texts_of(run, held_out)} == {
        f"{n} + 1?<|" for n in (2, 5, 7)
    }
    assert all(output.startswith("### ") for _, output in texts_of(run, held_out))


def test_the_config_of_the_run_gives_all_that_sft_does_not(run: Path) -> None:
    config = source_of(run).config
    assert (config.lr, config.threads, config.out_dir) == (1e-2, 1, run.parent / "learner" / "sft")
    assert (config.optimizer_steps, config.kl_coef, config.mean) == (1, 0.0, "token")
    count = len(source_of(run)._rows)
    assert config.steps == math.ceil(count / 4)
    assert source_of(run, "sft.epochs=3").config.steps == math.ceil(3 * count / 4)
    assert source_of(run, "sft.steps=7").config.steps == 7
    assert LearnerConfig.load(run).lr == 1e-6
    taught = (
        "learner.teacher=model",
        "learner.objective=distill",
        "policy.filter_zero_variance=false",
    )
    assert source_of(run, *taught).config.teacher is None, "nothing would use its logprobs"


def gradient(config: LearnerConfig, batch: Batch, ranks: Ranks) -> Tensor:
    made = Policy(config, ranks)
    rules = BatchRules(0, 4, 1, made.vocab_size, 1)
    answers = [each for group in answers_of(batch, rules, advantages_of(config)) for each in group]
    made._gradient(made.lay_out([answers])[0], 0, {})
    return torch.cat(
        [whole(each.grad).flatten() for each in made.model.parameters() if each.grad is not None]
    )


def test_the_gradient_is_that_of_torchs_cross_entropy(run: Path, tmp_path: Path) -> None:
    """Only the assistant's tokens of a conversation count, on one rank and on two."""
    talk = [("user", "a?"), ("assistant", "b b b"), ("user", "c?"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in talk]
    write_rows(tmp_path, [{"chat": messages[:end]} for end in (2, 4, 4, 2)])
    source = source_of(run, 'sft.rows={files = "rows.jsonl", messages = "chat", held_out = 0.0}')
    batch = source.take_batch(1)
    model = AutoModelForCausalLM.from_pretrained(source.config.model, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for group in batch.groups:
        (answer,) = group.trajectories
        tokens = torch.from_numpy(np.concatenate([group.prompt, answer.tokens]).astype(np.int64))
        labels = tokens.clone()
        labels[: len(group.prompt)] = -100
        labels[len(group.prompt) :][torch.from_numpy(~answer.written)] = -100
        logits = model(tokens[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        count += int((labels != -100).sum())
    torch.autograd.backward(total / count)
    expected = torch.cat(
        [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    )
    found = gradient(source.config, batch, Ranks())
    assert (found - expected).norm() / expected.norm() < 1e-6
    reads = {text for _, text in texts_of(run, batch)}
    assert any("c?" in text for text in reads)

    def on_two(rank: int) -> str:
        own = gradient(source.config, batch, Ranks(rank, 2))
        return "same" if (own - expected).norm() / expected.norm() < 1e-6 else "differs"

    assert outcomes_of(on_two, 2, tmp_path) == ["same"] * 2


def test_the_loss_falls_and_a_resume_changes_nothing(run: Path, tmp_path: Path) -> None:
    rows, weights = train(run, "sft.epochs=6")
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}
    steps = len(losses)
    assert losses[-1] < 0.5 * losses[0]
    assert list(held_out) == [0, *range(3, steps, 3), steps]
    assert held_out[steps] < 0.5 * held_out[0]
    assert not {"reward_mean", "kl", "staleness"} & rows[1].keys()

    apart = ["sft.epochs=6", f"sft.out_dir={tmp_path / 'apart'}"]
    stopped, _ = train(run, *apart, stop_after=3)
    assert max(row["step"] for row in stopped) < steps
    with pytest.raises(
        OperatorFault, match=r"is not empty; use --resume or another learner\.out_dir"
    ):
        train(run, *apart)
    resumed, found = train(run, *apart, resume=True)
    assert [row["loss"] for row in resumed if "loss" in row] == losses
    again = {row["step"]: row["heldout_loss"] for row in resumed if "heldout_loss" in row}
    # A learner that resumes measures at its first step too.
    assert {step: again[step] for step in held_out} == held_out
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    with pytest.raises(OperatorFault, match=r"has checkpoints of run sft-\w+; this is run sft-"):
        train(run, *apart, "sft.rows_per_step=5", resume=True)


def test_a_stop_during_the_held_out_loss_saves_the_step_at_once(run: Path) -> None:
    small = ("sft.epochs=3", "learner.micro_batch_tokens=60", "task.options.held_out=0.4")
    source, prefetch = source_of(run, *small), BatchPrefetch()
    learner = SftLearner(source.config, cast("Coordinator", source), prefetch, resume=False)
    policy, measured = learner._policy, list[int]()
    scores = policy._scores

    def scored(micro: MicroBatch) -> TokenScores:
        if not policy.model.training:
            measured.append(learner.step)
            if learner.step == 3:
                prefetch.stop()
        return scores(micro)

    policy._scores = scored  # type: ignore[method-assign]
    learner.run()
    assert 1 == measured.count(3) < measured.count(0)
    out_dir = source.config.out_dir
    rows = read_rows(out_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "heldout_loss" in row] == [0]
    assert [*(out_dir / "checkpoints").glob("step-*3-epoch-*[0-9]")]
    resumed, _ = train(run, *small, resume=True)
    assert [row["step"] for row in resumed if "heldout_loss" in row][:2] == [0, 3]


@pytest.mark.parametrize(
    ("rows", "settings", "line"),
    [
        ([{"question": "a"}], [], "rows: row 0 of rows.jsonl has no 'solution'"),
        ([{"question": "a", "solution": "b"}, {"question": "c", "solution": ""}], [],
         "rows: 1 of 2 rows has no 'solution', e.g. row 1 of rows.jsonl: leave them out"),
        ([{"question": "a", "solution": " "}], [], "rows: row 0 of rows.jsonl: an answer is empty; leave the row out"),
        ([{"question": "a", "solution": "b" * 99}], ["learner.row_tokens_max=99"],
         "learner.row_tokens_max: 1 of 1 rows have more than 99 tokens, e.g. row 0 of rows.jsonl (30 of the"),
        ([{"question": "a" * 99, "solution": "b"}], ["learner.row_tokens_max=99", "learner.too_long=truncate"],
         "learner.row_tokens_max: 1 of 1 rows have more than 99 tokens, e.g. row 0 of rows.jsonl (12"),
        ([{"question": "a", "solution": "b" * 300}], [], "learner.row_tokens_max: 1 of 1 rows have more than 256 "),
        ([{"question": "a", "solution": ["b"]}], [], "rows: row 0 of rows.jsonl: 'solution' holds list ['b']; "),
        ([{"chat": [{"role": "user", "content": "a"}]}],
         ['sft.rows={files = "rows.jsonl", messages = "chat"}'],
         "rows: row 0 of rows.jsonl: chat: the last message is the user's; expected the assistant's"),
        ([{"chat": [{"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b", "reasoning_content": "so"}]}],
         ['sft.rows={files = "rows.jsonl", messages = "chat"}'],
         "rows: row 0 of rows.jsonl: a message has reasoning_content, which would not be trained; write it into"),
        ([{"question": "a", "solution": "b"}], ["task.kind=sort_digits", "task.options={}"],
         "--sft: expected one [task] of kind rows, or sft.rows.files; found sort_digits"),
        ([{"question": "a", "solution": "b"}], ["sft.row_per_step=3"],
         "sft.row_per_step: unknown key; did you mean rows_per_step?"),
        *(
            ([{"question": "a", "solution": "b"}], [f"sft.{name}={value}"],
             f"sft.{name}: expected nothing, because --sft does not use it; found {value}: leave it out")
            for name, value in (("kl_coef", "0.0"), ("optimizer_steps", "4"), ("teacher", "'model'"), ("loss", "'a:b'"),
                                ("snapshot_root", "'here'"), ("advantages", "'a:b'"), ("loss_mean", "'token'"))
        ),
        ([{"question": "a", "solution": "b"}], ["sft.rows={file = 'rows.jsonl'}"],
         "rows: file: unknown option; did you mean files?"),
        ([{"question": "a", "solution": "b"}], ["task.options.answers='solution'"],
         "rows: answers: unknown option; did you mean answer?"),
        ([{"question": "a", "solution": "b"}], ["sft.rows.held_out='0.1'"],
         "rows: held_out: expected a value such as 0.0; found '0.1'"),
        ([{"question": "a", "solution": "b"}], ["sft.rows.files=3"],
         'rows: files: expected a value such as ["rows.jsonl"]; found 3'),
        ([{"question": "a", "solution": "b"}], ["task.options={prompt = 'question'}"],
         "rows: expected at least one file; found none at []"),
        ([{"question": "a", "solution": "b"}], ["sft.epochs=0"],
         "sft.epochs: expected an integer, at least 1; found 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_one_line(
    run: Path,
    rows: list[dict[str, Any]],
    settings: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows(run.parent, rows)
    sets = [f"--set={each}" for each in (*settings, "task.options.held_out=0.0")]
    if settings[1:] and "sort_digits" in settings[0]:
        sets.pop()
    assert main(["--config", str(run), "--sft", *sets]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"learner: {line}")


def test_the_day_that_a_template_shows_is_that_of_the_first_start(run: Path) -> None:
    source = source_of(run, "sft.steps=1")
    source.open_session(0)
    file = source.config.out_dir / "day"
    file.write_text("2024-02-29\n")
    assert source_of(run, "sft.steps=1")._day == "2024-02-29"
    file.write_text("yesterday")
    with pytest.raises(OperatorFault, match="day: expected a day such as 2026-11-28; found"):
        source_of(run, "sft.steps=1")


def test_a_model_of_another_training_is_not_handed_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("--set=sft.steps=1", f"--set=sft.out_dir={run.parent / 'out'}")
    (run.parent / "out" / "model-1").mkdir(parents=True)
    assert main(["--config", str(run), "--sft", *sets]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(
        "/out/model-1 is the model of another training; move it away, or use another sft.out_dir"
    )


def test_two_trainings_on_the_same_rows_are_two_runs_on_a_board(run: Path) -> None:
    source = source_of(run)
    config = dataclasses.replace(source.config, track=("tensorboard",))
    learners = [
        SftLearner(
            config, cast("Coordinator", source), BatchPrefetch(), resume=False, identity=name
        )
        for name in ("host-1-a", "host-2-b")
    ]
    # A board may be made as soon as the learner is.
    names = {each._tracked_run().name for each in learners}
    assert names == {f"{source.run_id}-a", f"{source.run_id}-b"}
    for each in learners:
        each._tracking.close()


def test_a_long_answer_may_be_truncated_and_earlier_answers_be_left_out(
    run: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write_chat_model(tmp_path / "own", DROPS)
    talk = ["a?", "<think>so</think>b", "c?", "d" * 60]
    roles = ("user", "assistant")
    write_rows(
        tmp_path,
        [{"chat": [{"role": roles[n % 2], "content": text} for n, text in enumerate(talk)]}],
    )
    for each in (tmp_path / "model").iterdir():
        if not (tmp_path / "own" / each.name).exists():
            (tmp_path / "own" / each.name).symlink_to(each)
    source = source_of(
        run, "run.base_model=own", 'sft.rows={files = "rows.jsonl", messages = "chat", held_out = 0.0}',
        "learner.row_tokens_max=99", "learner.too_long=truncate",
    )  # fmt: skip
    assert "only the last answer is trained of rows=1, e.g. row 0 of rows.jsonl" in caplog.text
    assert source.fitting(source.config).row_tokens_max == 99
    assert "truncated: 1 of 1 rows have more than 99 tokens" in caplog.text
    assert source.take_batch(1).groups[0].trajectories[0].given == ()


def test_the_program_writes_a_model_with_which_a_run_begins(run: Path) -> None:
    """As a user: from a CSV, without a coordinator."""
    with (run.parent / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["question", "solution"], *([f"{n} + 1?", n + 1] for n in range(ROWS))]
        )
    text = run.read_text().replace("rows.jsonl", "rows.csv").replace("own_judge:score", "exact")
    run.write_text(text.replace('"{question} Be brief."', '"question"'))
    program = [sys.executable, "-m", "echo2d", "learn", "--config=run.toml", "--sft"]
    done = subprocess.run(
        program, cwd=run.parent, capture_output=True, text=True, check=True, timeout=START_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "evaluated step=0 heldout_loss_nats=" in done.stderr
    assert "trained step=3 of=3 loss=" in done.stderr
    line = done.stdout.splitlines()[-1]
    assert line == 'a run begins with it by: run.base_model = "learner/sft/model-3"'
    model = run.parent / "learner" / "sft" / "model-3"
    before, after = (
        AutoModelForCausalLM.from_pretrained(each).state_dict()
        for each in (run.parent / "model", model)
    )
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (model / name).read_bytes() == (run.parent / "model" / name).read_bytes()
    # The run from it: its coordinator's checks, its task's processes, its engine.
    setting = line.partition(": ")[2].replace(" ", "").replace('"', "")
    tried = CliRunner().invoke(
        cli,
        ["try", f"--config={run}", f"--set={setting}", "--set=sampling.max_new_tokens=4", "--json"],
    )
    assert tried.exit_code == 0, tried.output
    answers = [
        each for task in json.loads(tried.stdout)["tasks"] for each in task["prompts"][0]["answers"]
    ]
    assert answers


def test_two_ranks_train_as_one(run: Path, tmp_path: Path) -> None:
    def on_two(rank: int) -> str:
        failed: list[object] = []
        threading.excepthook = failed.append
        apart = f"sft.out_dir={tmp_path / 'two'}"
        rows, weights = train(run, apart, "sft.lr=1e-3", ranks=Ranks(rank, 2))
        torch.save((rows, weights), tmp_path / f"trained-{rank}")
        return str(failed or "trained")

    rows, weights = train(run, "sft.lr=1e-3")
    assert outcomes_of(on_two, 2, tmp_path) == ["trained"] * 2
    found, on_rank = torch.load(tmp_path / "trained-1", weights_only=False)
    for name in ("loss", "heldout_loss"):
        expected = [row[name] for row in rows if name in row]
        assert [row[name] for row in found if name in row] == pytest.approx(expected, rel=1e-5)
    # AdamW's first step moves a weight by lr, in a direction that rounding decides if its gradient is near 0.
    moved = [((on_rank[name] - weights[name]).abs() > 1e-4).float().mean() for name in weights]
    assert max(moved) < 0.02


def test_an_adapter_is_merged_into_the_model_that_a_run_begins_with(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ["--config", str(run), "--sft", "--set=learner.lora_rank=4"]
    assert main(program) == 0
    model = run.parent / "learner" / "sft" / "model-3"
    assert "wrote the merged model of step 3" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(model).state_dict()
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model").state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(merged[name], base[name])
    # The model stays, and is named again.
    written_at = (model / "config.json").stat().st_mtime_ns
    assert main([*program, "--resume"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1].endswith('run.base_model = "learner/sft/model-3"')
    )
    assert (model / "config.json").stat().st_mtime_ns == written_at
    assert main([*program, "--export", "last", str(run.parent / "adapter")]) == 0
    assert (run.parent / "adapter" / "adapter_model.safetensors").exists()
