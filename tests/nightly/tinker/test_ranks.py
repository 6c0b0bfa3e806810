"""A learner of two ranks trains as one of one rank does, with the official client and programs as users start them."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.polling import poll
from tests.support.processes import children
from tests.support.tinker_kills import difference, final_checkpoint, steps_of
from tests.support.tinker_recipes import Recipe, make_shadow, recipe_model
from tests.support.tinker_run import TinkerRun, tinker_run

RECIPE_S = 600.0
LORA_SEED = 52
STEPS, BATCH = 40, 16
SL_LOOP = (f"batch_size={BATCH}", f"max_steps={STEPS}", "save_every=10")
SHAPES = {"adapter": (), "full": ("lora_rank=0", "learning_rate=0.0003")}
# Ranks add float32 numbers in another order.
WEIGHT_ERROR_MAX, LOSS_ERROR_MAX = 1e-5, 1e-5
RL_LOOP = (
    "batch_size=16", "group_size=4", "max_tokens=12", "save_every=4", "loss_fn=importance_sampling",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = recipe_model(folder / "model")
    make_shadow(folder / "hub", made, train_rows=STEPS * BATCH)
    return made


def kill_second_rank(run: TinkerRun, recipe: Recipe) -> None:
    """Kill (-9) rank 1 amid the recipe, and start the learner again once all of it has ended."""
    poll(lambda: len(recipe.rows()) >= STEPS // 8)
    (rank,) = (
        pid
        for pid in children(run.learner.pid)
        if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )
    os.kill(rank, signal.SIGKILL)
    poll(lambda: run.learner.returncode is not None)
    assert run.learner.returncode == 1
    assert not recipe.ended
    run.learner.start()


@pytest.mark.parametrize("shape", SHAPES)
def test_supervised_training_by_two_ranks_is_that_of_one_although_one_is_killed(
    tmp_path: Path, model: Path, shape: str
) -> None:
    losses, checkpoints = [], []
    for ranks in (1, 2):
        with tinker_run(tmp_path / f"of-{ranks}", model, ranks=ranks) as run:
            arguments = (*SL_LOOP, *SHAPES[shape])
            recipe = Recipe(
                "sl_loop", arguments, run.url, run.key(), model.parent / "hub", LORA_SEED
            )
            if ranks > 1:
                kill_second_rank(run, recipe)
            found = recipe.wait(RECIPE_S)
            losses.append([row["train_mean_nll"] for row in found.metrics])
            checkpoints.append(final_checkpoint(run))
            run.programs.check()
    assert losses[1] == pytest.approx(losses[0], abs=LOSS_ERROR_MAX)
    assert len(losses[0]) == steps_of(checkpoints[0]) == steps_of(checkpoints[1]) == STEPS
    assert difference(*checkpoints) < WEIGHT_ERROR_MAX


def test_two_ranks_serve_a_recipe_that_samples(tmp_path: Path, model: Path) -> None:
    with tinker_run(tmp_path, model, ranks=2) as run:
        hub = model.parent / "hub"
        recipe = Recipe("rl_loop", RL_LOOP, run.url, run.key(), hub)
        assert recipe.wait(RECIPE_S).metrics
