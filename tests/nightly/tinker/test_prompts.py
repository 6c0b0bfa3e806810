"""Logprobs of prompts, as the official client gets them from a run, against the model itself."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.support.paths import REPO, TINKER_ENVIRONMENT
from tests.support.tinker_recipes import BASE_MODEL, recipe_model
from tests.support.tinker_run import tinker_run

CLIENT_S = 300.0
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


def test_what_is_said_of_a_prompt_is_what_the_base_model_computes(told: Told, model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        right = base(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(1).numpy()
    check(told["base"], right)


def test_a_trained_model_has_other_logprobs_and_they_are_those_of_its_trainer(told: Told) -> None:
    base, trained = told["base"], told["trained"]
    assert np.abs(np.subtract(base["logprobs"][1:], trained["logprobs"][1:])).max() > 0.1
    logprobs = np.array([[logprob for _, logprob in row] for row in trained["top"][1:]])
    np.testing.assert_allclose(logprobs, trained["trainer"], atol=CLOSE)
    np.testing.assert_allclose(trained["compute_logprobs"][1:], trained["logprobs"][1:], atol=CLOSE)


def test_top_tokens_of_samples_are_refused_in_one_line(told: Told) -> None:
    assert "topk_sample_logprobs is not served: ask for topk_prompt_logprobs" in told["refusal"]
