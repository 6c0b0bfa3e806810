"""Logprobs of prompts and of samples, as the official client gets them from a run, against the model itself."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from echo2d.client import Coordinator
from tests.support.paths import REPO, TINKER_ENVIRONMENT
from tests.support.polling import poll
from tests.support.tinker_recipes import BASE_MODEL, recipe_model
from tests.support.tinker_run import TinkerRun, tinker_run

CLIENT_S = 300.0
TRUSTED = """
[audit]
enabled = true
trusted = ["box-0"]
"""
CLOSE = 1e-4
# As in `tests/support/tinker_prompts.py`, which only the client's environment can import.
TOKENS = [5, 61, 7, 300, 7, 42, 5, 61, 9, 11, 250, 3]
TARGETS = {0: [300, 5], 4: [42], 10: [3, 0, 511]}
TOP, LAST = 20, 5

Told = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_model(tmp_path_factory.mktemp("prompts") / "model")


@pytest.fixture(scope="module")
def told(model: Path) -> Told:
    """What the client was told by two samplers."""
    python = TINKER_ENVIRONMENT / "venv" / "bin" / "python"
    with tinker_run(model.parent / "served", model) as run:
        ended = subprocess.run(
            [str(python), "-m", "tests.support.tinker_prompts", run.url, BASE_MODEL],
            cwd=REPO,
            env={"PATH": os.defpath, "HOME": str(model.parent), "TINKER_API_KEY": run.key()},
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: Told = json.loads(ended.stdout)
    return found


class Client:
    """A client that does what it is told (`tests/support/tinker_prompts.py`)."""

    def __init__(self, run: TinkerRun, home: Path) -> None:
        python = TINKER_ENVIRONMENT / "venv" / "bin" / "python"
        self._process = subprocess.Popen(
            [str(python), "-m", "tests.support.tinker_prompts", run.url, BASE_MODEL, "--told"],
            cwd=REPO,
            env={"PATH": os.defpath, "HOME": str(home), "TINKER_API_KEY": run.key()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def test_a_trusted_worker_reads_prompts_while_the_learner_is_busy(model: Path) -> None:
    """The learner stands still amid a call. When the worker is killed with a prompt, the learner reads it."""
    right = logits_of(model, [TOKENS[:-1]])[0].log_softmax(1).numpy()
    with (
        tinker_run(model.parent / "read", model, tables=TRUSTED) as run,
        Client(run, model.parent) as client,
        Coordinator(
            run.url, token_file=run.folder / "coordinator" / "tokens" / "viewer.token"
        ) as coordinator,
    ):

        def session(key: str) -> int:
            (found,) = coordinator.status()["tinker"]["sessions"]
            return int(found[key])

        client.tell("ask")
        check(client.answer(), right)
        learner, worker = run.learner, run.programs["box-0"]
        os.kill(learner.pid, signal.SIGSTOP)
        client.tell("train")
        assert client.answer() is None
        poll(lambda: session("bytes_waiting") > 0)
        client.tell("ask")
        check(client.answer(), right)
        os.kill(worker.pid, signal.SIGSTOP)
        client.tell("ask")
        poll(lambda: session("unscored") == 1)
        worker.kill()
        os.kill(learner.pid, signal.SIGCONT)
        worker.start()
        check(client.answer(), right)
        assert session("unscored") == 0


def check(found: Told, right: NDArray[Any]) -> None:
    """right: the logprobs [t - 1, v]."""
    rows, first = np.arange(len(TOKENS) - 1), len(TOKENS) - LAST
    own = right[rows, TOKENS[1:]]
    for name, start in (("logprobs", 1), ("compute_logprobs", 1), ("last_logprobs", first)):
        assert found[name][:start] == [None] * start
        np.testing.assert_allclose(found[name][start:], own[start - 1 :], atol=CLOSE)
    order = np.argsort(-right, 1)[:, :TOP]
    for name, start in (("top", 1), ("last_top", first)):
        assert found[name][:start] == [None] * start
        tokens, logprobs = np.moveaxis(np.array(found[name][start:]), 2, 0)
        assert (tokens == order[start - 1 :]).all()
        expected = np.take_along_axis(right, order, 1)[start - 1 :]
        np.testing.assert_allclose(logprobs, expected, atol=CLOSE)
    targets = np.zeros((len(rows), 3))
    for row, ids in TARGETS.items():
        targets[row, : len(ids)] = right[row, ids]
    for name in ("targets", "dense_targets"):
        np.testing.assert_allclose(found[name], targets, atol=CLOSE)
    drawn = np.array(found["alternatives"])
    assert drawn.shape == (len(rows), 3)
    expected = np.take_along_axis(right, drawn, 1)
    np.testing.assert_allclose(found["alternative_logprobs"], expected, atol=CLOSE)


def logits_of(model: Path, rows: list[list[int]]) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits: torch.Tensor = base(torch.tensor(rows)).logits
    return logits


def test_what_is_said_of_a_prompt_is_what_the_base_model_computes(told: Told, model: Path) -> None:
    check(told["base"], logits_of(model, [TOKENS[:-1]])[0].log_softmax(1).numpy())


def test_a_trained_model_has_other_logprobs_and_they_are_those_of_its_trainer(told: Told) -> None:
    base, trained = told["base"], told["trained"]
    assert np.abs(np.subtract(base["logprobs"][1:], trained["logprobs"][1:])).max() > 0.1
    logprobs = np.array([[logprob for _, logprob in row] for row in trained["top"][1:]])
    np.testing.assert_allclose(logprobs, trained["trainer"], atol=CLOSE)
    np.testing.assert_allclose(trained["compute_logprobs"][1:], trained["logprobs"][1:], atol=CLOSE)


@pytest.mark.parametrize(("name", "temperature"), [("drawn", 0.5), ("greedy", 1.0)])
def test_the_top_tokens_of_samples_are_those_of_the_base_model_at_the_temperature(
    told: Told, model: Path, name: str, temperature: float
) -> None:
    drawn = told["base"][name]
    rows = [TOKENS + tokens[:-1] for tokens in drawn["tokens"]]
    right = (logits_of(model, rows)[:, len(TOKENS) - 1 :] / temperature).log_softmax(2)
    tokens, logprobs = np.moveaxis(np.array(drawn["top"]), 3, 0)
    assert tokens.shape == (3, 6, TOP)
    expected = right.topk(TOP)
    assert (tokens == expected.indices.numpy()).all()
    np.testing.assert_allclose(logprobs, expected.values, atol=CLOSE)
    own = right.gather(2, torch.tensor(drawn["tokens"])[:, :, None])[:, :, 0]
    np.testing.assert_allclose(drawn["logprobs"], own, atol=CLOSE)
    if name == "greedy":
        assert (tokens[:, :, 0] == drawn["tokens"]).all()


def test_the_top_tokens_of_a_trained_model_agree_with_the_logprobs_of_its_samples(
    told: Told,
) -> None:
    drawn, found = told["trained"]["drawn"], 0
    for tokens, logprobs, tops in zip(
        drawn["tokens"], drawn["logprobs"], drawn["top"], strict=True
    ):
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            if token in (likely := dict(top)):
                assert likely[token] == pytest.approx(logprob, abs=CLOSE)
                found += 1
    assert found >= 6
    np.testing.assert_allclose(drawn["prompt"][1:], told["trained"]["logprobs"][1:], atol=CLOSE)
