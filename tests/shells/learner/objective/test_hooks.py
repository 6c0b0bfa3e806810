"""A user's own advantages and losses, from a module beside the run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echo2d.client import OperatorFault
from echo2d.learner.config import Recipe
from echo2d.learner.objective.hooks import advantages_of, loss_of
from echo2d.learner.objective.token_weights import WeightInputs

MODULE = """
import torch
from echo2d.client import whole_batch

@whole_batch
def over_batch(rewards):
    highest = max(rewards_g.max() for rewards_g in rewards)
    return [rewards_g - highest for rewards_g in rewards]

@whole_batch
def no_list(rewards):
    return 1.0

def signs(rewards_g):
    return [1.0 if reward > 0 else -1.0 for reward in rewards_g]

def too_few(rewards_g):
    return [1.0]

def no_numbers(rewards_g):
    return [float("nan")] * len(rewards_g)

def reinforce(inputs):
    return -inputs.advantages_n * inputs.logprobs_n

def a_number(inputs):
    return 1.0

NAME = "nothing to call"
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def inputs() -> WeightInputs:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    return WeightInputs(
        logprobs, logprobs.detach(), torch.tensor([1.0, -0.5]), torch.zeros(2), torch.zeros(2)
    )


def test_a_users_function_gives_the_advantages() -> None:
    own = advantages_of(Recipe(advantages="own_losses:signs"))
    (found,) = own([np.array([0.5, 0.0], dtype=np.float32)])
    assert found.dtype == np.float32
    assert found.tolist() == [1.0, -1.0]


def test_a_marked_function_gets_the_rewards_of_all_groups() -> None:
    groups = [np.array([1.0, 0.0], dtype=np.float32), np.array([4.0], dtype=np.float32)]
    found = advantages_of(Recipe(advantages="own_losses:over_batch"))(groups)
    assert [each.tolist() for each in found] == [[-3.0, -4.0], [0.0]]
    with pytest.raises(
        OperatorFault, match=r"expected advantages for each of 2 groups; found 1\.0"
    ):
        advantages_of(Recipe(advantages="own_losses:no_list"))(groups)


def test_a_users_function_gives_the_loss_of_each_token() -> None:
    own = loss_of(Recipe(loss="own_losses:reinforce"))
    assert own is not None
    given = inputs()
    found = own(given)
    assert found.tolist() == [1.0, -1.0]
    assert torch.autograd.grad(found.sum(), given.logprobs_n)[0].tolist() == [-1.0, 0.5]
    assert loss_of(Recipe()) is None


@pytest.mark.parametrize(
    ("key", "path", "line"),
    [
        ("advantages", "no_module:f", "learner.advantages: cannot import 'no_module:f'"),
        ("loss", "own_losses:missing", "learner.loss: cannot import 'own_losses:missing'"),
        ("loss", "own_losses", "learner.loss: cannot import 'own_losses'"),
        ("loss", "own_losses:NAME", "learner.loss: 'own_losses:NAME' is not a function"),
    ],
)
def test_a_missing_function_is_the_operators_fault(key: str, path: str, line: str) -> None:
    with pytest.raises(OperatorFault, match=line):
        (advantages_of if key == "advantages" else loss_of)(Recipe(**{key: path}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["too_few", "no_numbers"])
def test_advantages_that_do_not_fit_are_the_operators_fault(name: str) -> None:
    own = advantages_of(Recipe(advantages=f"own_losses:{name}"))
    with pytest.raises(OperatorFault, match="expected 2 finite advantages for 2 rewards"):
        own([np.zeros(2, dtype=np.float32)])


def test_a_loss_that_is_no_tensor_of_tokens_is_the_operators_fault() -> None:
    own = loss_of(Recipe(loss="own_losses:a_number"))
    assert own is not None
    with pytest.raises(OperatorFault, match=r"expected a tensor of shape \(2,\); found float"):
        own(inputs())
