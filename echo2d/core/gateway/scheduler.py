"""Slots for calls: which worker gets which waiting choices, as leases like any other.

    waiting (CallQueue) --lease--> running --> written, unwanted, or its lease is over

The run goes first, until somebody has waited for PATIENCE_S; calls never hold more than their share of the slots. When
they have given all of them back the run goes first again for as long: however few slots there are, run and calls take
turns. Choices of one call that have no tokens share a lease, for they have one prompt. Calls of a session go to one
worker while it has room. Where nothing could be placed, nothing is tried before something has changed.
Not here: whose turn it is (`fair_queue`), what workers say (`calls`).
"""

from collections import Counter
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.gateway.call_choice import CallChoice
from echo2d.core.gateway.events import CallAsked, GatewayAction
from echo2d.core.gateway.fair_queue import CallQueue
from echo2d.core.protocol.control_messages import HeldLease, LeaseCancelled, LeaseGranted
from echo2d.core.rollouts.leases import Lease, LeaseTable
from echo2d.core.rollouts.scheduler import LeaseScheduler

SESSIONS_MAX = 4096  # whose worker is remembered
PROMPT_BYTES_MAX = (
    16 << 20
)  # of one worker's running calls: a quarter of what may wait on its link before it is slow
PATIENCE_S = (
    5.0  # a call that has waited for so long goes before the run, lest a busy run starves all calls
)
REPORT_S = 0.2  # tokens reach a reader about five times a second
GROUP_FIRST = 1 << 62  # calls have group ids too, for logs; those of the run never come so far
_SEEDS = 1 << 63


@dataclass(slots=True)
class _Lent:
    """A running lease. wanted: its choices that somebody still waits for; the others keep their slots until it ends."""

    call: CallAsked
    lease: Lease
    wanted: dict[int, CallChoice]

    @property
    def prompt_bytes(self) -> int:
        return len(self.call.prompt) + len(self.lease.given.base.tokens)


