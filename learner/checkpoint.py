"""Checkpoints: what a learner needs to go on after any crash, one directory per step.

    <directory>/step-00000010-epoch-3/    state.pt    state.blake3: the digest of state.pt

A damaged newest one is said, and the one before it is used. So a step is reported to the coordinator as durable, which
deletes its batches, only when it is the oldest of all that are kept: whichever is used, its next batches are there.
Kept true: at most `keep` stay, and a kill at any moment leaves each of them whole, or not there.
"""

import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from echo2d.client import OperatorFault
from learner.files import ASIDE, remove_directory, store_faults, whole_directory

STATE = "state.pt"
DIGEST = "state.blake3"
_NAME = re.compile(r"step-(\d+)-epoch-(\d+)")
_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)

log = logging.getLogger("echo2d.learner")


class Checkpoints:
    """The checkpoints in one directory; the newest `keep` stay. An epoch saves a step once."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def __bool__(self) -> bool:
        return bool(self._all())

    @property
    def durable(self) -> int:
        """The lowest step that a learner may have to resume at; 0, the base model, until there are `keep`."""
        steps = [_place(path)[0] for path in self._all()]
        return steps[0] if len(steps) >= self._keep else 0

    def save(self, step: int, epoch: int, state: dict[str, Any]) -> None:
        """Durable when this returns. StoreFault: the disk refused; all that was there still is.

        What a learner before saved of this step or later ones is of no use any more.
        """
        target = self._directory / f"step-{step:08d}-epoch-{epoch}"
        with store_faults("cannot write the checkpoint", target):
            self._sweep()
            with whole_directory(target) as aside:
                _write(aside / STATE, state)
                (aside / DIGEST).write_text(_digest(aside / STATE))
        earlier = [path for path in self._all() if _place(path)[0] < step]
        kept = {target, *earlier[max(0, len(earlier) + 1 - self._keep) :]}
        for path in self._all():
            if path not in kept:
                remove_directory(path)

    def load_newest(self) -> dict[str, Any] | None:
        """The state of the newest whole one on the CPU, None where there is none. OperatorFault: none can be read."""
        found = self._all()
        for path in reversed(found):
            try:
                return _load(path)
            except _UNREADABLE as error:
                log.warning("cannot read the checkpoint %s: %s", path, " ".join(str(error).split()))
        if found:
            raise OperatorFault(f"cannot read any checkpoint in {self._directory}")
        return None

    def _all(self) -> list[Path]:
        """Oldest first."""
        return sorted((path for path in self._directory.glob("step-*") if _NAME.fullmatch(path.name)), key=_place)

    def _sweep(self) -> None:
        """What learners left that were killed while they saved."""
        for path in self._directory.glob(f"{ASIDE}*"):
            shutil.rmtree(path, ignore_errors=True)


def _place(path: Path) -> tuple[int, int]:
    """Step and epoch."""
    named = _NAME.fullmatch(path.name)
    assert named is not None
    return int(named[1]), int(named[2])


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's, about what a write that failed has left
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _load(path: Path) -> dict[str, Any]:
    if _digest(path / STATE) != (path / DIGEST).read_text():
        raise ValueError("its bytes are not those that were saved")
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
