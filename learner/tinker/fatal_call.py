"""The call in which one of several ranks failed, on disk, so that the next learner does not fail in it again."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from echo2d.client import TinkerOperation
from echo2d.learner.saving.files import store_faults, sync

_FILE = "fatal_call.json"


@dataclass(frozen=True, slots=True)
class FatalCall:
    digest: str  # of the call
    line: str  # why it failed

    @classmethod
    def of(cls, operation: TinkerOperation, error: Exception) -> Self:
        line = " ".join(str(error).split())
        return cls(_digest(operation), f"{type(error).__name__}: {line}")

    @classmethod
    def read(cls, root: Path) -> Self | None:
        """None: there is none."""
        path = root / _FILE
        return cls(**json.loads(path.read_bytes())) if path.exists() else None

    def write(self, root: Path) -> None:
        """Replace the one before. StoreFault: the disk failed."""
        path = root / _FILE
        aside = path.with_suffix(".tmp")
        with store_faults("cannot write", path):
            aside.write_text(json.dumps(asdict(self)))
            sync(aside)
            aside.rename(path)
            sync(root)

    def is_of(self, operation: TinkerOperation) -> bool:
        return self.digest == _digest(operation)


def _digest(operation: TinkerOperation) -> str:
    """The folder of a state is another one when the same call comes again, so arguments do not count."""
    named = f"{operation.model} {operation.number} {operation.kind} ".encode()
    return hashlib.sha256(named + operation.body).hexdigest()
