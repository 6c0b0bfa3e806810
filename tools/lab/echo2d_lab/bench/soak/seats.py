"""The soak's scripted workers: each seat has a worker that leaves, is cut off, and joins again.

    away --enrol (a new machine), connect--> here --leave, or its link is cut--> away --a while--> here
                                              +--revoked--> over

All answers differ, so that each can be followed into a batch.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from echo2d.core.protocol.builds import OURS, PROTOCOL_OLDEST, PROTOCOL_VERSION, Build
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Hello,
    LeaseGranted,
    SampleFinished,
    ToPeer,
    Welcome,
)
from echo2d.errors import OperatorFault
from echo2d.net.control.client import Identity, enrol
from echo2d.net.security.auth import TokenFile
from echo2d_lab.bench.coordinator.fake_fleet import FakeOutput, FakeWorker, Script
from echo2d_lab.bench.coordinator.load_meter import LoadMeter

ENROL_PATIENCE_S = 120.0
BASE = 8  # a serial number is written in this base; each digit is a token
DIGITS = 12
# The next release, as a coordinator of this release sees it.
NEXT_BUILD = Build(PROTOCOL_VERSION + 1, PROTOCOL_OLDEST, "99.0")


@dataclass(slots=True)
class SoakAnswers:
    """The answers of all scripted workers. groups: groups of their leases. accepted: the places (group,
    sample) of acknowledged answers, by their tokens.
    """

    numbers: "count[int]" = field(default_factory=count)
    groups: dict[int, int] = field(default_factory=dict)
    accepted: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class NumberedWorker(FakeWorker):
    """A scripted worker whose answers have serial numbers."""

    written: SoakAnswers
    script: Script
    build: Build

    def hello(self) -> Hello:
        return replace(super().hello(), build=self.build)

    def say_goodbye(self) -> None:
        """Sign off like a worker that is stopped."""
        assert self._link is not None
        self._link.send(Goodbye("stopped"))
        self.leave()

    def output(self, sample: int) -> FakeOutput:
        number = next(self.written.numbers)
        tokens = np.zeros(self.script.tokens, dtype="<i4")
        tokens[0] = sample % 2  # the reward: no group is without variance
        for place in range(1, DIGITS + 1):
            number, tokens[place] = divmod(number, BASE)
        logprobs = np.full(self.script.tokens, -1.0, dtype="<f4")
        return FakeOutput(tokens.tobytes(), logprobs.tobytes())

    async def received(self, message: ToPeer) -> None:
        if isinstance(message, LeaseGranted):
            self.written.groups[message.lease] = message.group
        await super().received(message)

    def acknowledged(self, result: SampleFinished, *, accepted: bool) -> None:
        if accepted:
            place = self.written.groups[result.lease], result.sample
            self.written.accepted[result.tokens] = place


class ScriptedSeat:
    """One scripted worker. here: it is wanted. closed: its token was revoked. build: of the next worker
    in this seat.
    """

    def __init__(
        self,
        name: str,
        script: Script,
        meter: LoadMeter,
        written: SoakAnswers,
        token: TokenFile,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.token = token
        self.closed = False
        self.build = OURS
        self._script, self._meter, self._written, self._rng = script, meter, written, rng
        self._worker: NumberedWorker | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def here(self) -> bool:
        return self._task is not None and not self._task.done()

    async def come(self, url: str, tasks: asyncio.TaskGroup, *, new: bool = False) -> None:
        """Connect. new: as a machine that has never joined."""
        old = None if new or self._worker is None else self._worker.key
        worker = NumberedWorker(self.name, self._script, [], self._meter, self._rng, old)
        worker.written, worker.script, worker.build = self._written, self._script, self.build
        self._worker = worker
        if old is None:
            identity = Identity.of(url, self.token, worker.key)
            rng = random.Random(self._rng.random())
            await enrol(url, self.token, identity, rng=rng, patience_s=ENROL_PATIENCE_S)
        self._task = tasks.create_task(self._run(worker, url))

    async def gone(self) -> None:
        """Return once its link has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def leave(self, *, cut: bool) -> None:
        """cut: the link ends without a goodbye."""
        task, self._task = self._task, None
        if self._worker is None or task is None:
            return
        if cut:
            task.cancel()
        else:
            self._worker.say_goodbye()
        await asyncio.wait([task])

    async def _run(self, worker: NumberedWorker, url: str) -> None:
        try:
            await worker.run(url, bytes.fromhex(self.token.run_key))
        except OperatorFault:
            self.closed = True  # its token was revoked


class StrangeWorker(FakeWorker):
    """A worker with a protocol that the coordinator does not know. let_in: how often it was welcomed."""

    let_in = 0

    def hello(self) -> Hello:
        strange = Build(PROTOCOL_VERSION + 100, PROTOCOL_VERSION + 100, "99.0")
        return replace(super().hello(), build=strange)

    async def connected(self, welcome: Welcome) -> None:
        self.let_in += 1
        await super().connected(welcome)
