"""A client trains full weights with the official client, while another one trains and samples an adapter."""

import json
import os
import subprocess
from typing import Any

import numpy as np
import pytest

from tests.support.paths import REPO, TINKER_ENVIRONMENT
from tests.support.tinker_recipes import BASE_MODEL, recipe_model
from tests.support.tinker_run import tinker_run

CLIENT_S = 600.0
CLOSE = 1e-4
# Of the trainer, which computes in float32 here, and of the sampler, whose weights are rounded to bfloat16.
ROUNDED = 5e-3
# As in `tests/support/tinker_samples.py` and `tinker_whole.py`, which only the client's environment can import.
TOKENS_MAX, COUNT, TURNS = 24, 4, 3


@pytest.fixture(scope="module", params=[1, 2])
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """What the clients were told. The learner has this many ranks."""
    folder = tmp_path_factory.mktemp("whole")
    model = recipe_model(folder / "model")
    with tinker_run(folder / "served", model, ranks=request.param) as run:
        ended = subprocess.run(
            [
                str(TINKER_ENVIRONMENT / "venv" / "bin" / "python"),
                *("-m", "tests.support.tinker_whole", run.url, BASE_MODEL, *run.keys(2)),
            ],
            cwd=REPO,
            env={"PATH": os.defpath, "HOME": str(folder)},
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
        run.programs.check()
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def difference(drawn: list[dict[str, Any]], by: str) -> float:
    """Of the logprobs of sampled tokens, on average, in nats."""
    return float(np.mean([np.abs(np.subtract(each["logprobs"], each[by])) for each in drawn]))


def test_full_weights_train_and_samples_agree_with_the_trainer(told: Any) -> None:
    assert (told["is_lora"], told["rank"]) == (False, None)
    assert told["losses"][-1] < 0.9 * told["losses"][0], told["losses"]
    for name in ("drawn", "again", "final"):
        for each in told[name]:
            np.testing.assert_allclose(each["logprobs"], each["learner"], atol=CLOSE)
    assert difference(told["drawn"], "trainer") < ROUNDED


def test_two_clients_take_turns(told: Any) -> None:
    for name, close in (("whole", ROUNDED), ("adapter", CLOSE)):
        assert len(told[name]) == TURNS
        for drawn in told[name]:
            assert len(drawn) == COUNT
            assert difference(drawn, "trainer") < close
    assert all(len(each["tokens"]) == TOKENS_MAX for each in told["base"])


def test_a_second_model_of_full_weights_is_refused(told: Any) -> None:
    assert "one model of full weights" in told["second"]


def test_a_saved_model_goes_on(told: Any) -> None:
    assert told["resumed"] == pytest.approx(told["next"], abs=1e-5)
