"""Simulates a worker's engine. Each token shows which version wrote it, and at which position.

`mark` is the token that a version writes at a position of a sample. So `invariants` can compare
spans with the version that was really loaded (I2), and find tokens at a wrong position. Positions
count from the first token of the prompt, also if a worker continues another worker's output. A refit
happens between two pieces of output.

Not here: which leases run, and what happens to their output.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from echo2d.core.base.ids import GroupId, LeaseId, version_label
from echo2d.core.protocol.control_messages import Finish, LeaseGranted, VersionKey
from echo2d.core.worker.events import (
    EngineRefitFailed,
    EngineRefitted,
    GenerationFailed,
    LabelSpan,
    RefitEngines,
    SampleProgressed,
)
from echo2d_lab.faults.process import Process

VOCAB = 256
STOP = 1  # ends an answer; `mark` never returns it
EngineEvent = SampleProgressed | GenerationFailed | EngineRefitted | EngineRefitFailed


def mark(key: VersionKey, group: GroupId, sample: int, place: int) -> int:
    """Return the token that this version writes at position `place` of this sample."""
    text = f"{version_label(key.version, key.digest)} {group} {sample} {place}"
    return 2 + blake3(text.encode()).digest(1)[0] % (VOCAB - 2)


@dataclass(slots=True)
class Pace:
    """How well an engine works.

    token_s: seconds per token and sample. faulty: share of refits that fail; a quarter of it is the
    share of pieces of output that fail. hung: the engine makes no progress. together: token_s counts for
    all running samples together.
    """

    token_s: float
    faulty: float = 0.0
    hung: bool = False
    together: bool = False


class SimEngine:
    """An engine that lives and dies with `process`.

    read: returns the version whose files are in a slot directory now.
    """

    def __init__(
        self,
        process: Process,
        chance: random.Random,
        pace: Pace,
        emit: Callable[[EngineEvent], None],
        read: Callable[[str], VersionKey | None],
    ) -> None:
        self._process, self._random, self._pace = process, chance, pace
        self._emit, self._read = emit, read
        self.loaded: VersionKey | None = None
        self._running: dict[tuple[LeaseId, int], set[int]] = {}
        # The arguments of the `_write` calls that wait for the end of a hold; None: there is no hold.
        self._held: list[tuple[LeaseGranted, int, int, int, int]] | None = None

    def start(self, lease: LeaseGranted) -> None:
        self._running[lease.lease, lease.attempt] = set(lease.samples)
        for sample in lease.samples:
            tokens = self._random.randint(1, lease.max_new_tokens)
            self._write_later(lease, sample, 0, tokens)

    def abort(self, lease: LeaseId, attempt: int) -> None:
        self._running.pop((lease, attempt), None)

    def hold(self, *, hold: bool) -> None:
        held, self._held = self._held or [], [] if hold else None
        for one in held:
            self._process.later(0.0, self._write, *one)

    def refit(self, order: RefitEngines) -> None:
        self._process.later(self._random.uniform(0.05, 0.5), self._load, order)

    # --- inside

    def _write_later(self, lease: LeaseGranted, sample: int, at: int, end: int) -> None:
        count = min(end - at, self._random.randint(2, 6))
        running = sum(map(len, self._running.values())) if self._pace.together else 1
        delay_s = running * count * self._pace.token_s * self._random.uniform(0.7, 1.3)
        self._process.later(delay_s, self._write, lease, sample, at, at + count, end)

    def _write(self, lease: LeaseGranted, sample: int, start: int, stop: int, end: int) -> None:
        key = (lease.lease, lease.attempt)
        if sample not in self._running.get(key, ()):
            return
        if self._held is not None:
            self._held.append((lease, sample, start, stop, end))
            return
        if self._pace.hung:
            self._process.later(1.0, self._write, lease, sample, start, stop, end)
            return
        if self.loaded is None or self._random.random() < self._pace.faulty / 4:
            del self._running[key]
            self._emit(GenerationFailed(*key, "the engine died"))
            return
        first = len(lease.prompt) // 4
        tokens = tuple(
            mark(self.loaded, lease.group, sample, first + at) for at in range(start, stop)
        )
        span = LabelSpan(start, stop, version_label(self.loaded.version, self.loaded.digest))
        finish: Finish | None = None
        if stop == end:
            finish = "length" if end == lease.max_new_tokens else "stop"
            tokens = (*tokens[:-1], STOP) if finish == "stop" else tokens
            self._running[key].discard(sample)
        else:
            self._write_later(lease, sample, stop, end)
        self._emit(SampleProgressed(*key, sample, tokens, (-0.5,) * len(tokens), (span,), finish))

    def _load(self, order: RefitEngines) -> None:
        """Swap the weights. The worker learns the outcome a little later."""
        if self._pace.hung:
            self._process.later(1.0, self._load, order)
            return
        key = VersionKey(order.version, order.digest)
        assert self._read(order.path) == key, "I3: the files in the slot are not those of the order"
        outcome = "done"
        if self._random.random() < self._pace.faulty:
            outcome = self._random.choice(["kept", "doubtful", "memory"])
        if outcome != "kept":
            self.loaded = None if outcome == "doubtful" else key
        self._process.later(self._random.uniform(0.0, 0.2), self._report, order, outcome)

    def _report(self, order: RefitEngines, outcome: str) -> None:
        if outcome in ("done", "memory"):
            self._emit(EngineRefitted(order.version, order.digest, 0.1, outcome == "done"))
            return
        label = (
            None if self.loaded is None else version_label(self.loaded.version, self.loaded.digest)
        )
        self._emit(EngineRefitFailed(order.version, order.digest, "the engine died", label))
