"""The public recipes, unmodified, with a coordinator, a learner and a worker that run as users start them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.one_machine import CACHE
from examples.smollm2 import model_directory
from tests.support.tinker_recipes import (
    BASE_MODEL,
    RecipeRun,
    make_shadow,
    recipe_model,
    run_recipe,
)
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
DISTILLATION = (
    CHAT, f"teacher_model={BASE_MODEL}", "group_size=4", "groups_per_batch=4", "max_tokens=12", "lora_rank=32",
    "learning_rate=0.01", "max_steps=3", "save_every=2",
)  # fmt: skip
# Documents of two pages of 60 characters, instead of 32 of 10,000.
NUMERICS = (
    "renderer_name=qwen3_instruct", "task.page_chars=60", "task.num_pages_min=2", "task.num_pages_max=2",
    "learning_rate=0.001", "max_steps=2", "save_every=1",
)  # fmt: skip
NUMERICS_SIZES = {
    "tiny": ("group_size=4", "groups_per_batch=4", "max_tokens=64"),
    "smol": ("group_size=2", "groups_per_batch=2", "max_tokens=32"),
}
# On average over the tokens, between sampler and trainer, in nats.
DIFFERENCE_MAX = 1e-3
SQUARES = "optim/kl_sample_train_v2"  # half of the squared differences


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


def differences(found: RecipeRun, name: str = "optim/kl_sample_train_v1") -> list[float]:
    """Of each step: of the logprobs of sampler and trainer, or of others, for the same tokens, in nats."""
    return [abs(row[name]) for row in found.metrics if name in row]


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
    assert max(differences(found)) < DIFFERENCE_MAX


@pytest.mark.parametrize("model", NUMERICS_SIZES)
def test_the_numerics_check_runs_and_both_sides_agree(
    request: pytest.FixtureRequest, model: str
) -> None:
    run = request.getfixturevalue(model)
    found = ran(run, "rl_numerics_check.train", *NUMERICS, *NUMERICS_SIZES[model])
    assert len(differences(found)) == 2
    assert max(differences(found)) <= DIFFERENCE_MAX
    assert max(differences(found, SQUARES)) <= DIFFERENCE_MAX**2


def test_a_student_begins_as_its_teacher_and_leaves_it(tiny: TinkerRun) -> None:
    """The teacher is the base model."""
    found = ran(tiny, "distillation.on_policy_distillation", *DISTILLATION)
    assert "tinker://" in (found.log_path / "checkpoints.jsonl").read_text()
    assert differences(found, "teacher_kl")[0] < DIFFERENCE_MAX
    first, *others = (row["grad_norm"] for row in found.metrics if "teacher_kl" in row)
    assert first < DIFFERENCE_MAX < min(others)
    assert max(differences(found)) <= DIFFERENCE_MAX  # also with trained weights


def test_importance_sampling_trains_too(smol: TinkerRun) -> None:
    """A random model earns no reward, so rl_loop does not train it."""
    found = ran(
        smol, "math_rl.train", CHAT, "env=arithmetic", "group_size=8", "groups_per_batch=8", "max_tokens=6",
        "max_steps=3", "loss_fn=importance_sampling",
    )  # fmt: skip
    assert max(row.get("grad_norm", 0.0) for row in found.metrics) > 0
