"""An `InProcess` in virtual time: an answer arrives when all its tokens are written, and a train step takes time.

    run = TimedProcess(rules, task, writer, prompts, slots=128, takes_s=lambda tokens: 0.5 * tokens)
    run.open_session(); run.publish(0, digest)
    body, digest = run.take(1); run.commit(1, digest, 20.0); run.publish(1, digest) ...

So the core leaves answers out, drops groups and runs ahead as it does with real workers. The version that was served
when an answer began writes all of it. The tokens of an answer are written evenly, and are reported every PROGRESS_S.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo2d.core.base.ids import Digest
from echo2d.core.cluster.events import PeerSaid
from echo2d.core.coordinator.events import DeadlinePassed
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    HeldLease,
    LeaseProgress,
    SampleDelta,
    SampleFinished,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens, unpack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.tasks.base import Task
from echo2d_lab.bench.lab.in_process import InProcess, Writer, Written

_NEVER_S = 1e9
Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Writing:
    """An answer that is being written. reported: the number of its tokens that the coordinator knows."""

    written: Written
    result: SampleFinished
    began: float
    ends: float
    reported: int = 0

    def report(self, now: float) -> SampleDelta:
        """The tokens since the last report, without the end token."""
        count = len(self.written.tokens)
        by_now = int(count * (now - self.began) / (self.ends - self.began))
        start, self.reported = self.reported, min(by_now, count - 1)
        new, (span,) = slice(start, self.reported), self.result.spans
        return SampleDelta(
            self.result.sample,
            pack_tokens(self.written.tokens[new]),
            pack_logprobs(self.written.logprobs[new]),
            (span._replace(start=start, end=self.reported),) if start < self.reported else (),
        )


class TimedProcess(InProcess):
    """See the module docstring. takes_s: seconds of an answer of this many tokens. prompts: all prompts of the task;
    they are answered together, in advance for each version, because a model writes many answers in the time of one.

    began: each answer with its prompt. cancelled: answers that were left out, or whose group was dropped, before they
    ended.
    """

    def __init__(
        self,
        rules: RunRules,
        task: Task,
        writer: Writer,
        prompts: Sequence[Tokens],
        *,
        slots: int,
        takes_s: Callable[[int], float],
    ) -> None:
        self._prompts, self._takes_s = prompts, takes_s
        self._ahead = defaultdict[Tokens, deque[Written]](deque)
        self._writing: dict[tuple[HeldLease, int], _Writing] = {}
        self._ends: list[tuple[float, int, tuple[HeldLease, int]]] = []
        self._reports_at = PROGRESS_S
        self.began: list[tuple[Tokens, Written]] = []
        self.cancelled: list[tuple[Tokens, Written]] = []
        super().__init__(rules, task, writer, slots=slots)

    def take(self, step: int) -> tuple[bytes, Digest]:
        request = self.ask_batch(step)
        self.work()
        while request not in self.replies:
            assert self._go_on(_NEVER_S), self.stopped or self.state.status()
        return self.batch(request)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self._go_on(end):
            pass

    def step_workers(self) -> bool:
        worker = self._worker
        if worker.ready is not None:
            self._writer.refit(worker.ready)
            self._ahead.clear()
            return self.refit(worker)
        for key, sample in list(worker.open):
            prompt: Tokens = tuple(unpack_tokens(worker.leases[key].prompt).tolist())
            written = self._answer(prompt)
            result = self.finish(key, sample, written)
            ends = self.now + self._takes_s(len(written.tokens))
            self._writing[key, sample] = _Writing(written, result, self.now, ends)
            heapq.heappush(self._ends, (ends, len(self.began), (key, sample)))
            self.began.append((prompt, written))
        return False

    def _answer(self, prompt: Tokens) -> Written:
        if not self._ahead[prompt]:
            size = self.rules.group_size
            several = self._writer.write(self._prompts, [size] * len(self._prompts))
            for each, answers in zip(self._prompts, several, strict=True):
                self._ahead[each].extend(answers)
        return self._ahead[prompt].popleft()

    def _go_on(self, end: float) -> bool:
        """Let the next event happen. False: no event is due before `end`, and the clock is set to it."""
        arrives, wakes = self._ends[0][0] if self._ends else _NEVER_S, self.state.wake_at()
        at = min(arrives, self._reports_at, _NEVER_S if wakes is None else wakes)
        self.now = max(self.now, min(at, end))
        if at > end:
            return False
        if at == self._reports_at:
            self._report()
        elif at < arrives:
            self.handle(DeadlinePassed())
        else:
            self._arrive()
        self.work()
        return True

    def _arrive(self) -> None:
        _, number, key = heapq.heappop(self._ends)
        writing = self._writing.pop(key)
        if key in self._worker.unanswered:
            self.pending.append(PeerSaid(self._worker.session, writing.result))
        else:
            self.cancelled.append(self.began[number])

    def _report(self) -> None:
        self._reports_at = self.now + PROGRESS_S
        by_lease = defaultdict[HeldLease, list[SampleDelta]](list)
        for key, writing in self._writing.items():
            if key in self._worker.unanswered:
                by_lease[key[0]].append(writing.report(self.now))
        for lease, deltas in by_lease.items():
            message = LeaseProgress(lease.lease, lease.attempt, tuple(deltas))
            self.pending.append(PeerSaid(self._worker.session, message))
