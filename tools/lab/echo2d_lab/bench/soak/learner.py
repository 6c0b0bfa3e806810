"""The soak's learner: publishes a real model that changes a little each time, and records what it trained on."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from echo2d.client import Batch
from echo2d_lab.standins.fake_learner import FakeLearner

CHANGED = 0.01  # share of the 16-bit words that a version changes
LENGTH_BYTES = 8  # size of the header's length in a safetensors file


@dataclass(slots=True)
class SoakBatches:
    """For each step the outputs of its batch, by their places (group, sample). A step that a resumed
    learner trains again replaces its earlier entry.
    """

    steps: dict[int, dict[tuple[int, int], bytes]] = field(default_factory=dict)

    def take(self, batch: Batch) -> None:
        self.steps[batch.step] = {
            (group.group_id, one.sample): one.tokens.tobytes()
            for group in batch.groups
            for one in group.trajectories
        }

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    def outputs(self) -> dict[tuple[int, int], bytes]:
        """The outputs of all steps."""
        return {place: tokens for step in self.steps.values() for place, tokens in step.items()}

    def repeated(self) -> list[tuple[int, int]]:
        """Places that are in more than one step."""
        found = Counter(place for step in self.steps.values() for place in step)
        return [place for place, times in found.items() if times > 1]


class SoakLearner(FakeLearner):
    """base: the directory of a model in one file. trained: the soak keeps it over several learners."""

    def __init__(
        self,
        url: str,
        token_file: Path,
        snapshot_root: Path,
        base: Path,
        trained: SoakBatches,
        *,
        t_train_s: float,
        resume_step: int,
    ) -> None:
        super().__init__(
            url, token_file, snapshot_root, t_train_s=t_train_s, resume_step=resume_step
        )
        self._base, self._trained = base, trained

    def snapshot(self, folder: Path, version: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._base.iterdir():
            data = bytearray(file.read_bytes())
            if file.suffix == ".safetensors":
                _change(data, version)
            (folder / file.name).write_bytes(data)
        return folder

    def took(self, batch: Batch) -> None:
        self._trained.take(batch)


def _change(data: bytearray, version: int) -> None:
    """Flip the lowest bit of some bfloat16 weights."""
    first = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    words = np.frombuffer(data, dtype="<u2", offset=first)
    rng = np.random.default_rng(version)
    words[rng.random(words.size) < CHANGED] ^= 1
