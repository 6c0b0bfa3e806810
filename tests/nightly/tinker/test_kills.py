"""`kill -9` of the coordinator, the learner and the worker while a recipe of the cookbook runs, unmodified.

The client knows nothing of it: the recipe ends well, and no call of it was lost or applied twice. Each program is
started again at once, with the same command, as a service manager does it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.free_port import free_port
from tests.support.tinker_kills import (
    Victim,
    difference,
    final_checkpoint,
    kill_amid,
    steps_of,
)
from tests.support.tinker_recipes import Recipe, RecipeRun, make_shadow, recipe_model
from tests.support.tinker_run import TinkerRun, tinker_run

RECIPE_S = 600.0
LORA_SEED = 52
# There are three to four steps for each kill, so these are enough for all kills.
SL_STEPS, SL_BATCH = 220, 64
SL_LOOP = (f"batch_size={SL_BATCH}", f"max_steps={SL_STEPS}", "save_every=5")
SL_KILLS: dict[Victim, int] = {"coordinator": 16, "learner": 16}
FULL_STEPS = SL_STEPS // 2
FULL = (
    "lora_rank=0", "learning_rate=0.0003", f"batch_size={SL_BATCH}", f"max_steps={FULL_STEPS}", "save_every=5",
)  # fmt: skip
NO_KILLS: dict[Victim, int] = {}
FULL_KILLS: dict[Victim, int] = {"coordinator": 8, "learner": 8}
RL_STEPS = 45
MATH_RL = (
    "renderer_name=role_colon", "env=arithmetic", "group_size=8", "groups_per_batch=8", "max_tokens=8",
    f"max_steps={RL_STEPS}", "save_every=4",
)  # fmt: skip
RL_KILLS: dict[Victim, int] = {"coordinator": 6, "learner": 6, "worker": 6}
WORKER_KILLS: dict[Victim, int] = {"worker": 6}
# Two runs without a kill end with the same bits. If step 70 gets its gradient twice, a weight differs by 1.3e-4 at the
# end; if it gets one row of it twice, by 1.7e-5.
WEIGHT_ERROR_MAX, LOSS_ERROR_MAX = 1e-7, 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = recipe_model(folder / "model")
    make_shadow(folder / "hub", made, train_rows=SL_STEPS * SL_BATCH)
    return made


@contextmanager
def served(folder: Path, model: Path) -> Iterator[TinkerRun]:
    with tinker_run(folder / "served", model, port=free_port()) as run:
        yield run


def recipe_of(run: TinkerRun, model: Path, module: str, *arguments: str) -> Recipe:
    return Recipe(module, arguments, run.url, run.key(), model.parent / "hub", LORA_SEED)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecipeRun]:
    """The final checkpoint of sl_loop without a kill, and what the recipe left."""
    with served(tmp_path_factory.mktemp("undisturbed"), model) as run:
        found = recipe_of(run, model, "sl_loop", *SL_LOOP).wait(RECIPE_S)
        return final_checkpoint(run), found


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    rng_seed = request.config.getoption("--rng-seed")
    rng_seed = random.randrange(1 << 32) if rng_seed is None else rng_seed
    print(f"rng_seed={rng_seed}")  # noqa: T201 - shown when it fails
    return random.Random(rng_seed)


def test_supervised_training_ends_with_the_same_weights_after_32_kills(
    tmp_path: Path, model: Path, undisturbed: tuple[Path, RecipeRun], rng: random.Random
) -> None:
    checkpoint, alone = undisturbed
    with served(tmp_path, model) as run:
        recipe = recipe_of(run, model, "sl_loop", *SL_LOOP)
        kill_amid(run, recipe, SL_KILLS, rng)
        found = recipe.wait(RECIPE_S)
        after = final_checkpoint(run)
        run.programs.check()
    check_same(found, alone, SL_STEPS)
    assert steps_of(after) == steps_of(checkpoint) == SL_STEPS
    assert difference(after, checkpoint) < WEIGHT_ERROR_MAX


def check_same(found: RecipeRun, alone: RecipeRun, steps: int) -> None:
    losses, expected = (
        [(row["step"], row["train_mean_nll"]) for row in each.metrics] for each in (found, alone)
    )
    assert [step for step, _ in losses] == list(range(steps))
    assert [loss for _, loss in losses] == pytest.approx(
        [loss for _, loss in expected], abs=LOSS_ERROR_MAX
    )


def test_full_weights_are_the_same_after_16_kills(
    tmp_path: Path, model: Path, rng: random.Random
) -> None:
    """Not every step has a state, so the learner computes several steps again."""
    made: list[tuple[Path, RecipeRun]] = []
    for name, kills in (("alone", NO_KILLS), ("killed", FULL_KILLS)):
        (tmp_path / name).mkdir()
        with served(tmp_path / name, model) as run:
            recipe = recipe_of(run, model, "sl_loop", *FULL)
            kill_amid(run, recipe, kills, rng)
            found = recipe.wait(RECIPE_S)
            made.append((final_checkpoint(run), found))
            run.programs.check()
    (checkpoint, alone), (after, found) = made
    check_same(found, alone, FULL_STEPS)
    assert steps_of(after) == steps_of(checkpoint) == FULL_STEPS
    assert difference(after, checkpoint) < WEIGHT_ERROR_MAX


@pytest.mark.parametrize("kills", [RL_KILLS, WORKER_KILLS], ids=["all", "worker"])
def test_reinforcement_learning_makes_each_step_once(
    tmp_path: Path, model: Path, rng: random.Random, kills: dict[Victim, int]
) -> None:
    with served(tmp_path, model) as run:
        recipe = recipe_of(run, model, "math_rl.train", *MATH_RL)
        kill_amid(run, recipe, kills, rng)
        found = recipe.wait(RECIPE_S)
        after = final_checkpoint(run)
        run.programs.check()
    steps = [row["step"] for row in found.metrics if "env/all/reward/total" in row]
    assert steps == list(range(RL_STEPS))
    assert steps_of(after) == RL_STEPS
