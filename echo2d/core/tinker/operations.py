"""The operations of one model, in the order of the client's numbers.

    submitted, in any order --every smaller number has ended--> running --> ended
        the same number again, with the same bytes: the same future; with other bytes: refused

A client sends its optimizer step before it knows whether the gradient before it was computed. So after a part of a
gradient has failed, the next optimizer step drops the whole gradient, and fails too (`replay`). A number that stays
away while larger ones are there fails after GAP_S, like a part of a gradient.
Not here: results (`futures`), which model is next (`service`), what an operation computes (the learner).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

from echo2d.core.base.ids import Digest

ModelId = NewType("ModelId", str)

# create and load make the model, under number 0.
OperationKind = Literal["create", "load", "forward_backward", "optim_step", "save"]

# A number may be missing for this long while a larger one waits.
GAP_S = 60.0
# A number may be this far beyond the next one. A client sends a few chunks of 1,024 datums at once.
AHEAD_MAX = 4096

MISSING = "this number has not come, although larger ones have: the gradient since the last optimizer step is dropped"
DROPPED = (
    "a part of its gradient failed: the whole gradient since the last optimizer step is dropped"
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A numbered call of a client."""

    model: ModelId
    number: int
    kind: OperationKind
    digest: Digest  # of all that the client sent; empty: it never came
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # What the learner computes with; empty in what stays in the coordinator's memory.
    body: bytes = b""
    body_bytes: int = 0
    # Why it cannot run. None: it can.
    fault: str | None = None
    # Whether it adds to the gradient of the next optimizer step.
    adds: bool = False


class NumberRefusedError(ValueError):
    """A client has used a number for two different calls, or one that is far beyond its others."""


class Operations:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        # All smaller numbers have ended.
        self._next = 0
        self._waiting: dict[int, Operation] = {}
        # What the client sent, by number: of operations that wait, and of the last AHEAD_MAX that have ended.
        self._digests: dict[int, Digest] = {}
        self.running: Operation | None = None
        # Since when the next number is missing while a larger one waits.
        self._gap_since: float | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        running = 0 if self.running is None else self.running.body_bytes
        return running + sum(each.body_bytes for each in self._waiting.values())

    def recover(self, operation: Operation, *, ended: bool) -> None:
        """Take an operation from the ledger. Those of a model come in the order of their numbers."""
        number = operation.number
        if operation.digest:
            self._digests[number] = operation.digest
        if ended:
            self.ended_up_to(number)
        else:
            self._waiting[number] = operation

    def ended_up_to(self, number: int) -> None:
        """All numbers up to this one have ended before the coordinator began."""
        self._next = max(self._next, number + 1)

    def submit(self, operation: Operation, *, now: float) -> bool:
        """Take an operation; returns whether it is new. NumberRefusedError: its number cannot be used."""
        number = operation.number
        known = self._digests.get(number)
        if known is not None and known != operation.digest:
            raise NumberRefusedError(f"number {number} was used for another call")
        if known is not None or number < self._next:
            # A number that failed as missing may come now.
            return False
        if number >= self._next + AHEAD_MAX:
            raise NumberRefusedError(
                f"number {number} is too far ahead: {self._next} has not ended, and at most "
                f"{AHEAD_MAX} may wait"
            )
        self._digests[number] = operation.digest
        self._waiting[number] = operation
        self._look_for_gap(now)
        return True

    @property
    def ready(self) -> bool:
        """Whether the next operation is here, and none runs."""
        return self.running is None and self._next in self._waiting

    def begin(self) -> Operation:
        """Begin the next operation."""
        self.running = self._waiting.pop(self._next)
        return self.running

    def end_all(self) -> list[int]:
        """Forget what waits, and return the numbers."""
        numbers = sorted(self._waiting)
        self._waiting.clear()
        self._gap_since = None
        return numbers

    def give_back(self) -> None:
        """The learner is gone: its operation waits again."""
        if self.running is not None:
            self._waiting[self.running.number] = self.running
            self.running = None

    def end(self, *, now: float) -> None:
        """The running operation has ended."""
        assert self.running is not None
        operation, self.running = self.running, None
        self._pass(operation.number, now)

    def skip_missing(self, *, now: float) -> int | None:
        """The next number, which was missing for too long and has failed now; None: none was."""
        self._look_for_gap(now)
        if (due := self.gap_at) is None or now < due:
            return None
        number = self._next
        self._pass(number, now)
        return number

    @property
    def gap_at(self) -> float | None:
        """When the next number fails because it is missing."""
        return None if self._gap_since is None else self._gap_since + GAP_S

    def _pass(self, number: int, now: float) -> None:
        self._next = number + 1
        self._digests.pop(number - AHEAD_MAX, None)
        # Each missing number has a time of its own.
        self._gap_since = None
        self._look_for_gap(now)

    def _look_for_gap(self, now: float) -> None:
        missing = bool(self._waiting) and self._next not in self._waiting and self.running is None
        if not missing:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now

    def check(self) -> None:
        assert all(number >= self._next for number in self._waiting)
        assert self.running is None or self.running.number == self._next
        assert len(self._digests) <= 2 * AHEAD_MAX
