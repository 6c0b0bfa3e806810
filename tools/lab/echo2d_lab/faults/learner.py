"""Simulates the learner: session, publish, take, train, commit, checkpoint. It may die at any point.

It makes the same calls as `learner.train`, in the same order. Its weights are digests of the
previous weights and the batch, with a salt if its arithmetic is not reproducible. Its disk holds
its newest checkpoints, from which it resumes. A fenced learner ends. Any other unexpected answer is
a defect of the coordinator and fails an assertion.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Epoch, GroupId, RequestId, Version
from echo2d.core.cluster.events import PublishAsked, Reply
from echo2d.core.coordinator.events import (
    BatchAsked,
    CheckpointAsked,
    CommitAsked,
    CoordinatorEvent,
    RefuseAsked,
    SessionAsked,
)
from echo2d.core.protocol.trajectory import BatchBody, unpack_batch
from echo2d.core.rules.run import RunRules
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.coordinator import CALL_S, SimCoordinator
from echo2d_lab.faults.process import Process

BASE = digest_of(b"base model")
RETRY_S = 0.5
# The coordinator's shell copies a snapshot for this long before its state gets the publish.
COPY_S = (0.05, 0.5)
CHECKPOINTS_KEPT = 2
# Refusals per step, of all learners together. Five refusals of one step would end the run.
REFUSALS_MAX = 2

MakeEvent = Callable[[RequestId], CoordinatorEvent]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    weights: Digest


@dataclass(slots=True)
class ApiCall:
    """One open call. reply: None until it arrives. broken: the connection was lost."""

    make: MakeEvent
    after_s: float = CALL_S
    reply: Reply | None = None
    broken: bool = False

    @property
    def done(self) -> bool:
        return self.broken or self.reply is not None


LearnerStep = Generator[float | ApiCall, None, None]


class _FencedError(Exception):
    """A newer learner has a session."""


class SimLearner(Process):
    """See the module docstring.

    saved: its checkpoints, oldest first. refused: how often batches were refused, by step. All
    learners of a run share both. step: the last step that it committed.
    """

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        coordinator: SimCoordinator,
        rules: RunRules,
        saved: list[Checkpoint],
        refused: dict[int, int],
        *,
        train_s: float,
        checkpoint_every: int,
        refusals: float,
    ) -> None:
        super().__init__(clock)
        self._random, self._coordinator, self._rules = chance, coordinator, rules
        self.saved = saved
        self.step = 0
        self._train_s, self._checkpoint_every = train_s, checkpoint_every
        self.refusals = refusals
        self.fenced = False
        self._refused = refused

    def start(self) -> None:
        self.begin()
        self._waits_for: ApiCall | None = None
        self._salt = b"" if self._random.random() < 0.5 else self._random.randbytes(8)
        self._life = self._train()
        self._go_on()

    # --- its one thread

    def _go_on(self) -> None:
        self._waits_for = None
        try:
            wanted = next(self._life)
        except (StopIteration, _FencedError):
            self.fenced = True
            self.end()
            return
        if isinstance(wanted, float):
            self.later(wanted, self._go_on)
        elif wanted.done:
            self.later(0.0, self._go_on)
        else:
            self._waits_for = wanted

    def _ask(self, call: ApiCall) -> ApiCall:
        call.reply, call.broken = None, False
        boot = self.boots
        self._coordinator.ask(
            call.make,
            lambda reply: self.call(boot, self._answered, call, reply),
            after_s=call.after_s,
        )
        return call

    def _answered(self, call: ApiCall, reply: Reply | None) -> None:
        call.reply, call.broken = reply, reply is None
        if self._waits_for is call:
            self.later(0.0, self._go_on)
            self._waits_for = None

    def _wait(self, call: ApiCall) -> Generator[float | ApiCall, None, Reply]:
        """Wait for an answer. Every call may be repeated, so a broken or empty one is repeated."""
        while True:
            yield call
            if call.reply is not None and call.reply.status != 204:
                return self._judged(call.reply)
            yield RETRY_S * call.broken
            self._ask(call)

    def _call(
        self, make: MakeEvent, after_s: float = CALL_S
    ) -> Generator[float | ApiCall, None, Reply]:
        return (yield from self._wait(self._ask(ApiCall(make, after_s))))

    def _judged(self, reply: Reply) -> Reply:
        error = reply.body.get("error") if isinstance(reply.body, dict) else None
        if error == "fenced":
            raise _FencedError
        assert reply.status == 200 or error == "resume", f"the learner was refused: {reply.body!r}"
        return reply

    # --- what it does

    def _train(self) -> LearnerStep:
        checkpoint, epoch = yield from self._open()
        self.step, weights = checkpoint.step, checkpoint.weights
        durable = published = self.step
        yield from self._publish(epoch, self.step, weights)
        asked = self._ask_batch(epoch, self.step + 1)
        while True:
            batch, digest = yield from self._take(epoch, asked)
            # The next batch is requested before this one is trained, so that both overlap.
            asked = self._ask_batch(epoch, batch.step + 1)
            yield self._train_s * self._random.uniform(0.5, 1.5)
            weights = digest_of(weights + digest + self._salt)
            every = yield from self._commit(epoch, batch.step, digest)
            self.step = batch.step
            if self.step - published >= every:
                yield from self._publish(epoch, self.step, weights)
                published = self.step
            if self.step - durable >= self._checkpoint_every:
                self.saved[:] = [*self.saved, Checkpoint(self.step, weights)][-CHECKPOINTS_KEPT:]
                yield from self._call(_checkpoint(epoch, self.step))
                durable = self.step

    def _open(self) -> Generator[float | ApiCall, None, tuple[Checkpoint, Epoch]]:
        """Open a session from the newest checkpoint, or sometimes from the one before.

        If the coordinator refuses, it must be because an older learner has saved a newer checkpoint
        in the meantime, which is tried next.
        """
        older = len(self.saved) > 1 and self._random.random() < 0.2
        checkpoint = self.saved[-2 if older else -1]
        while True:
            reply = yield from self._call(_session(checkpoint.step))
            assert isinstance(reply.body, dict)
            if reply.status == 200:
                return checkpoint, reply.body["epoch"]
            assert self.saved[-1].step > checkpoint.step, f"nothing to resume from: {reply.body!r}"
            checkpoint = self.saved[-1]

    def _publish(
        self, epoch: Epoch, step: int, weights: Digest
    ) -> Generator[float | ApiCall, None, None]:
        path = f"versions/{epoch}-{step}"
        copy_s = self._random.uniform(*COPY_S)
        yield from self._call(
            lambda number: PublishAsked(number, epoch, Version(step), weights, path, 2000), copy_s
        )

    def _ask_batch(self, epoch: Epoch, step: int) -> ApiCall:
        return self._ask(ApiCall(lambda number: BatchAsked(number, epoch, step)))

    def _take(
        self, epoch: Epoch, asked: ApiCall
    ) -> Generator[float | ApiCall, None, tuple[BatchBody, Digest]]:
        """Take the batch, possibly after refusing a group of it."""
        while True:
            reply = yield from self._wait(asked)
            assert isinstance(reply.body, bytes)
            assert reply.digest is not None
            batch: BatchBody = unpack_batch(reply.body)
            self._check(batch)
            tries = self._refused.get(batch.step, 0)
            if tries >= REFUSALS_MAX or self._random.random() >= self.refusals:
                return batch, reply.digest
            self._refused[batch.step] = tries + 1
            named = ((self._random.choice(batch.groups).group, "bad"),)
            yield from self._call(_refuse(epoch, batch.step, named))
            self._ask(asked)

    def _check(self, batch: BatchBody) -> None:
        """Check staleness (I1) and the batch's size again, as the real learner does."""
        # With "mask" a trajectory counts by its newest span, otherwise by its oldest.
        size, counts = self._rules.group_size, min if self._rules.over_stale == "mask" else max
        assert len(batch.groups) == self._rules.trajectories_per_step // size
        for group in batch.groups:
            assert len(group.trajectories) + len(group.left_out) in (size, 2 * size)
            assert len(group.trajectories) <= size
            ages = [
                batch.step - 1 - span.version for each in group.trajectories for span in each.spans
            ]
            assert min(ages) >= 0
            assert counts(ages) <= self._rules.staleness_max, (
                "I1: a token too old reached the learner"
            )

    def _commit(
        self, epoch: Epoch, step: int, digest: Digest
    ) -> Generator[float | ApiCall, None, int]:
        reply = yield from self._call(
            lambda number: CommitAsked(number, epoch, step, digest, self._train_s)
        )
        assert isinstance(reply.body, dict)
        every: int = reply.body["publish_every"]
        return every


def _session(step: int) -> MakeEvent:
    return lambda number: SessionAsked(number, step)


def _refuse(epoch: Epoch, step: int, groups: tuple[tuple[GroupId, str], ...]) -> MakeEvent:
    return lambda number: RefuseAsked(number, epoch, step, groups)


def _checkpoint(epoch: Epoch, step: int) -> MakeEvent:
    return lambda number: CheckpointAsked(number, epoch, step)
