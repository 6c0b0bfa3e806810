"""A learner on recorded batches: the stand-in for its coordinator, and the program of a rank that torchrun starts.

    torchrun --nproc-per-node 2 --module tests.support.recorded_learner DIRECTORY ARGUMENTS...

DIRECTORY/batches.pickle holds the batches. If there is a file DIRECTORY/signal with "STEP RANK
NUMBER", that rank gets that signal when that step is committed. If there is a file
DIRECTORY/signal-within with "STEP SHARE RANK NUMBER", that rank gets it after this share of the step's
micro-batches.
"""

import dataclasses
import json
import os
import pickle
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import echo2d.learner.__main__ as program
from echo2d.client import (
    Batch,
    NotResumable,
    Published,
    Session,
    StepFigures,
    TrajectoryScore,
)
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS


class Recording:
    """A stand-in for `Coordinator`. Its state is the file said.jsonl in this directory, which survives a kill.

    It keeps published versions in `taken`.
    """

    run_id = "run"

    def __init__(self, directory: Path, batches: list[Batch], *, publish_every: int = 2) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._said = directory / "said.jsonl"
        self._batches = batches
        self._publish_every = publish_every

    def lines(self) -> list[list[Any]]:
        if not self._said.exists():
            return []
        return [json.loads(line) for line in self._said.read_text().splitlines()]

    def _say(self, *facts: Any) -> None:
        with self._said.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def open_session(self, resume_step: int, **_: object) -> Session:
        durable = max((line[1] for line in self.lines() if line[0] == "checkpoint"), default=0)
        if resume_step < durable:
            raise NotResumable(f"batches up to step {durable} are deleted")
        self._epoch = 1 + sum(line[0] == "session" for line in self.lines())
        self._say("session", resume_step)
        return Session(self._epoch, self.run_id, 2, 1, GROUPS * GROUP_SIZE, GROUP_SIZE, GROUP_SIZE)

    def publish(self, version: int, directory: Path, manifest: bytes | None = None) -> Published:
        shutil.copytree(directory, self._directory / "taken" / str(version), dirs_exist_ok=True)
        return Published(version, "00")

    def take_batch(self, step: int) -> Batch:
        return dataclasses.replace(self._batches[step - 1], epoch=self._epoch)

    def commit(
        self,
        batch: Batch,
        *,
        t_train_s: float,
        scores: Sequence[TrajectoryScore] = (),
        figures: StepFigures | None = None,
    ) -> int:
        self._say("commit", batch.step, batch.digest)
        self._say("scores", batch.step, sorted(map(dataclasses.astuple, scores)))
        strike = self._directory / "signal"
        if strike.exists():
            step, rank, number = map(int, strike.read_text().split())
            if batch.step == step:
                os.kill(int((self._directory / f"pid-{rank}").read_text()), number)
        return self._publish_every

    def checkpoint(self, step: int) -> None:
        self._say("checkpoint", step)

    def hurry(self) -> None:
        """Do nothing: it never waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *facts: object) -> None:
        """Do nothing: it has nothing to close."""


def signal_within_a_step(step: float, share: float, rank: float, number: float) -> None:
    """Signal this process after a share of the micro-batches of a step, if it is this rank."""
    from echo2d.learner.model.policy import Policy

    train_step, accumulate = Policy.train_step, Policy._accumulate
    left: list[int] = []  # micro-batches of that step until the signal

    def watched_step(policy: Policy, now: int, parts: Any, *rest: Any, **more: Any) -> Any:
        if now == step and os.environ["RANK"] == str(int(rank)):
            left.append(round(share * sum(len(part.micro) for part in parts)))
        return train_step(policy, now, parts, *rest, **more)

    def watched_micro_batch(policy: Policy, *rest: Any) -> Any:
        found = accumulate(policy, *rest)
        if left:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), int(number))
        return found

    Policy.train_step = watched_step  # type: ignore[assignment]
    Policy._accumulate = watched_micro_batch  # type: ignore[assignment, method-assign]


def main(directory: Path, arguments: list[str]) -> int:
    (directory / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    batches = pickle.loads((directory / "batches.pickle").read_bytes())

    if (strike := directory / "signal-within").exists():
        signal_within_a_step(*map(float, strike.read_text().split()))

    def source(url: str, **_: Any) -> Recording:
        assert os.environ["RANK"] == "0", "rank 0 alone speaks to the coordinator"
        return Recording(directory, batches)

    with patch.object(program, "Coordinator", source):
        return program.main(arguments)


if __name__ == "__main__":
    # End as the learner does, before Python's shutdown: a gloo thread that frees a tensor during the
    # shutdown aborts the process.
    program.end_with(main(Path(sys.argv[1]), sys.argv[2:]))
