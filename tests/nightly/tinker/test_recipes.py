"""The public recipes, unmodified, with a coordinator, a learner and a worker that run as users start them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.one_machine import CACHE
from examples.smollm2 import model_directory
from tests.support.tinker_recipes import RecipeRun, make_shadow, recipe_model, run_recipe
from tests.support.tinker_run import TinkerRun, tinker_run

RECIPE_S = 600.0
CHAT = "renderer_name=role_colon"
# A random model, to show that recipes run to their end.
RECIPES = {
    "sl_loop": ("batch_size=32", "save_every=2"),
    "sl_basic": (),
    "chat_sl.train": (CHAT, "batch_size=32", "max_length=256", "eval_every=2", "save_every=2"),
    "preference.dpo.train": (CHAT, "batch_size=8", "max_length=256", "max_steps=3"),
    "rl_loop": (
        "batch_size=16", "group_size=4", "max_tokens=12", "save_every=4", "loss_fn=importance_sampling",
    ),
    "rl_basic": ("max_tokens=8", "max_steps=1"),
    "math_rl.train": (
        CHAT, "env=arithmetic", "group_size=4", "groups_per_batch=4", "max_tokens=8", "max_steps=3",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerRun]:
    folder = tmp_path_factory.mktemp("tiny")
    yield from started(folder, recipe_model(folder / "model"))


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerRun]:
    yield from started(tmp_path_factory.mktemp("smol"), model_directory(CACHE))


def started(folder: Path, model: Path) -> Iterator[TinkerRun]:
    make_shadow(folder / "hub", model)
    with tinker_run(folder / "served", model) as run:
        yield run


def ran(run: TinkerRun, recipe: str, *arguments: str) -> RecipeRun:
    hub = run.folder.parent / "hub"
    return run_recipe(recipe, arguments, run.url, run.key(), hub, RECIPE_S)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(tiny: TinkerRun, recipe: str) -> None:
    found = ran(tiny, recipe, *RECIPES[recipe])
    assert found.metrics
    assert "tinker://" in (found.log_path / "checkpoints.jsonl").read_text()


def test_the_default_loss_of_rl_loop_runs(tiny: TinkerRun) -> None:
    assert ran(tiny, "rl_loop", "batch_size=16", "group_size=4", "max_tokens=12").metrics


def test_supervised_training_learns(smol: TinkerRun) -> None:
    found = ran(smol, "sl_loop", "batch_size=16", "learning_rate=0.001", "save_every=0")
    losses = [row["train_mean_nll"] for row in found.metrics]
    assert losses[-1] < 0.2 * losses[0], losses


def test_reinforcement_learning_learns_and_both_sides_agree(smol: TinkerRun) -> None:
    found = ran(
        smol, "math_rl.train", CHAT, "env=arithmetic", "group_size=8", "groups_per_batch=8", "max_tokens=6",
        "max_steps=16", "learning_rate=0.0003",
    )  # fmt: skip
    steps = [row for row in found.metrics if "env/all/reward/total" in row]
    rewards = [row["env/all/reward/total"] for row in steps]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4, rewards
    # log p of sampler and trainer, for the same tokens.
    differences = [abs(row["optim/kl_sample_train_v1"]) for row in steps]
    assert max(differences) < 1e-3, differences


def test_importance_sampling_trains_too(smol: TinkerRun) -> None:
    """A random model earns no reward, so rl_loop does not train it."""
    found = ran(
        smol, "math_rl.train", CHAT, "env=arithmetic", "group_size=8", "groups_per_batch=8", "max_tokens=6",
        "max_steps=3", "loss_fn=importance_sampling",
    )  # fmt: skip
    assert max(row.get("grad_norm", 0.0) for row in found.metrics) > 0
