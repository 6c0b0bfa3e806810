"""A learner in a directory of its own: a hardly trained model, its config, batches and metrics."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from echo2d.client import Batch, Coordinator
from echo2d.demo.results import read_rows
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks, whole
from echo2d.learner.train import Learner
from tests.support.model_shapes import answers
from tests.support.scripted_coordinator import make_batch


def make_base(directory: Path, *, layers: int = 1) -> Path:
    """Make a tiny model.

    Torch gets one thread: a fork does not inherit the others, and would wait for them.
    """
    torch.set_num_threads(1)
    return make_tiny_model(directory, TinyRecipe(accuracy_stop=0.0, batch=8, layers=layers))


def throwing_dice(base: Path, directory: Path) -> Path:
    """A copy of the model with dropout, so that the state of the random number generators matters."""
    model = Path(shutil.copytree(base, directory))
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**facts, "attention_dropout": 0.2}))
    return model


def config_in(directory: Path, model: Path, **changes: Any) -> LearnerConfig:
    settings: dict[str, Any] = {"steps": 4, "lr": 1e-3, "threads": 1, **changes}
    return LearnerConfig(
        url="http://127.0.0.1:1",
        token_file=directory / "token",
        model=model,
        snapshot_root=directory / "snapshots",
        out_dir=directory / "out",
        **settings,
    )


def gradient_of(config: LearnerConfig, ranks: Ranks, **changes: Any) -> Tensor:
    """The gradient of one batch of `answers`, of all weights in a row. changes: of the config."""
    made = Policy(dataclasses.replace(config, correction="none", **changes), ranks)
    (part,) = made.lay_out([answers(made.vocab_size)])
    made._gradient(part, 2, {})
    slopes = [whole(weight.grad) for weight in made.model.parameters() if weight.grad is not None]
    return torch.cat([slope.flatten() for slope in slopes])


def write_config(path: Path, config: LearnerConfig, **changes: object) -> Path:
    table = {**dataclasses.asdict(config), **changes}
    lines = [
        f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}"
        for name, value in table.items()
        if value is not None
    ]
    path.write_text("\n".join(["[learner]", *lines, "[policy]", "staleness_max = 2"]))
    return path


def learn(
    config: LearnerConfig,
    coordinator: object,
    *,
    resume: bool = False,
    prefetch: BatchPrefetch | None = None,
) -> list[dict[str, Any]]:
    """Run a learner against a stand-in for the coordinator. Returns the rows of metrics.jsonl."""
    Learner(
        config, cast("Coordinator", coordinator), prefetch or BatchPrefetch(), resume=resume
    ).run()
    return rows_of(config)


def rows_of(config: LearnerConfig) -> list[dict[str, Any]]:
    return read_rows(config.out_dir / "metrics.jsonl")


def record(base: Path, steps: int) -> list[Batch]:
    """The batches of all steps. Each names the version that its step trains, though the base wrote all of them."""
    model = load_model(base)
    return [make_batch(model, step, step - 1) for step in range(1, steps + 1)]
