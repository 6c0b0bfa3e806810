"""Recorded batches, and a stand-in for the coordinator that hands them out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from echo2d.client import Batch, NotResumable, Published, Session
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS


class Recording:
    """Stands in for `Coordinator`; its state is a file of JSON lines, which outlives a kill."""

    run_id = "run"

    def __init__(self, path: Path, batches: list[Batch]) -> None:
        self._path = path
        self._batches = batches

    def lines(self) -> list[list[Any]]:
        return (
            [json.loads(line) for line in self._path.read_text().splitlines()]
            if self._path.exists()
            else []
        )

    def _say(self, *facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def open_session(self, resume_step: int) -> Session:
        durable = max((line[1] for line in self.lines() if line[0] == "checkpoint"), default=0)
        if resume_step < durable:
            raise NotResumable(f"batches up to step {durable} are deleted")
        self._epoch = 1 + sum(line[0] == "session" for line in self.lines())
        self._say("session", resume_step)
        return Session(self._epoch, self.run_id, 2, 1, GROUPS * GROUP_SIZE, GROUP_SIZE)

    def publish(self, version: int, directory: Path) -> Published:
        return Published(version, "00")

    def take_batch(self, step: int) -> Batch:
        return dataclasses.replace(self._batches[step - 1], epoch=self._epoch)

    def commit(self, batch: Batch, *, t_train_s: float) -> int:
        self._say("commit", batch.step, batch.digest)
        return 4

    def checkpoint(self, step: int) -> None:
        self._say("checkpoint", step)
