"""All generators of a learner: the same draws after a restore, through a checkpoint file and back."""

import random
from pathlib import Path

import numpy as np
import torch

from echo2d.learner.model import rng_state


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        np.random.normal(),
        float(torch.rand(1)),
    ]


def test_what_is_restored_draws_the_same_again(tmp_path: Path) -> None:
    rng_state.seed(7)
    first = draws()
    torch.save(rng_state.state(), tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    second = draws()
    rng_state.restore(kept)
    assert draws() == second
    rng_state.seed(7)
    assert draws() == first