class CallScheduler:
    """See the module docstring. `now` is monotonic seconds. slots: who has free ones; share: of all of them."""

    def __init__(
        self,
        rules: RunRules,
        share: float,
        *,
        queue: CallQueue,
        leases: LeaseTable,
        members: Membership,
        versions: PublishedVersions,
        slots: LeaseScheduler,
    ) -> None:
        self._rules = rules
        self._share = share
        self._queue = queue
        self._leases = leases
        self._members = members
        self._versions = versions
        self._slots = slots
        self._running: dict[HeldLease, _Lent] = {}
        self._held = 0  # slots
        self._prompt_bytes: Counter[PeerId] = Counter()
        self._sessions: dict[str, PeerId] = {}
        self._tried: tuple[int, ...] = ()  # what all was like when nothing more could be placed
        self._run_first_until = 0.0
        self.handed_over = 0  # leases that went on from tokens

    @property
    def running(self) -> int:
        """Choices."""
        return sum(len(lent.wanted) for lent in self._running.values())

    def wanted(self, key: HeldLease) -> dict[int, CallChoice]:
        """The choices that a lease is still for, by their sample; none: it is over."""
        return self._running[key].wanted if key in self._running else {}

    # --- from the queue

    def impatient(self, *, now: float) -> bool:
        """Somebody has waited for long enough to go before the run."""
        first = self._queue.oldest
        return first is not None and now >= max(first.since + PATIENCE_S, self._run_first_until)

    def advance(self, *, now: float) -> list[GatewayAction]:
        """Lease what may be leased."""
        actions: list[GatewayAction] = []
        self._slots.refresh(now=now)
        while (
            self._queue
            and self._room() > 0
            and self._slots.free_slots
            and self._tried != self._now_is()
        ):
            found = self._next(now)
            if found is None:
                self._tried = self._now_is()
            else:
                actions.append(self._lease(*found, now))
                self._slots.refresh(now=now)
        return actions

    def _now_is(self) -> tuple[int, ...]:
        return self._queue.changes, self._slots.changes, self._versions.publish_seq, self._held

    def _room(self) -> int:
        """How many more slots calls may hold; one in any case."""
        return max(1, int(self._share * (self._slots.slots + self._held))) - self._held

    def _next(self, now: float) -> tuple[list[CallChoice], Peer] | None:
        no_room_from: Version | None = None  # for what needs this version or a newer one
        for choice in self._queue.in_turn():
            if no_room_from is not None and choice.oldest >= no_room_from:
                continue
            if not self._slots.rooms(choice.oldest, now).free:
                no_room_from = choice.oldest
            elif (worker := self._pick(choice, now)) is not None:
                most = min(self._room() // self._queue.callers, self._slots.free(worker.peer))
                return self._queue.run_of(choice, most), worker
        return None

    def _pick(self, choice: CallChoice, now: float) -> Peer | None:
        """The worker of its session if that has room, else the best one that may get it."""
        usual = self._members.get(self._sessions.get(choice.call.session, PeerId("")))
        if (
            usual is not None
            and self._has_room(usual, choice.oldest)
            and self._may_get(usual.peer, choice, now)
        ):
            return usual
        rooms = self._slots.rooms(choice.oldest, now)
        best = next(
            (room.worker for room in rooms if self._may_get(room.worker, choice, now)), None
        )
        return None if best is None else self._members.get(best)

    def _has_room(self, peer: Peer, oldest: Version) -> bool:
        record = self._versions.live(peer.serving)
        return record is not None and record.version >= oldest and self._slots.free(peer.peer) > 0

    def _may_get(self, worker: PeerId, choice: CallChoice, now: float) -> bool:
        more = len(choice.call.prompt) + len(choice.told.tokens)
        return (
            not choice.avoids(worker, now) and self._prompt_bytes[worker] + more <= PROMPT_BYTES_MAX
        )

    def _lease(self, choices: list[CallChoice], worker: Peer, now: float) -> Send:
        assert worker.session is not None
        assert worker.serving is not None
        first, call, samples = (
            choices[0],
            choices[0].call,
            tuple(choice.index for choice in choices),
        )
        group = GroupId(GROUP_FIRST + call.call)
        lease = self._leases.start(
            None, group, worker.peer, worker.serving, samples, first.told, now=now
        )
        lent = self._running[lease.key] = _Lent(
            call, lease, {choice.index: choice for choice in choices}
        )
        for choice in choices:
            self._queue.discard(choice)
            choice.lease = lease
        self._hold(lent, len(choices))
        self._sessions.pop(call.session, None)
        self._sessions[call.session] = worker.peer
        keep_newest(self._sessions, SESSIONS_MAX)
        self.handed_over += bool(first.told.length)
        prompt = call.prompt + first.told.tokens
        self._prompt_bytes[worker.peer] += lent.prompt_bytes
        seed = None if call.rng_seed is None else (call.rng_seed + first.index) % _SEEDS
        granted = LeaseGranted(
            lease.key.lease, lease.key.attempt, group, prompt, samples, first.room, call.temperature, call.top_p,
            call.stop_token_ids, first.oldest, self._rules.lease_silence_s, REPORT_S, seed,
        )  # fmt: skip
        return Send(worker.session, granted)

    # --- back from the workers

    def written(self, key: HeldLease, sample: int, *, now: float) -> list[GatewayAction]:
        """The worker has written all of a sample, wanted or not: its slot is free."""
        lent = self._running[key]
        if sample not in lent.lease.samples:
            return []
        self._hold(lent, -1)
        self._leases.answer(lent.lease, sample)
        choice = lent.wanted.pop(sample, None)
        if choice is not None:
            choice.lease = None
        return self._end_unwanted(lent, now)

    def unwanted(self, choice: CallChoice, *, now: float) -> list[GatewayAction]:
        """Nobody waits for it any more."""
        if choice.lease is None:
            return []
        lent, choice.lease = self._running[choice.lease.key], None
        del lent.wanted[choice.index]
        return self._end_unwanted(lent, now)

    def call_off(self, lease: Lease) -> list[GatewayAction]:
        """Tell its worker to stop."""
        peer = self._members.get(lease.worker)
        cancelled = LeaseCancelled(lease.key.lease, lease.key.attempt)
        return [] if peer is None or peer.session is None else [Send(peer.session, cancelled)]

    def end(self, key: HeldLease, *, now: float) -> list[CallChoice]:
        """The lease is over; these of its choices have to go on elsewhere."""
        lent = self._running.pop(key)
        lease, choices = lent.lease, list(lent.wanted.values())
        for choice in choices:
            choice.lease = None
        self._hold(lent, -len(lease.samples))
        self._prompt_bytes[lease.worker] -= lent.prompt_bytes
        if not self._prompt_bytes[lease.worker]:
            del self._prompt_bytes[lease.worker]
        if lease.samples:
            self._leases.end(lease)
        if not self._held:
            self._run_first_until = now + PATIENCE_S
        return choices

    def _end_unwanted(self, lent: _Lent, now: float) -> list[GatewayAction]:
        """End it once nobody waits for any of it; what it still writes is called off."""
        if lent.wanted:
            return []
        called_off = self.call_off(lent.lease) if lent.lease.samples else []
        self.end(lent.lease.key, now=now)
        return called_off

    def _hold(self, lent: _Lent, slots: int) -> None:
        self._held += slots
        self._queue.hold(lent.call.caller, slots)

    def check(self) -> None:
        assert {lease.key for lease in self._leases} == set(self._running)
        assert self._held == sum(len(lease.samples) for lease in self._leases)
        assert len(self._sessions) <= SESSIONS_MAX
        prompt_bytes: Counter[PeerId] = Counter()
        for key, lent in self._running.items():
            assert lent.wanted
            assert lent.wanted.keys() <= lent.lease.samples
            assert all(choice.lease is lent.lease for choice in lent.wanted.values())
            assert key == lent.lease.key
            prompt_bytes[lent.lease.worker] += lent.prompt_bytes
        assert prompt_bytes == self._prompt_bytes
        assert all(held <= PROMPT_BYTES_MAX for held in prompt_bytes.values())
