"""A run without processes, sockets, disk or clock: a `MemoryRun` with a task and one eager worker.

    run = InProcess(rules, task, writer)
    run.open_session(); run.publish(0, digest)
    body, digest = run.take(1); run.commit(1, digest); run.publish(1, digest) ...

The worker is faster than any learner: it finishes each group that it may start at once, by the newest version. So it
always runs ahead as far as admission allows, and the groups in the buffer are as stale as S and kappa permit: with
kappa = 1 exactly S train steps, else S - kappa + 1 to S, after the first S + 1 batches. The seed hands every version
over at once. The same writer and task give the same batches. It is for experiments; nothing here is durable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2d.core.base.ids import Digest, RequestId, Version
from echo2d.core.cluster.events import PeerSaid
from echo2d.core.coordinator.events import CommitAsked, CoordinatorEvent
from echo2d.core.protocol.control_messages import HeldLease, SampleFinished, VersionKey
from echo2d.core.protocol.trajectory import Source, pack_tokens, unpack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.core.work.events import DrawPrompt, PromptDrawn, ScoreSample
from echo2d.tasks.base import Reward, Task
from echo2d_lab.standins.memory_run import MemoryRun

OK = 200


@dataclass(frozen=True, slots=True)
class Written:
    """One whole answer, and log p of each token under the distribution from which it was drawn."""

    tokens: list[int]
    logprobs: list[float]


class Writer(Protocol):
    """The model with which the worker generates."""

    def refit(self, version: VersionKey) -> None:
        """Let this version write from now on."""

    def write(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[Written]]:
        """Write samples[i] answers to prompts[i]."""


class InProcess(MemoryRun):
    """See the module docstring. slots: samples that the worker writes at a time."""

    def __init__(self, rules: RunRules, task: Task, writer: Writer, *, slots: int) -> None:
        super().__init__(rules)
        self._task, self._writer = task, writer
        self.connect("seed", kind="seed", slots=0)
        self._worker = self.connect("worker", slots=slots)
        self.work()

    def publish(self, version: int, digest: Digest) -> None:
        """When this returns, the worker serves the version, and has written everything that it may write by it."""
        reply = self.publish_key(VersionKey(Version(version), digest))
        assert reply.status == OK, reply.body
        self.work()

    def take(self, step: int) -> tuple[bytes, Digest]:
        """The bytes of the step's batch and their digest."""
        request = self.ask_batch(step)
        self.work()
        return self.batch(request)

    def batch(self, request: RequestId) -> tuple[bytes, Digest]:
        """The result of `take`, once the coordinator has replied."""
        reply = self.replies.pop(request, None)
        assert reply is not None, (
            f"nothing moves, and there is no batch: {self.stopped or self.state.status()}"
        )
        assert isinstance(reply.body, bytes), reply.body
        assert reply.digest is not None
        return reply.body, reply.digest

    def commit(self, step: int, digest: Digest, t_train_s: float = 1.0) -> int:
        """Commit the step after its `t_train_s`. Returns the publish period in force."""
        self.wait(t_train_s)
        epoch = self.ledger.epoch
        reply = self.call(lambda number: CommitAsked(number, epoch, step, digest, t_train_s))
        assert isinstance(reply.body, dict)
        assert reply.status == OK, reply.body
        self.work()
        return int(reply.body["publish_every"])

    def wait(self, seconds: float) -> None:
        """Let this time pass; the worker has nothing to do in it."""
        self.now += seconds

    # --- the worker and the task

    def _drawn(self, order: DrawPrompt) -> CoordinatorEvent:
        prompt = self._task.prompt(order.cursor)
        source = Source(order.task, prompt.row)
        return PromptDrawn(order.cursor, pack_tokens(prompt.tokens), source)

    def step_workers(self) -> bool:
        """Refit, or write all granted samples."""
        worker = self._worker
        if worker.ready is not None:
            self._writer.refit(worker.ready)
            return self.refit(worker)
        granted = list(worker.leases.items())
        if not granted:
            return False
        prompts = [unpack_tokens(lease.prompt).tolist() for _, lease in granted]
        answers = self._writer.write(prompts, [len(lease.samples) for _, lease in granted])
        for (key, lease), written in zip(granted, answers, strict=True):
            for sample, each in zip(lease.samples, written, strict=True):
                self.pending.append(PeerSaid(worker.session, self.finish(key, sample, each)))
        return True

    def finish(self, key: HeldLease, sample: int, written: Written) -> SampleFinished:
        """The result of a granted sample, by the version that is served now."""
        stopped = written.tokens[-1] in self.rules.tasks[0].stop_token_ids
        return self._worker.finish(
            key,
            sample,
            tokens=written.tokens,
            logprobs=written.logprobs,
            finish="stop" if stopped else "length",
        )

    def _reward(self, order: ScoreSample) -> float:
        reward = self._task.reward(
            self._task.prompt(order.cursor), unpack_tokens(order.tokens).tolist()
        )
        return reward.value if isinstance(reward, Reward) else reward
