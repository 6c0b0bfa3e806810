"""The gateway's calls: text for whoever asks, from slots that the run does not use. Outside groups, gates and mu.

    CallAsked --> choices waiting --lease--> running --> ended        told as tokens come (ChoiceGrew)
        |                ^                      |
     refused             +---- lease ended -----+    with the tokens it has: the next worker goes on from them

The run goes first, until a call has waited for PATIENCE_S; calls never hold more than their share of the slots. A lease
of a choice is like any other: kept alive by progress, judged by the same rules, cancelled when nobody wants it.
Calls of one session go to one worker while it has room. What was told to a caller is never taken back: whoever goes on
serves the version of the last token or a newer one, and a worker that tells its tokens differently is not believed.
Nothing is durable: calls end with the process. Not here: HTTP, text, records.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from echo2d.core.bounded import keep_newest
from echo2d.core.coordinator_io import Action, CoordinatorRules, Send
from echo2d.core.figures import Figures
from echo2d.core.gateway_io import (
    CallAsked,
    CallGone,
    CallId,
    CallRefused,
    ChoiceGrew,
    ChoiceStopped,
    GatewayRules,
    RefusedCode,
)
from echo2d.core.granting import Granting
from echo2d.core.ids import GroupId, PeerId, Version
from echo2d.core.leases import Lease, Leases
from echo2d.core.membership import Membership, Peer
from echo2d.core.messages import (
    Finish,
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    SampleAnswered,
    SampleFinished,
    Span,
)
from echo2d.core.results import Believed, content_fault, span_fault
from echo2d.core.trajectory import NOTHING, Partial
from echo2d.core.versions import Versions

CALLS_MAX = 256  # open ones, each a connection and a few megabytes at most; who comes then tries again
CHOICES_MAX = 32  # of one call ...
CHOICES_OPEN_MAX = 1024  # ... and of all: what waits is looked at with every event
FAILURES_MAX = 3  # leases of one choice that ended without it; then something is wrong with what it asks for
AVOID_S = 1.0  # a worker that leaves gives leases back a moment before it says goodbye
SESSIONS_MAX = 4096  # whose worker is remembered
PATIENCE_S = 5.0  # a call that has waited for so long goes before the run, lest a busy run starves all calls
REPORT_S = 0.2  # tokens reach a reader about five times a second
GROUP_FIRST = 1 << 62  # calls have group ids too, for logs; those of the run never come so far


@dataclass(slots=True)
class _Choice:
    """One sample of a call. told: what its caller has; since: when it began to wait.

    avoid: who failed it last, and gets it no more before `avoid_until`; None: nobody did lately.
    """

    call: CallAsked
    index: int
    since: float
    told: Partial = NOTHING
    lease: Lease | None = None
    failures: int = 0
    avoid: PeerId | None = None
    avoid_until: float = 0.0

    @property
    def key(self) -> tuple[CallId, int]:
        return self.call.call, self.index

    @property
    def oldest(self) -> Version:
        """Whoever writes its next token serves this version or a newer one."""
        return max(self.call.min_version, self.told.version_last)

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self.call.max_new_tokens - self.told.length


class GatewayCalls:
    """See the module docstring. `now` is monotonic seconds. slots: who has free ones."""

    def __init__(
        self,
        rules: CoordinatorRules,
        *,
        leases: Leases,
        members: Membership,
        versions: Versions,
        figures: Figures,
        slots: Granting,
    ) -> None:
        self._rules = rules
        self._mine = rules.gateway or GatewayRules(0.0, 0.0)
        self._leases = leases
        self._members = members
        self._versions = versions
        self._figures = figures
        self._slots = slots
        self._calls: dict[CallId, dict[int, _Choice]] = {}  # the choices that are not ended
        self._running: dict[HeldLease, _Choice] = {}
        self._waiting: dict[tuple[CallId, int], _Choice] = {}
        self._sessions: dict[str, PeerId] = {}
        self._ended: Counter[str] = Counter()
        self._tokens = self._handed_over = 0

    def facts(self) -> dict[str, object]:
        """For the status. ended: calls, by how."""
        return {
            "calls": len(self._calls),
            "waiting": len(self._waiting),
            "running": len(self._running),
            "ended": dict(self._ended),
            "tokens": self._tokens,
            "handed_over": self._handed_over,
        }

    def owns(self, key: HeldLease) -> bool:
        """Whether the lease is, or was, one of these."""
        return self._leases.given(key.lease)

    # --- callers

    def asked(self, event: CallAsked, *, now: float) -> list[Action]:
        """Take the call, or say at once why not."""
        assert 0 < event.choices <= CHOICES_MAX
        newest = self._versions.newest
        if newest is None:
            return self._refuse(event.call, "late", "no version is published yet")
        if event.min_version > newest.version:
            return self._refuse(event.call, "version", f"version {newest.version} is the newest one")
        if len(self._calls) >= CALLS_MAX or len(self._waiting) + len(self._running) > CHOICES_OPEN_MAX - event.choices:
            return self._refuse(event.call, "busy", f"{len(self._calls)} calls are open already")
        choices = self._calls[event.call] = {index: _Choice(event, index, now) for index in range(event.choices)}
        self._waiting.update({choice.key: choice for choice in choices.values()})
        return []

    def stopped(self, event: ChoiceStopped) -> list[Action]:
        """The caller has cut this choice off."""
        choice = self._calls.get(event.call, {}).get(event.choice)
        return [] if choice is None else self._done(choice)

    def gone(self, event: CallGone) -> list[Action]:
        return self._end_call(event.call, "gone") if event.call in self._calls else []

    # --- workers

    def progressed(self, peer: Peer, message: LeaseProgress, *, now: float) -> list[Action]:
        """New tokens; what is nobody's any more is called off."""
        choice = self._choice_of(peer, HeldLease(message.lease, message.attempt))
        if choice is None or choice.lease is None:
            return _send(peer, LeaseCancelled(message.lease, message.attempt))
        self._leases.renew(choice.lease, tokens=any(delta.tokens for delta in message.samples), now=now)
        actions: list[Action] = []
        for delta in message.samples:
            if delta.sample != choice.index or not delta.tokens or choice.lease is None:
                continue
            grown = self._grown(peer, choice, choice.lease, delta.tokens, delta.logprobs, delta.spans)
            actions += self._fail(peer, choice, grown, now) if isinstance(grown, str) else self._tell(choice, grown)
        return actions

    def finished(self, peer: Peer, message: SampleFinished, *, now: float) -> list[Action]:
        """The rest of a choice. It is answered in any case: nothing of it is kept here."""
        key = HeldLease(message.lease, message.attempt)
        choice = self._choice_of(peer, key)
        if choice is None or choice.lease is None or message.sample != choice.index:
            return _answer(peer, message, "the lease is over")
        grown = self._grown(peer, choice, choice.lease, message.tokens, message.logprobs, message.spans)
        if not isinstance(grown, str) and grown.length < choice.told.length:
            grown = "it is shorter than what was reported of it"
        if isinstance(grown, str):
            return [*_answer(peer, message, grown), *self._fail(peer, choice, grown, now)]
        told = self._tell(choice, grown, message.finish)
        self._put_down(choice)
        return [*_answer(peer, message), *told, *self._done(choice)]

    def failed(self, peer: Peer, message: LeaseFailed, *, now: float) -> list[Action]:
        """The worker gives a lease back."""
        choice = self._choice_of(peer, HeldLease(message.lease, message.attempt))
        return [] if choice is None else self._go_on(choice, message.reason, now, failures=1)

    def rejoined(
        self, peer: Peer, held: Collection[HeldLease], *, now: float
    ) -> tuple[tuple[HeldLease, ...], list[Action]]:
        """Which of these leases the worker keeps; running ones that it does not know end."""
        known, kept = frozenset(held), list[HeldLease]()
        actions: list[Action] = []
        for lease in self._leases.of_worker(peer.peer):
            if lease.key in known:
                self._leases.renew(lease, tokens=False, now=now)
                kept.append(lease.key)
            else:
                actions += self._go_on(self._running[lease.key], "the worker forgot it", now)
        return tuple(kept), actions

    def worker_left(self, peer: Peer, *, now: float) -> list[Action]:
        """Its calls go on elsewhere."""
        leases = self._leases.of_worker(peer.peer)
        return [each for lease in leases for each in self._go_on(self._running[lease.key], "the worker left", now)]

    # --- versions, time

    def revoked(self) -> list[Action]:
        """A caller that was told tokens of a version that is void is told so."""
        void = [
            choice.call.call
            for choice in self._open()
            if any(self._versions.live(span.key) is None for span in choice.told.spans)
        ]
        return [each for call in dict.fromkeys(void) for each in self._give_up(call, "revoked", "its version is void")]

    def deadlines(self, *, now: float) -> list[Action]:
        """Leases whose worker was silent, and calls that have waited for too long."""
        actions: list[Action] = []
        for lease in self._leases.expired(now=now):
            choice = self._running.get(lease.key)
            if choice is None:  # its call has just been given up
                continue
            cancelled = self._cancel(lease)
            actions += [*cancelled, *self._go_on(choice, "its worker was silent or stuck", now, failures=1)]
        late: dict[CallId, _Choice] = {}
        for choice in self._waiting.values():
            if now >= choice.avoid_until:
                choice.avoid = None
            if now >= choice.since + self._mine.wait_s:
                late[choice.call.call] = choice
        for choice in late.values():
            actions += self._too_late(choice)
        return actions

    def wake_at(self) -> float | None:
        waits = (choice.since + self._mine.wait_s for choice in self._waiting.values())
        avoids = (choice.avoid_until for choice in self._waiting.values() if choice.avoid is not None)
        return min((at for at in (self._leases.wake_at(), *waits, *avoids) if at is not None), default=None)

    def impatient(self, *, now: float) -> bool:
        """Somebody has waited for long enough to go before the run."""
        return any(now >= choice.since + PATIENCE_S for choice in self._waiting.values())

    def advance(self, *, now: float) -> list[Action]:
        """Lease what waits: choices that have tokens first, then who came first."""
        actions: list[Action] = []
        left = self._share() - len(self._running) if self._waiting else 0
        waiting = sorted(self._waiting.values(), key=lambda choice: (not choice.told.length, choice.since))
        for choice in waiting[: max(0, left)]:
            worker = self._pick(choice, now)
            if worker is not None:
                actions += self._lease(choice, worker, now)
        self._slots.refresh()
        return actions

    # --- inside: slots

    def _share(self) -> int:
        """How many slots calls may hold."""
        return max(1, int(self._mine.share * sum(peer.slots for peer in self._members.workers())))

    def _pick(self, choice: _Choice, now: float) -> Peer | None:
        """The worker of its session if that has room, else the best one; not the one that just failed it."""
        rooms = self._slots.rooms(choice.oldest, now)
        usual = self._members.get(self._sessions.get(choice.call.session, PeerId("")))
        if usual is not None and usual.peer != choice.avoid and self._has_room(usual, choice.oldest):
            return usual
        best = [room.worker for room in islice(rooms, 2) if room.worker != choice.avoid]
        return self._members.get(best[0]) if best else None

    def _has_room(self, peer: Peer, oldest: Version) -> bool:
        record = self._versions.live(peer.serving)
        return record is not None and record.version >= oldest and self._slots.free(peer.peer) > 0

    def _lease(self, choice: _Choice, worker: Peer, now: float) -> list[Action]:
        assert worker.session is not None
        assert worker.serving is not None
        call, told = choice.call, choice.told
        group = GroupId(GROUP_FIRST + call.call)
        lease = self._leases.start(None, group, worker.peer, worker.serving, (choice.index,), told, now=now)
        choice.lease = lease
        self._running[lease.key] = choice
        del self._waiting[choice.key]
        self._sessions.pop(call.session, None)
        self._sessions[call.session] = worker.peer
        keep_newest(self._sessions, SESSIONS_MAX)
        self._handed_over += bool(told.length)
        seed = None if call.rng_seed is None else (call.rng_seed + choice.index) % (1 << 63)
        granted = LeaseGranted(
            lease.key.lease, lease.key.attempt, group, call.prompt + told.tokens, (choice.index,), choice.room,
            call.temperature, call.top_p, call.stop_token_ids, choice.oldest, self._rules.lease_silence_s, REPORT_S,
            seed,
        )  # fmt: skip
        return [Send(worker.session, granted)]

    # --- inside: tokens

    def _choice_of(self, peer: Peer, key: HeldLease) -> _Choice | None:
        choice = self._running.get(key)
        return choice if choice is not None and choice.lease is not None and choice.lease.worker == peer.peer else None

    def _grown(
        self, peer: Peer, choice: _Choice, lease: Lease, tokens: bytes, logprobs: bytes, spans: tuple[Span, ...]
    ) -> Partial | str:
        """The choice with what its worker says behind the tokens it went on from; or what is wrong with that."""
        base, told = lease.given.base, choice.told
        begins = bool(spans) and spans[0].start == 0
        before = base if begins else told
        start, room = before.length - base.length, choice.call.max_new_tokens - before.length
        oldest = max(choice.call.min_version, before.version_last)
        fault = content_fault(tokens, logprobs, self._rules.vocab_size, room)
        fault = fault or span_fault(spans, start, start + len(tokens) // 4, oldest, self._believed(peer))
        if fault:
            return fault
        grown = before.plus(tokens, logprobs, spans, shift=base.length)
        known = min(grown.length, told.length)
        return grown if grown.first(known) == told.first(known) else "it tells its tokens differently than before"

    def _believed(self, peer: Peer) -> Believed:
        return lambda version: version in peer.acknowledged and self._versions.live(version) is not None

    def _tell(self, choice: _Choice, grown: Partial, finish: Finish | None = None) -> list[Action]:
        """What the caller does not have yet. After a new connection a worker begins at its first token again."""
        known = 4 * choice.told.length
        if len(grown.tokens) <= known and finish is None:
            return []
        choice.told = grown
        self._tokens += len(grown.tokens) // 4 - known // 4
        tokens, logprobs = grown.tokens[known:], grown.logprobs[known:]
        return [ChoiceGrew(choice.call.call, choice.index, tokens, logprobs, grown.spans, finish)]

    # --- inside: ends

    def _fail(self, peer: Peer, choice: _Choice, fault: str, now: float) -> list[Action]:
        """Its worker sent what cannot be believed."""
        note = self._figures.fault("gateway", f"{peer.name}: {fault}")
        cancelled = [] if choice.lease is None else self._cancel(choice.lease)
        return [note, *cancelled, *self._go_on(choice, fault, now, failures=1)]

    def _go_on(self, choice: _Choice, reason: str, now: float, *, failures: int = 0) -> list[Action]:
        """The lease is over; the choice waits for another worker, unless it is whole or has failed too often."""
        assert choice.lease is not None
        choice.avoid, choice.avoid_until = choice.lease.worker, now + AVOID_S
        self._put_down(choice)
        choice.since = now
        choice.failures += failures
        if choice.failures >= FAILURES_MAX:
            return self._give_up(choice.call.call, "failed", f"{FAILURES_MAX} workers failed: {reason}")
        if not choice.room:
            return [*self._tell(choice, choice.told, "length"), *self._done(choice)]
        return []

    def _too_late(self, choice: _Choice) -> list[Action]:
        newest, call = self._served(), choice.call.call
        if newest is None or newest < choice.oldest:
            serves = "nothing" if newest is None else f"version {newest} at most"
            return self._give_up(
                call, "version", f"in {self._mine.wait_s:g} s no worker served {choice.oldest}, {serves}"
            )
        return self._give_up(call, "late", f"in {self._mine.wait_s:g} s no slot was free")

    def _put_down(self, choice: _Choice) -> None:
        """It has no lease any more, and waits."""
        assert choice.lease is not None
        del self._running[choice.lease.key]
        self._leases.end(choice.lease)
        choice.lease = None
        self._waiting[choice.key] = choice

    def _release(self, choice: _Choice) -> list[Action]:
        """Nobody wants more of it: it neither runs nor waits."""
        cancelled = [] if choice.lease is None else self._cancel(choice.lease)
        if choice.lease is not None:
            self._put_down(choice)
        del self._waiting[choice.key]
        return cancelled

    def _done(self, choice: _Choice) -> list[Action]:
        """The choice is over, and with the last one the call."""
        cancelled, choices = self._release(choice), self._calls[choice.call.call]
        del choices[choice.index]
        return cancelled if choices else [*cancelled, *self._end_call(choice.call.call, "done")]

    def _end_call(self, call: CallId, how: str) -> list[Action]:
        self._ended[how] += 1
        return [each for choice in self._calls.pop(call).values() for each in self._release(choice)]

    def _give_up(self, call: CallId, code: RefusedCode, detail: str) -> list[Action]:
        return [*self._end_call(call, code), CallRefused(call, code, detail, self._served())]

    def _refuse(self, call: CallId, code: RefusedCode, detail: str) -> list[Action]:
        """It was never taken."""
        self._ended[code] += 1
        return [CallRefused(call, code, detail, self._served())]

    def _served(self) -> Version | None:
        """The newest version that a worker serves."""
        records = (self._versions.live(peer.serving) for peer in self._members.workers())
        return max((record.version for record in records if record is not None), default=None)

    def _cancel(self, lease: Lease) -> list[Action]:
        peer = self._members.get(lease.worker)
        return [] if peer is None else _send(peer, LeaseCancelled(lease.key.lease, lease.key.attempt))

    def _open(self) -> Iterator[_Choice]:
        return (choice for choices in self._calls.values() for choice in choices.values())

    def check(self) -> None:
        self._leases.check()
        assert len(self._calls) <= CALLS_MAX
        assert len(self._sessions) <= SESSIONS_MAX
        assert all(choices for choices in self._calls.values())
        running = {choice.lease.key: choice for choice in self._open() if choice.lease is not None}
        assert {lease.key for lease in self._leases} == set(running)
        assert running == self._running
        assert self._waiting == {choice.key: choice for choice in self._open() if choice.lease is None}
        assert len(self._waiting) + len(running) <= CHOICES_OPEN_MAX
        for choice in self._open():
            assert choice.failures < FAILURES_MAX
            base = NOTHING if choice.lease is None else choice.lease.given.base
            assert choice.told.first(base.length) == base
            assert choice.room > 0 or (choice.lease is not None and choice.room == 0)


def _answer(peer: Peer, message: SampleFinished, refusal: str = "") -> list[Action]:
    return _send(peer, SampleAnswered(message.lease, message.attempt, message.sample, not refusal, refusal))


def _send(peer: Peer, message: LeaseCancelled | SampleAnswered) -> list[Action]:
    return [] if peer.session is None else [Send(peer.session, message)]
