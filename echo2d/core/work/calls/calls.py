"""The gateway's calls: answers callers with tokens, written in slots that the run does not use.

    CallAsked --> choices waiting --lease--> running (ChoiceGrew as tokens come) --> ended
        |                ^                      |
     refused             +---- lease ended -----+  the next worker continues from the tokens

A lease of choices is like any other: progress keeps it alive, the same rules check its output, and it
is cancelled when no caller waits for it. Calls do not count for groups, gates and mu. Nothing is
durable: calls end with the process. Calls whose tokens are trained on are audited: their choices end
only when the verdict is known. In a run in which engines hold several versions, a call that one version alone may write
goes to any worker that holds it, and its leases name this version.
Not here: which caller is next (`fair_queue`), priority and share of slots (`call_work`), which tokens
are believed (`call_choice`), HTTP, text, records.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from echo2d.core.audit.audits import Audits
from echo2d.core.audit.waiting_samples import SampleVerdict
from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.holding import Holding
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import Finish, SampleDelta, SampleFinished, VersionKey
from echo2d.core.protocol.trajectory import NOTHING, Partial, TrajectoryRecord, version_spans
from echo2d.core.rules.tasks import GatewayRules
from echo2d.core.status.schema import GatewayStatus
from echo2d.core.work.calls.call_choice import CallChoice
from echo2d.core.work.calls.call_work import CALLS, CallWork, PendingChoice
from echo2d.core.work.calls.events import (
    CallAsked,
    CallGone,
    CallId,
    CallRefused,
    ChoiceGrew,
    ChoiceStopped,
    GatewayAction,
    RefusedCode,
)
from echo2d.core.work.calls.fair_queue import CallQueue
from echo2d.core.work.calls.open_calls import OpenCalls
from echo2d.core.work.kind import Cause, KindOfWork
from echo2d.core.work.leases import Lease, answer, group_of
from echo2d.core.work.scheduler import LeaseScheduler

# After this many failed leases of one choice, the call itself is probably at fault, and ends.
CALL_FAILURES_MAX = 3


class GatewayCalls(KindOfWork[PendingChoice]):
    """See the module docstring. `now` is monotonic seconds."""

    number = CALLS

    def __init__(
        self,
        parts: RunParts,
        *,
        scheduler: LeaseScheduler,
        holding: Holding,
        audits: Audits | None = None,
    ) -> None:
        rules, members, versions, statistics = (
            parts.rules,
            parts.members,
            parts.versions,
            parts.statistics,
        )
        mine = rules.gateway or GatewayRules(0.0, 0.0)
        self._vocab_size, self._wait_s = rules.vocab_size, mine.wait_s
        self._holding = holding
        self._members = members
        self._versions = versions
        self._statistics = statistics
        self._queue = CallQueue()
        self._work = CallWork(
            rules, mine.share, queue=self._queue, versions=versions, scheduler=scheduler
        )
        self._scheduler = scheduler
        scheduler.add(self)
        self._open = OpenCalls()
        self._tokens = 0
        self._audits = audits
        # The choices that wait for a verdict.
        self._judged: dict[tuple[GroupId, int], CallChoice] = {}

    def status(self) -> GatewayStatus:
        """The calls' part of the status."""
        return GatewayStatus(
            calls=len(self._open),
            waiting=len(self._queue),
            running=self._work.running,
            ended=dict(self._open.ended),
            tokens=self._tokens,
            handed_over=self._work.handed_over,
        )

    # --- callers

    def asked(self, event: CallAsked, *, now: float) -> list[GatewayAction]:
        """Accept the call, or refuse it at once."""
        newest = self._versions.newest
        if newest is None:
            return self._refuse(event.call, "late", "no version is published yet")
        if event.min_version > newest.version:
            return self._refuse(
                event.call, "version", f"version {newest.version} is the newest one"
            )
        named = None
        if self._holding.several and event.min_version == event.max_version:
            named = self._versions.numbered(event.min_version)
        if (exact := event.max_version) is not None and not self._may_come(exact, named):
            return self._refuse(event.call, "version", _gone_text(exact))
        if too_many := self._open.too_many(event):
            return self._refuse(event.call, "busy", too_many)
        for choice in self._open.open(event, named):
            choice.avoid = self._work.doubted(event.session)
            self._queue.put(choice, now=now)
        return []

    def stopped(self, event: ChoiceStopped, *, now: float) -> list[GatewayAction]:
        """The caller needs no more of this choice."""
        choice = self._open.get(event.call, event.choice)
        if choice is None or choice.finish is not None:
            return []
        if not choice.call.trained:
            return self._done(choice, now)
        self._queue.discard(choice)
        return [
            *self._work.unwanted(choice, now=now),
            *self._finish(choice, choice.told, "stop", now),
        ]

    def gone(self, event: CallGone, *, now: float) -> list[GatewayAction]:
        return self._end_call(event.call, event.how, now) if event.call in self._open else []

    # --- samples to workers

    def priority(self, *, now: float) -> int:
        return self._work.priority(now=now)

    def pending(self, *, now: float) -> Iterator[PendingChoice]:
        return self._work.pending(now=now)

    def grant(
        self, pending: PendingChoice, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[Send]:
        return self._work.grant(pending, worker, samples, now=now)

    # --- workers' reports

    def progressed(
        self, peer: Peer, lease: Lease, deltas: Sequence[SampleDelta], *, now: float
    ) -> list[GatewayAction]:
        """A worker reports new tokens: send them to their caller."""
        wanted = self._work.wanted(lease.key)
        actions: list[GatewayAction] = []
        for delta in deltas:
            choice = wanted.get(delta.sample)
            if choice is not None and delta.tokens:
                grown = self._grown(peer, choice, delta)
                if isinstance(grown, str):
                    actions += self._fail(peer, choice, grown, now)
                elif choice.too_new(grown):
                    actions += self._refit_came(choice, now)
                else:
                    actions += self._tell(choice, choice.before_stop(grown))
        return actions

    def finished(
        self, peer: Peer, lease: Lease | None, message: SampleFinished, *, now: float
    ) -> list[GatewayAction] | None:
        """A worker has finished a choice. Every result is answered, because none is kept here."""
        if lease is None:
            return None
        choice = self._work.wanted(lease.key).get(message.sample)
        if choice is None:
            free = self._work.written(lease.key, message.sample, now=now)
            return [*answer(peer, message, "no caller waits for it"), *free]
        grown = self._grown(peer, choice, message)
        if not isinstance(grown, str) and grown.length < choice.told.length:
            grown = "it is shorter than its last report"
        if not isinstance(grown, str):
            grown = choice.end_fault(grown, message.finish) or grown
        if isinstance(grown, str):
            return [*answer(peer, message, grown), *self._fail(peer, choice, grown, now)]
        if choice.too_new(grown):
            free = self._work.written(lease.key, message.sample, now=now)
            return [*answer(peer, message), *free, *self._refit_came(choice, now)]
        free = self._work.written(lease.key, message.sample, now=now)
        finish: Finish = "length" if message.finish == "context" else message.finish
        return [*answer(peer, message), *free, *self._finish(choice, grown, finish, now)]

    def lost(self, lease: Lease, cause: Cause, reason: str, *, now: float) -> list[GatewayAction]:
        """The lease has ended: its choices wait for another worker.

        Choices that are complete or have failed too often end.
        """
        return self._go_on(lease, reason, now, failures=int(cause in ("failed", "silent")))

    def blames(self, lease: Lease, cause: Cause) -> bool:
        """Workers are not blamed, because the call itself may be at fault."""
        return False

    # --- versions, time

    def revoked(self, *, now: float) -> list[GatewayAction]:
        """Versions were revoked: end the calls that were sent tokens of these versions, or name one of them."""
        told = ((choice.call.call, span.key) for choice in self._open for span in choice.told.spans)
        named = ((each.call.call, each.named) for each in self._open if each.named is not None)
        uses = chain(told, named)
        over = dict.fromkeys(call for call, version in uses if self._versions.live(version) is None)
        return [
            each
            for call in over
            for each in self._give_up(call, "revoked", "its version was revoked", now)
        ]

    def refitted(self, *, now: float) -> list[GatewayAction]:
        """A worker serves or holds other versions, or has left: end the calls whose version is gone."""
        waiting = (each for each in self._open if each.lease is None and each.finish is None)
        exact = ((each, each.call.max_version) for each in waiting)
        gone = {
            choice.call.call: version
            for choice, version in exact
            if version is not None and not self._may_come(version, choice.named)
        }
        return [
            each
            for call, version in gone.items()
            for each in self._version_gone(call, version, now)
        ]

    def convicted(self, worker: PeerId, *, now: float) -> list[GatewayAction]:
        """The calls with tokens of this worker that are trained on end."""
        of = [each for each in self._open if each.call.trained]
        calls = [
            each.call.call for each in of if any(span.author == worker for span in each.told.spans)
        ]
        return [
            each
            for call in dict.fromkeys(calls)
            for each in self._give_up(call, "failed", "a worker of it was convicted", now)
        ]

    def judged(self, verdict: SampleVerdict, *, now: float) -> list[GatewayAction]:
        """The audit has judged a choice."""
        choice = self._judged.pop((verdict.group, verdict.sample), None)
        if choice is None:
            return []
        if verdict.good:
            return [*self._tell(choice, choice.told, choice.finish), *self._done(choice, now)]
        for worker in verdict.blamed:
            self._work.doubt(choice.call.session, worker)
        return self._give_up(choice.call.call, "failed", "the audit does not believe it", now)

    def deadlines(self, *, now: float) -> list[GatewayAction]:
        """End the calls that have waited too long."""
        actions: list[GatewayAction] = []
        for choice in self._queue.late(self._wait_s, now=now):
            actions += self._too_late(choice, now) if choice.call.call in self._open else []
        return actions

    def wake_at(self) -> float | None:
        return self._queue.wake_at(self._wait_s)

    # --- inside: tokens

    def _grown(
        self, peer: Peer, choice: CallChoice, said: SampleDelta | SampleFinished
    ) -> Partial | str:
        return choice.grown(
            said,
            peer.peer,
            vocab_size=self._vocab_size,
            believed=lambda version: (
                version in peer.engine.acknowledged and self._versions.live(version) is not None
            ),
        )

    def _tell(
        self, choice: CallChoice, grown: Partial, finish: Finish | None = None
    ) -> list[GatewayAction]:
        """Send the caller the tokens that it does not have yet."""
        known = 4 * choice.told.length
        if len(grown.tokens) <= known and finish is None:
            return []
        choice.told = grown
        self._tokens += (len(grown.tokens) - known) // 4
        tokens, logprobs = grown.tokens[known:], grown.logprobs[known:]
        spans = version_spans(grown.spans)
        return [ChoiceGrew(choice.call.call, choice.index, tokens, logprobs, spans, finish)]

    # --- inside: ends

    def _finish(
        self, choice: CallChoice, whole: Partial, finish: Finish, now: float
    ) -> list[GatewayAction]:
        """No more tokens come: end it, or let it wait for its verdict."""
        if self._audits is not None and choice.call.trained and whole.tokens:
            group = group_of(CALLS, choice.call.call)
            record = TrajectoryRecord(
                choice.index,
                whole.tokens,
                whole.logprobs,
                whole.spans,
                finish,
                columns=whole.columns,
            )
            self._audits.delivered(
                group,
                choice.call.prompt,
                record,
                sampling=choice.call.sampling,
                rng_seed=next(iter(choice.call.seeds([choice.index])), None),
                now=now,
            )
            if self._audits.waiting.waits(group, choice.index):
                self._judged[group, choice.index], choice.finish = choice, finish
                return self._tell(choice, whole)
        return [*self._tell(choice, whole, finish), *self._done(choice, now)]

    def _fail(self, peer: Peer, choice: CallChoice, fault: str, now: float) -> list[GatewayAction]:
        """A worker sent a bad report: all choices of the lease continue elsewhere."""
        assert choice.lease is not None
        lease = choice.lease
        choice.failures += 1
        notes = self._scheduler.misreported(peer, "gateway", fault, now=now)
        return [*notes, *self._scheduler.stop(lease), *self._go_on(lease, fault, now)]

    def _go_on(
        self, lease: Lease, reason: str, now: float, *, failures: int = 0
    ) -> list[GatewayAction]:
        choices = self._work.ended(lease.key, now=now)
        for choice in choices:
            choice.avoid = lease.worker
            choice.failures += failures
            self._queue.put(choice, now=now)
        return [each for choice in choices for each in self._look_at(choice, reason, now)]

    def _look_at(self, choice: CallChoice, reason: str, now: float) -> list[GatewayAction]:
        # Another choice may just have ended the call.
        if choice.call.call not in self._open:
            return []
        if choice.failures >= CALL_FAILURES_MAX:
            return self._give_up(
                choice.call.call, "failed", f"{CALL_FAILURES_MAX} workers failed: {reason}", now
            )
        if choice.room:
            named = choice.named
            if named is None or self._may_come(named.version, named):
                return []
            return self._version_gone(choice.call.call, named.version, now)
        self._queue.discard(choice)
        return self._finish(choice, choice.told, "length", now)

    def _too_late(self, choice: CallChoice, now: float) -> list[GatewayAction]:
        newest, call, waited = self._served(), choice.call.call, f"in {self._wait_s:g} s no"
        named = choice.named
        writers = map(choice.may_be_written_by, self._all_served())
        held = named is not None and self._holding.anywhere(named)
        if held or (named is None and any(writers)):
            return self._give_up(call, "late", f"{waited} slot was free", now)
        serves = "nothing" if newest is None else f"version {newest} at most"
        return self._give_up(
            call, "version", f"{waited} worker served {choice.oldest}, {serves}", now
        )

    def _version_gone(self, call: CallId, version: Version, now: float) -> list[GatewayAction]:
        return self._give_up(call, "version", _gone_text(version), now)

    def _refit_came(self, choice: CallChoice, now: float) -> list[GatewayAction]:
        detail = f"a refit ended version {choice.call.max_version} in the middle of the answer"
        return self._give_up(choice.call.call, "version", detail, now)

    def _done(self, choice: CallChoice, now: float) -> list[GatewayAction]:
        """End a choice; if it was the call's last one, end the call too."""
        self._open.end(choice)
        return self._release(choice, now)

    def _end_call(self, call: CallId, how: str, now: float) -> list[GatewayAction]:
        return [
            each for choice in self._open.end_call(call, how) for each in self._release(choice, now)
        ]

    def _release(self, choice: CallChoice, now: float) -> list[GatewayAction]:
        """Take a choice out of the queue and out of its lease."""
        self._queue.discard(choice)
        judged = group_of(CALLS, choice.call.call), choice.index
        if self._judged.pop(judged, None) is not None and self._audits is not None:
            self._audits.waiting.withdraw(*judged)
        return [*self._work.unwanted(choice, now=now)]

    def _give_up(
        self, call: CallId, code: RefusedCode, detail: str, now: float
    ) -> list[GatewayAction]:
        return [*self._end_call(call, code, now), CallRefused(call, code, detail, self._served())]

    def _refuse(self, call: CallId, code: RefusedCode, detail: str) -> list[GatewayAction]:
        """Refuse a call that was not accepted."""
        self._open.ended[code] += 1
        return [CallRefused(call, code, detail, self._served())]

    def _served(self) -> Version | None:
        """The newest version that a worker serves."""
        return max(self._all_served(), default=None)

    def _all_served(self) -> Iterator[Version]:
        records = (self._versions.live(peer.engine.serving) for peer in self._members.workers())
        return (record.version for record in records if record is not None)

    def _may_come(self, version: Version, named: VersionKey | None) -> bool:
        """Whether a worker serves this version, or may serve it next: only the newest is loaded. named: the version, if
        leases name it: then it is enough that a worker holds it, or that it is on its way to one.
        """
        if named is not None:
            return self._holding.may_come(named)
        newest = self._versions.newest
        return newest is None or version >= newest.version or version in self._all_served()

    def check(self) -> None:
        self._queue.check()
        self._work.check()
        self._open.check()
        open_now = len(self._queue) + self._work.running + len(self._judged)
        assert open_now == len(list(self._open))
        for choice in self._open:
            assert choice.failures < CALL_FAILURES_MAX
            base = NOTHING if choice.lease is None else choice.lease.given.base
            assert choice.told.first(base.length) == base
            ended = choice.lease is not None or choice.finish is not None
            assert choice.room > 0 or (ended and choice.room == 0)


def _gone_text(version: Version) -> str:
    return f"no worker serves version {version} any more"
