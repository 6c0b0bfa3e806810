"""A learner of two ranks trains as one of one rank does, with the official client and programs as users start them."""

from pathlib import Path

import pytest

from tests.support.tinker_kills import difference, final_checkpoint, steps_of
from tests.support.tinker_recipes import Recipe, make_shadow, recipe_model
from tests.support.tinker_run import tinker_run

RECIPE_S = 600.0
LORA_SEED = 52
STEPS = 5
SL_LOOP = ("batch_size=32", f"max_steps={STEPS}", "save_every=2")
# Ranks add float32 numbers in another order.
WEIGHT_ERROR_MAX, LOSS_ERROR_MAX = 1e-5, 1e-5
RL_LOOP = (
    "batch_size=16", "group_size=4", "max_tokens=12", "save_every=4", "loss_fn=importance_sampling",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = recipe_model(folder / "model")
    make_shadow(folder / "hub", made)
    return made


def test_supervised_training_by_two_ranks_is_that_of_one(tmp_path: Path, model: Path) -> None:
    losses, checkpoints = [], []
    for ranks in (1, 2):
        with tinker_run(tmp_path / f"of-{ranks}", model, ranks=ranks) as run:
            hub = model.parent / "hub"
            found = Recipe("sl_loop", SL_LOOP, run.url, run.key(), hub, LORA_SEED).wait(RECIPE_S)
            losses.append([row["train_mean_nll"] for row in found.metrics])
            checkpoints.append(final_checkpoint(run))
            run.programs.check()
            run.learner.terminate()
            assert run.learner.wait(60.0) in (0, -15), run.learner.tail()
    assert losses[1] == pytest.approx(losses[0], abs=LOSS_ERROR_MAX)
    assert len(losses[0]) == steps_of(checkpoints[0]) == steps_of(checkpoints[1]) == STEPS
    assert difference(*checkpoints) < WEIGHT_ERROR_MAX


def test_two_ranks_serve_a_recipe_that_samples(tmp_path: Path, model: Path) -> None:
    with tinker_run(tmp_path, model, ranks=2) as run:
        hub = model.parent / "hub"
        recipe = Recipe("rl_loop", RL_LOOP, run.url, run.key(), hub)
        assert recipe.wait(RECIPE_S).metrics
