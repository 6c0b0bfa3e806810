"""Checkpoints: what a learner needs to go on after any crash, one directory per step.

<directory>/step-00000010/state.pt
"""

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from echo2d.client import OperatorFault
from learner.files import whole_directory

STATE = "state.pt"


def save(directory: Path, step: int, state: dict[str, Any], *, keep: int) -> None:
    """Durable when this returns; only the newest `keep` stay."""
    with whole_directory(directory / f"step-{step:08d}") as aside:
        torch.save(state, aside / STATE)
    for old in _all(directory)[:-keep]:
        shutil.rmtree(old)


def exists(directory: Path) -> bool:
    return bool(_all(directory))


def load_newest(directory: Path) -> dict[str, Any] | None:
    """The newest checkpoint's state on the CPU, None where there is none. OperatorFault: it cannot be read."""
    for path in reversed(_all(directory)):
        try:
            state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise OperatorFault(f"cannot read the checkpoint {path}: {error}") from error
        return state
    return None


def _all(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*"))
