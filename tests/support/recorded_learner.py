"""A rank of a learner that torchrun starts: the learner's program, on recorded batches instead of a
coordinator's.

    torchrun --nproc-per-node 2 --module tests.support.recorded_learner DIRECTORY ARGUMENTS...

DIRECTORY/batches.pickle holds the batches. If there is a file DIRECTORY/signal with "STEP RANK
NUMBER", that rank gets that signal when that step is committed.
"""

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import learner.__main__ as program
from echo2d.client import Batch, Published
from tests.support.recording import Recording


class Source(Recording):
    """Keeps what is published, and is a context as a coordinator is."""

    def __init__(self, directory: Path, batches: list[Batch]) -> None:
        super().__init__(directory / "said.jsonl", batches)
        self._directory = directory

    def publish(self, version: int, directory: Path) -> Published:
        shutil.copytree(directory, self._directory / "taken" / str(version), dirs_exist_ok=True)
        return super().publish(version, directory)

    def commit(self, batch: Batch, *, t_train_s: float) -> int:
        super().commit(batch, t_train_s=t_train_s)
        strike = self._directory / "signal"
        if strike.exists():
            step, rank, number = map(int, strike.read_text().split())
            if batch.step == step:
                os.kill(int((self._directory / f"pid-{rank}").read_text()), number)
        return 2

    def hurry(self) -> None:
        """It never waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *facts: object) -> None:
        """It has nothing to close."""


def main(directory: Path, arguments: list[str]) -> int:
    (directory / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    batches = pickle.loads((directory / "batches.pickle").read_bytes())

    def source(url: str, **_: Any) -> Source:
        assert os.environ["RANK"] == "0", "rank 0 alone speaks to the coordinator"
        return Source(directory, batches)

    with patch.object(program, "Coordinator", source):
        return program.main(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
