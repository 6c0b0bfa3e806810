"""The gateway's calls as work for the scheduler: which choice comes next, and the leases of calls.

    waiting (CallQueue) --lease--> running --> written, unwanted, or its lease has ended

The run goes first until a call has waited for CALL_PATIENCE_S. Calls never hold more than their share of
the slots, which is at least one slot. When they have given back all slots, the run goes first again
for CALL_PATIENCE_S: so run and calls take turns, however few slots there are. Choices of one call that
have no tokens yet share a lease, because they have one prompt. Calls of a session go to one worker while
it has a free slot. If no choice can be placed, none is tried again before something has changed.
Not here: which worker has free slots (`work/scheduler`), which caller is next (`fair_queue`), what
workers report (`calls`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import HeldLease, LeaseGranted
from echo2d.core.rules.run import RunRules
from echo2d.core.work.calls.call_choice import CallChoice
from echo2d.core.work.calls.events import CallAsked
from echo2d.core.work.calls.fair_queue import CallQueue
from echo2d.core.work.kind import PendingSamples
from echo2d.core.work.leases import Lease, group_of
from echo2d.core.work.scheduler import LeaseScheduler

# The workers of at most this many sessions are remembered.
_SESSIONS_MAX = 4096
# The prompts of one worker's running calls take at most this much: a quarter of what may wait on its
# link before it counts as slow.
PROMPT_BYTES_MAX = 16 << 20
# A call that has waited for this long goes before the run, so that a busy run does not starve calls.
CALL_PATIENCE_S = 5.0
# Workers report the tokens of calls this often, so that a reader gets new ones five times a second.
REPORT_S = 0.2
# The number of this kind of work.
CALLS = 4


@dataclass(slots=True)
class _CallLease:
    """A running lease of a call.

    Unwanted choices keep their slots until the worker has written them, or the lease ends.
    """

    call: CallAsked
    lease: Lease
    # The choices that its caller still waits for, by sample.
    wanted: dict[int, CallChoice]

    @property
    def prompt_bytes(self) -> int:
        return len(self.call.prompt) + len(self.lease.given.base.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingChoice(PendingSamples):
    """A waiting choice."""

    choice: CallChoice
    # How many slots it and other choices of its call may take together.
    most: int


class CallWork:
    """See the module docstring. `now` is monotonic seconds. share: the calls' share of all slots."""

    def __init__(
        self,
        rules: RunRules,
        share: float,
        *,
        queue: CallQueue,
        versions: PublishedVersions,
        scheduler: LeaseScheduler,
    ) -> None:
        self._rules = rules
        self._share = share
        self._queue = queue
        self._versions = versions
        self._scheduler = scheduler
        self._running: dict[HeldLease, _CallLease] = {}
        self._held = 0  # slots
        self._prompt_bytes: Counter[PeerId] = Counter()
        self._sessions: dict[str, PeerId] = {}
        # By session, the worker whose answer the audit did not believe last.
        self._doubted: dict[str, PeerId] = {}
        # The value of `_now_is` when no other choice could be placed.
        self._tried: tuple[int, ...] = ()
        self._run_first_until = 0.0
        self.handed_over = 0  # how many leases continued from tokens

    @property
    def running(self) -> int:
        """The number of running choices that are still wanted."""
        return sum(len(running.wanted) for running in self._running.values())

    def wanted(self, key: HeldLease) -> dict[int, CallChoice]:
        """The wanted choices of a lease, by sample; none after the lease has ended."""
        return self._running[key].wanted if key in self._running else {}

    def doubt(self, session: str, worker: PeerId) -> None:
        """The audit did not believe what this worker wrote: the session's next calls prefer other workers."""
        self._sessions.pop(session, None)
        self._doubted[session] = worker
        keep_newest(self._doubted, _SESSIONS_MAX)

    def doubted(self, session: str) -> PeerId | None:
        return self._doubted.get(session)

    # --- for the scheduler

    def priority(self, *, now: float) -> int:
        """Calls go before the run once one of them has waited too long, otherwise after it."""
        first = self._queue.oldest
        patient = first is None or now < max(first.since + CALL_PATIENCE_S, self._run_first_until)
        return 1 if patient else -1

    def pending(self, *, now: float) -> Iterator[PendingChoice]:
        """The choices in the order of their turns, which starts over after each lease."""
        while (left := self._left()) > 0 and self._tried != self._now_is():
            for choice in self._queue.in_turn():
                yield PendingChoice(
                    (choice.index,),
                    choice.oldest,
                    self._sessions.get(choice.call.session),
                    partial(self._suits, choice, now),
                    choice.call.max_version,
                    named=choice.named,
                    choice=choice,
                    most=left // self._queue.callers,
                )
                if choice.lease is not None:
                    break
            else:
                self._tried = self._now_is()

    def _suits(self, choice: CallChoice, now: float, worker: PeerId) -> bool:
        """False if the worker has just failed this choice, or if its link has no room for the
        prompt.
        """
        more = len(choice.call.prompt) + len(choice.told.tokens)
        return (
            not choice.avoids(worker, now) and self._prompt_bytes[worker] + more <= PROMPT_BYTES_MAX
        )

    def grant(
        self, pending: PendingChoice, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[Send]:
        """Lease this choice, together with as many other choices of the same call as fit."""
        assert worker.session is not None
        assert worker.engine.serving is not None
        first, call = pending.choice, pending.choice.call
        most = min(pending.most, self._scheduler.free_at(worker.peer))
        choices = self._queue.run_of(first, most)
        samples = tuple(choice.index for choice in choices)
        group = group_of(CALLS, call.call)
        lease = self._scheduler.leases.start(
            None,
            group,
            worker.peer,
            first.named or worker.engine.serving,
            samples,
            first.told,
            room=call.max_new_tokens,
            now=now,
        )
        lease.named = first.named
        running = self._running[lease.key] = _CallLease(
            call, lease, {choice.index: choice for choice in choices}
        )
        for choice in choices:
            self._queue.discard(choice)
            choice.lease = lease
        self._hold(running, len(choices))
        self._sessions.pop(call.session, None)
        self._sessions[call.session] = worker.peer
        keep_newest(self._sessions, _SESSIONS_MAX)
        self.handed_over += bool(first.told.length)
        self._prompt_bytes[worker.peer] += running.prompt_bytes
        return [Send(worker.session, self._grant_message(first, lease))]

    def _grant_message(self, first: CallChoice, lease: Lease) -> LeaseGranted:
        call, given = first.call, lease.given
        return LeaseGranted(
            given.lease,
            given.attempt,
            given.group,
            call.prompt + first.told.tokens,
            given.samples,
            first.room,
            call.sampling,
            call.stop_token_ids,
            first.oldest,
            self._rules.lease_silence_s,
            REPORT_S,
            call.seeds(given.samples),
            first.told.length,
            version=first.named,
        )

    def _now_is(self) -> tuple[int, ...]:
        return self._queue.changes, self._scheduler.changes, self._versions.publish_seq, self._held

    def _left(self) -> int:
        """How many more slots calls may hold. Calls may always hold one slot."""
        return max(1, int(self._share * (self._scheduler.slots + self._held))) - self._held

    # --- back from the workers

    def written(self, key: HeldLease, sample: int, *, now: float) -> list[Send]:
        """The worker has finished a sample, which may be unwanted by now: free its slot."""
        running = self._running[key]
        if sample not in running.lease.samples:
            return []
        self._hold(running, -1)
        self._scheduler.leases.answer(running.lease, sample)
        choice = running.wanted.pop(sample, None)
        if choice is not None:
            choice.lease = None
        return self._end_unwanted(running, now)

    def unwanted(self, choice: CallChoice, *, now: float) -> list[Send]:
        """The caller no longer waits for this choice."""
        if choice.lease is None:
            return []
        running, choice.lease = self._running[choice.lease.key], None
        del running.wanted[choice.index]
        return self._end_unwanted(running, now)

    def ended(self, key: HeldLease, *, now: float) -> list[CallChoice]:
        """The lease has ended. Returns the choices that another worker must continue."""
        running = self._running.pop(key)
        lease, choices = running.lease, list(running.wanted.values())
        # `progressed` may still go through this dict for the other choices of a report.
        running.wanted.clear()
        for choice in choices:
            choice.lease = None
        self._hold(running, -len(lease.samples))
        self._prompt_bytes[lease.worker] -= running.prompt_bytes
        if not self._prompt_bytes[lease.worker]:
            del self._prompt_bytes[lease.worker]
        if not self._held:
            self._run_first_until = now + CALL_PATIENCE_S
        return choices

    def _end_unwanted(self, running: _CallLease, now: float) -> list[Send]:
        """End and cancel a lease if none of its choices is wanted any more."""
        if running.wanted:
            return []
        self.ended(running.lease.key, now=now)
        return self._scheduler.stop(running.lease)

    def _hold(self, running: _CallLease, slots: int) -> None:
        """Record that the call's caller holds this many more slots (fewer if negative)."""
        self._held += slots
        self._queue.hold(running.call.caller, slots)

    def check(self) -> None:
        leases = [lease for lease in self._scheduler.leases if lease.kind == CALLS]
        assert {lease.key for lease in leases} == set(self._running)
        assert self._held == sum(len(lease.samples) for lease in leases)
        assert max(len(self._sessions), len(self._doubted)) <= _SESSIONS_MAX
        prompt_bytes: Counter[PeerId] = Counter()
        for key, running in self._running.items():
            assert running.wanted
            assert running.wanted.keys() <= running.lease.samples
            assert all(choice.lease is running.lease for choice in running.wanted.values())
            assert key == running.lease.key
            prompt_bytes[running.lease.worker] += running.prompt_bytes
        assert prompt_bytes == self._prompt_bytes
        assert all(held <= PROMPT_BYTES_MAX for held in prompt_bytes.values())
