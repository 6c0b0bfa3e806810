"""A recipe of the Tinker API while the programs that serve it are killed and started again, and what it leaves."""

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from echo2d.learner.tinker.slots import MOMENTS
from tests.support.polling import poll
from tests.support.tinker_recipes import Recipe
from tests.support.tinker_run import TinkerRun

Victim = Literal["coordinator", "learner", "worker"]
PROGRAMS: Mapping[Victim, str] = {
    "coordinator": "coordinator",
    "learner": "learner",
    "worker": "box-0",
}
# The first kill comes this long after the start of the recipe: it may hit its session or its model.
FIRST_S_MAX = 8.0
# Most kills come this long after a step of the recipe. The others do not wait for a step, and may hit a recovery.
AFTER_STEP_S_MAX = 0.3
BETWEEN_S_MAX = 4.0
WITHOUT_STEP = 0.25  # the share of the others


def kill_amid(
    run: TinkerRun, recipe: Recipe, kills: Mapping[Victim, int], rng: random.Random
) -> None:
    """Kill (-9) the programs in a drawn order, at drawn moments, and start each again at once with the same command."""
    victims = [victim for victim, count in kills.items() for _ in range(count)]
    rng.shuffle(victims)
    for number, victim in enumerate(victims):
        seen = len(recipe.rows())
        if number == 0:
            time.sleep(rng.uniform(0.0, FIRST_S_MAX))
        elif rng.random() < WITHOUT_STEP:
            time.sleep(rng.uniform(0.0, BETWEEN_S_MAX))
        else:
            poll(lambda: len(recipe.rows()) > seen or recipe.ended)  # noqa: B023 - called here
            time.sleep(rng.uniform(0.0, AFTER_STEP_S_MAX))
        assert not recipe.ended, f"it ended before kill {number} of {len(victims)}"
        run.programs.check()
        program = run.programs[PROGRAMS[victim]]
        program.kill()
        program.start()


def final_checkpoint(run: TinkerRun) -> Path:
    """The directory of the newest checkpoint with the optimizer's state."""
    learner = run.folder / "learner"
    return max(
        (path.parent for path in learner.glob("tinker/*/*/optimizer.safetensors")),
        key=lambda path: path.stat().st_mtime_ns,
    )


def steps_of(checkpoint: Path) -> int:
    """How many optimizer steps its weights have had."""
    return int(json.loads((checkpoint / "slot.json").read_bytes())["steps"])


def difference(one: Path, other: Path) -> float:
    """The largest difference of a weight between two checkpoints of one shape."""
    adapter = (one / "adapter_model.safetensors").exists()
    name = "adapter_model.safetensors" if adapter else "optimizer.safetensors"
    weights, others = (load_file(path / name) for path in (one, other))
    assert weights.keys() == others.keys()
    return max(
        float(torch.max(torch.abs(weights[name] - others[name])))
        for name in weights
        if not name.endswith(MOMENTS)
    )
