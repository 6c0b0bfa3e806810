"""The scheduler: places the samples of every kind of work on free slots, and keeps each lease until it ends.

    kinds, by priority --pending--> the next samples --a free slot--> grant: a lease at that worker
                          ^                         +-- none -------> skipped
                          +---------- ask again until no slot is free -------+

    running --progress--> renewed          --a result--> finished: its kind judges it
            --given back, silent, late, forgotten by its worker, its worker gone--> lost: its kind has the
                                                                                       samples again

A kind of work (`kind`) decides which of its samples wait and in which order (admission), when it goes before other
kinds (priority), and from which version on a worker may write a sample. The scheduler finds the worker: the newest
version first, then the fastest worker, then the most free slots. If samples name their version, any worker that holds
this version may get them. What a worker delivers limits how many samples it holds (`deliveries`), and a late lease
continues elsewhere if slots there are free. A kind never delays another one, except by its priority. Slots that other
kinds hold are not available for training.

Possible extensions, checked on paper. A session of an external trainer that demands an exact version: a kind whose
`pending` has oldest = newest (as evaluations have) and whose `lost` decides what is lost with the version. Several
branches of an episode at once: each is a sample of its group with a base of its own, so a group parks and continues
sample by sample as it does now. Calls of a run without a task: calls are already a kind without a task (`KindOfWork`,
not `TaskWork`), and a run with this kind alone registers no other.
Not here: what the kinds are, the index of free slots (`ranking`), how many samples a worker may hold (`deliveries`).
"""

import math
from collections.abc import Collection
from itertools import chain, islice
from statistics import median
from typing import Any

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Note, Persist, Send, VersionPublished
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import key_of
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    SampleFinished,
    VersionKey,
)
from echo2d.core.work.deliveries import RANK_MAX, SLOW_TIMES, TRIAL_S, Deliveries
from echo2d.core.work.events import DeliveriesMeasured
from echo2d.core.work.kind import Cause, KindOfWork, PendingSamples, TaskWork
from echo2d.core.work.leases import KIND_SHIFT, TRAINING, Lease, LeaseTable, answer, send_to
from echo2d.core.work.ranking import WorkerChoice, WorkerRanking

# Workers that are as fast as usual count as short of work in two cases: if such a worker, serving the newest version,
# had a free slot within this time or within the time of two answers; or if a version was published within this time,
# because some workers must still load it.
LATELY_S = 10.0


class LeaseScheduler:
    """See the module docstring. `now` is monotonic seconds. tag: this process's part of its lease ids."""

    def __init__(
        self,
        parts: RunParts,
        *,
        tag: int,
        deliveries: Deliveries | None = None,
    ) -> None:
        rules, members, versions, statistics = (
            parts.rules,
            parts.members,
            parts.versions,
            parts.statistics,
        )
        self.leases = LeaseTable(tag, rules.lease_silence_s)
        self._exclusive = rules.dissemination.mode == "exclusive"
        self._members = members
        self._versions = versions
        self._statistics = statistics
        self._ranking = WorkerRanking(several=rules.versions_held > 1)
        self.deliveries = deliveries or Deliveries(rules.window, rules.drawn_max)
        self._kinds: dict[int, KindOfWork[Any]] = {}
        self._newest: VersionPublished | None = None
        self._before: VersionPublished | None = None
        self._newest_at = 0.0
        # When a worker that is as fast as usual last served the newest version and had a free slot.
        self._idle_at = -math.inf
        # Whether deliveries were reviewed since the last `fill`.
        self._reviewed = False

    def add(self, kind: KindOfWork[Any]) -> None:
        """Add a kind of work."""
        assert kind.number not in self._kinds, "two kinds of work have one number"
        self._kinds[kind.number] = kind

    # --- which kind

    def of_group(self, group: GroupId) -> TaskWork[Any]:
        """The kind of work that has asked a task about this group."""
        kind = self._kinds[group >> KIND_SHIFT]
        assert isinstance(kind, TaskWork)
        return kind

    def of_task(self, task: str) -> TaskWork[Any]:
        """The kind of work that asks for prompts of this name."""
        return next(
            kind for kind in self._kinds.values() if isinstance(kind, TaskWork) and kind.asks(task)
        )

    # --- slots

    @property
    def slots(self) -> int:
        """The slots of all alive, active workers, without those that kinds other than training hold."""
        return self._ranking.slots

    @property
    def changes(self) -> int:
        """Grows whenever anything about a worker changes."""
        return self._ranking.changes

    def load(self, worker: PeerId) -> int:
        """The samples of all kinds that a worker holds."""
        return self.leases.load(worker)

    def free_at(self, worker: PeerId) -> int:
        """The free slots of a worker, as of the last `refresh`."""
        return self._ranking.free_of(worker)

    def free_from(self, oldest: Version) -> int:
        """The free slots at workers of this version or a newer one, as of the last `refresh`."""
        return self.free_workers(oldest).free

    def free_workers(self, oldest: Version) -> WorkerChoice:
        """The workers of this version or a newer one that have free slots, as of the last `refresh`."""
        return self._ranking.choose(oldest, self._versions.live)

    def fill(self, *, now: float) -> list[Any]:
        """Grant what can be granted, kind by kind."""
        self.refresh(now=now)
        actions: list[Any] = []
        reviewed, self._reviewed = self._reviewed, False
        if reviewed and (kept := self.deliveries.to_keep(now=now)):
            actions.append(Persist(DeliveriesMeasured(kept)))
        newest = self._versions.newest
        if newest is not self._newest:
            self._before, self._newest, self._newest_at = self._newest, newest, now
        if not self._ranking.free:
            return actions
        order = sorted([(kind.priority(now=now), number) for number, kind in self._kinds.items()])
        for _, number in order:
            actions += self._fill(self._kinds[number], now)
        if reviewed and self._ranking.free and (late := self._hand_on(now)):
            actions += [*late, *self.fill(now=now)]
        # At most once a second: whether a worker that is as fast as usual has a free slot.
        if (
            newest is not None
            and now >= self._idle_at + 1.0
            and self._usual_workers(newest.version).free
        ):
            self._idle_at = now
        return actions

    def refresh(self, *, now: float) -> None:
        """Record the workers and loads that have changed."""
        self._ranking.rested(now=now)
        members, leases, deliveries = self._members, self.leases, self.deliveries
        measurements, at = self._statistics.measurements, self._statistics.now
        workers: Collection[PeerId] = members.changed | leases.changed
        while True:
            for worker in workers:
                peer, load, reserved = (
                    members.get(worker),
                    leases.load(worker),
                    leases.reserved(worker),
                )
                if peer is None or peer.state != "joined" or peer.session is None:
                    # While it is away, its samples do not count against it.
                    bounds = deliveries.holds(worker, "", 0, 0, now=now)
                else:
                    bounds = deliveries.holds(worker, peer.token, peer.slots, load, now=now)
                self._ranking.refresh(worker, peer, load - reserved, reserved, bounds)
                if peer is not None and peer.kind == "worker":
                    usable = min(peer.slots, bounds[0])
                    measurements.holds(worker, usable, load - reserved, now=at)
            if now < deliveries.review_at:
                break
            workers, self._reviewed = deliveries.review(now=now), True
        members.changed.clear()
        leases.changed.clear()

    def _rank(self, ranking: WorkerRanking, worker: PeerId) -> None:
        reserved = self.leases.reserved(worker)
        load, bounds = self.leases.load(worker) - reserved, self.deliveries.bounds(worker)
        ranking.refresh(worker, self._members.get(worker), load, reserved, bounds)

    # --- the life of a lease

    def progressed(self, peer: Peer, message: LeaseProgress, *, now: float) -> list[Any]:
        """A worker reports progress of a lease. If the lease does not run there, it is cancelled."""
        lease = self.leases.held(peer, message)
        if lease is None:
            cancelled = send_to(peer, LeaseCancelled(message.lease, message.attempt))
            return [*self._guessed(peer, message, now), *cancelled]
        # A worker that must refit first cannot make tokens; its lease is not stuck.
        refits = self._exclusive and self._must_refit(peer)
        tokens = lease.grows(message.samples)
        if tokens:
            self.deliveries.wrote(peer.peer, tokens)
        self.leases.renew(lease, tokens=tokens > 0, refits=refits, now=now)
        kind = self._kinds[lease.kind]
        return [*kind.progressed(peer, lease, message.samples, now=now)]

    def finished(self, peer: Peer, message: SampleFinished, *, now: float) -> list[Any]:
        """A worker sends a result: its kind judges it. A kind may know a result whose lease has ended."""
        lease = self.leases.held(peer, message)
        if lease is not None and message.sample in lease.samples:
            tokens = min(len(message.tokens) // 4, lease.room)
            new = max(0, tokens - lease.longest.get(message.sample, 0))
            self.deliveries.wrote(peer.peer, new, answer=tokens)
        kinds = self._kinds.values() if lease is None else (self._kinds[lease.kind],)
        for kind in kinds:
            judged = kind.finished(peer, lease, message, now=now)
            if judged is not None:
                return [*judged]
        known = self.leases.given(message.lease)
        reason = "the lease is over" if known else "no such lease"
        return [*self._guessed(peer, message, now), *self.refuse(peer, message, reason)]

    def refuse(self, peer: Peer, message: SampleFinished, reason: str) -> list[Note | Send]:
        """Tell a worker that its result does not count, although it may have done nothing wrong."""
        self._statistics.refused_results[reason] += 1
        return [*answer(peer, message, reason)]

    def refuse_bad(
        self, peer: Peer, message: SampleFinished, reason: str, *, now: float
    ) -> list[Note | Send]:
        """Tell a worker that its result is wrong: it is at fault, and rests."""
        self._statistics.refused_results["bad"] += 1
        peer.service.rest(now)
        notes = self.misreported(peer, "result", reason, now=now)
        return [*notes, *answer(peer, message, reason)]

    def misreported(self, peer: Peer, kind: str, reason: str, *, now: float) -> list[Note]:
        """A worker sent something that no honest program sends."""
        self._members.misreported(peer, now=now)
        return [self._statistics.fault(kind, f"{peer.name}: {reason}")]

    def failed(self, peer: Peer, message: LeaseFailed, *, now: float) -> list[Any]:
        """The worker gives a lease back."""
        lease = self.leases.held(peer, message)
        if lease is None:
            return [*self._guessed(peer, message, now)]
        # A retiring worker gives back what it was granted too late, or cannot finish in time.
        cause: Cause = "drained" if peer.service.retiring else "failed"
        notes = self._blame(lease, peer, cause, message.reason, now)
        return [*notes, *self._lose(lease, cause, message.reason, now)]

    def rejoined(
        self, peer: Peer, held: Collection[HeldLease], *, now: float
    ) -> tuple[tuple[HeldLease, ...], tuple[HeldLease, ...], list[Any]]:
        """A worker has come back with these leases. Returns (kept leases, cancelled leases, actions).

        Running leases that the worker does not name are lost. An ended lease runs again if its kind allows it.
        """
        actions: list[Any] = []
        # A hello may name a million leases.
        known = frozenset(held)
        for lease in self.leases.of_worker(peer.peer):
            if lease.key in known:
                self.leases.renew(lease, tokens=False, now=now)
            else:
                actions += self._lose(lease, "forgotten", "the worker forgot it", now)
        kept = {key: None for key in held if self._goes_on(peer, key, now)}
        return tuple(kept), tuple(key for key in held if key not in kept), actions

    def worker_left(self, peer: Peer, *, revoked: bool = False, now: float) -> list[Any]:
        """The worker will finish nothing more. If it was revoked, its unfinished output is dropped, too."""
        actions: list[Any] = []
        for lease in self.leases.of_worker(peer.peer):
            for sample in lease.samples if revoked else ():
                self.leases.gather(lease, sample, None)
            actions += self._lose(lease, "left", "the worker left", now)
        return actions

    def hand_over(self, peer: Peer, *, now: float) -> list[Any]:
        """Let others take over at once what this worker holds."""
        actions: list[Any] = []
        for lease in self.leases.of_worker(peer.peer):
            actions += self.cancel(lease)
            actions += self._lose(lease, "drained", "its worker is drained", now)
        return actions

    def deadlines(self, *, now: float) -> list[Any]:
        """End the leases whose worker was silent, or made no token, for too long."""
        actions: list[Any] = []
        for lease in self.leases.expired(now=now):
            # The end of an earlier lease may have ended this one.
            if self.leases.get(lease.key) is lease:
                worker, reason = self._members.get(lease.worker), "silent or stuck"
                actions += self._blame(lease, worker, "silent", reason, now)
                actions += self.cancel(lease)
                actions += self._lose(lease, "silent", f"its worker was {reason}", now)
        for kind in self._kinds.values():
            actions += kind.deadlines(now=now)
        return actions

    def wake_at(self) -> float | None:
        """When the next lease expires, a worker's rest ends, or a kind of work has something to do."""
        times = [self._ranking.wake_at(), self.leases.wake_at()]
        times += [kind.wake_at() for kind in self._kinds.values()]
        return min([at for at in times if at is not None], default=None)

    def cancel(self, lease: Lease) -> list[Send]:
        """Tell the worker of a lease to stop; the caller ends the lease."""
        key = lease.key
        return send_to(self._members.get(lease.worker), LeaseCancelled(key.lease, key.attempt))

    def stop(self, lease: Lease) -> list[Send]:
        """End a lease, if it runs, that its kind no longer wants. The kind itself tracks the samples."""
        if self.leases.get(lease.key) is not lease:
            return []
        self.leases.end(lease)
        return self.cancel(lease)

    # --- inside

    def _guessed(
        self, peer: Peer, message: LeaseProgress | SampleFinished | LeaseFailed, now: float
    ) -> list[Note]:
        if not self.leases.guessed(peer, message):
            return []
        return self.misreported(peer, "result", "it was never given this lease", now=now)

    def _fill(self, kind: KindOfWork[Any], now: float) -> list[Any]:
        actions: list[Any] = []
        waiting = kind.pending(now=now)
        # From this version on, workers up to this rank have no free slot. The pair is remembered because many samples
        # may wait for one version.
        none_from: tuple[Version, int] | None = None
        ahead = 0  # samples that wait for a free slot
        usual_slots: int | None = None
        while self._ranking.free and (pending := next(waiting, None)) is not None:
            if usual_slots is None:
                usual_slots = self._slots_worth_waiting_for(pending.oldest, now)
            # A worker that takes k times as long is worth using if k - 1 times as many samples wait as the usual
            # workers have slots (Lin and Kumar 1984, the slow server problem).
            slowest = RANK_MAX
            if usual_slots and pending.suits is None:
                slowest = int(math.log2(1.0 + ahead / usual_slots))
            named = pending.named
            if (
                none_from is not None
                and named is None
                and pending.oldest >= none_from[0]
                and slowest <= none_from[1]
            ):
                ahead += len(pending.samples)
                continue
            if pending.there_alone and self._waits_there(pending):
                continue
            workers = (
                self._ranking.choose(pending.oldest, self._versions.live, pending.newest, slowest)
                if named is None
                else self._ranking.choose_holders(named)
            )
            if not workers.free:
                ahead += len(pending.samples)
                none_from = (pending.oldest, slowest) if pending.newest is None else none_from
                continue
            placed = self._place(pending, workers)
            for worker, samples in placed:
                peer = self._members.get(worker)
                assert peer is not None
                actions += kind.grant(pending, peer, samples, now=now)
            if placed:
                self.refresh(now=now)
        return actions

    def _slots_worth_waiting_for(self, oldest: Version, now: float) -> int:
        """The slots of workers that are as fast as usual, if these are sometimes short of work; 0: they never are.

        If they are always busy, a slow worker adds throughput, and gets a sample for each free slot.
        """
        new = now < self._newest_at + LATELY_S
        idle = now < self._idle_at + max(LATELY_S, 2.0 * self.deliveries.answer_s)
        if not (idle or new):
            return 0
        if new and self._before is not None:
            oldest = min(oldest, self._before.version)
        usual = self._usual_workers(oldest)
        return usual.slots if idle or usual.free else 0

    def _usual_workers(self, oldest: Version) -> WorkerChoice:
        return self._ranking.choose(oldest, self._versions.live, slowest=0)

    def _place(
        self, pending: PendingSamples, workers: WorkerChoice
    ) -> list[tuple[PeerId, tuple[int, ...]]]:
        """Which worker gets which samples; empty: they cannot be placed now."""
        if len(pending.samples) > 1:
            return workers.place(pending.samples)
        usual = pending.preferred
        preferred = [] if usual is None or not self._may_write(usual, pending) else [usual]
        others = () if pending.there_alone else workers
        for worker in chain(preferred, (each.worker for each in others)):
            if pending.suits is None or pending.suits(worker):
                return [(worker, tuple(pending.samples))]
        return []

    def _hand_on(self, now: float) -> list[Any]:
        """Slots are free and nothing waits: move leases of slow workers to these slots, if the leases end sooner there.

        Leases that any worker leaves alone are moved, too.
        """
        actions: list[Any] = []
        # Until the first answer, the time of an answer is not known, and no lease counts as left alone.
        slow, answer_s = self.deliveries.slow(), self.deliveries.answer_s
        whole_s = max(TRIAL_S, answer_s or math.inf)
        alone = {
            lease.key: lease.worker
            for lease in self.leases
            if lease.wrote_at + whole_s <= now and self._left_alone(lease, whole_s, now)
        }
        for worker in dict.fromkeys([*slow, *alone.values()]):
            peer, held = self._members.get(worker), self.leases.of_worker(worker)
            quiet_s = min([lease.idle_s(now) for lease in held], default=0.0)
            if PROGRESS_S < quiet_s <= self._pause_s(peer):
                continue  # it may be loading a version
            record = None if peer is None else self._versions.live(peer.engine.serving)
            oldest = Version(0) if record is None else record.version
            # At most 64 workers with free slots are considered.
            choice = islice(self._ranking.choose(oldest, self._versions.live), 64)
            others = {
                each: self.deliveries.speed(each.worker) for each in choice if each.worker != worker
            }
            # Only workers that are faster than this one count. `slow` is not enough: a worker that was once fast makes
            # all others look slow for minutes.
            fast = SLOW_TIMES * self.deliveries.speed(worker) if worker in slow else math.inf
            faster = {each: speed for each, speed in others.items() if speed > fast}
            elsewhere, taken, left = min(faster.values(), default=0.0), 0, 0
            for lease in held:
                left_alone = lease.key in alone
                there = others if left_alone else faster
                free = sum([each.free for each in there if self._has(each.worker, lease.named)])
                free -= taken
                late = left_alone or (free > 0 and self._is_late(lease, elsewhere, now))
                if len(lease.samples) > free or not late:
                    continue
                taken += len(lease.samples)
                left += left_alone
                if left_alone or not any(lease.longest.get(each) for each in lease.samples):
                    actions += self._blame(lease, peer, "late", "nothing was written", now)
                actions += self.cancel(lease)
                actions += self._lose(lease, "late", "it is late there", now)
            if left and peer is not None and peer.service.left_alone(left):
                self.deliveries.left_alone(worker)
        return actions

    def _left_alone(self, lease: Lease, whole_s: float, now: float) -> bool:
        """Whether its worker has written nothing of it for whole_s, the time of an answer.

        Each attempt gets twice as long as the one before, because a long prompt takes long to read.
        """
        peer = self._members.get(lease.worker)
        if peer is None or peer.state != "joined" or lease.kind != TRAINING:
            return False
        if self._exclusive and self._must_refit(peer):
            return False
        # The worker has verified a newer version and may be loading it; how long its first refit takes is not known.
        if peer.engine.refit_pause_s is None and peer.engine.stands not in (
            None,
            peer.engine.serving,
        ):
            return False
        given_s = whole_s * 2.0 ** min(lease.key.attempt, RANK_MAX)
        return lease.idle_s(now) >= given_s + self._pause_s(peer)

    def _pause_s(self, peer: Peer | None) -> float:
        """How many seconds the worker may write nothing while it loads a version: as long as its last refit took, up to
        SLOW_TIMES the usual.
        """
        pauses = self._statistics.refit_pause_s
        last_s = 0.0 if peer is None else peer.engine.refit_pause_s or 0.0
        return min(last_s, SLOW_TIMES * median(pauses)) if pauses else 0.0

    def _is_late(self, lease: Lease, elsewhere: float, now: float) -> bool:
        written = min([lease.longest.get(sample, 0) for sample in lease.samples])
        gain_s = self.deliveries.gain_s(lease.worker, elsewhere, written, lease.idle_s(now))
        # Tokens that its worker has not reported yet will be written again.
        return now - lease.begun >= PROGRESS_S <= gain_s

    def _waits_there(self, pending: PendingSamples) -> bool:
        """Whether only one worker may get the sample, and this worker is full. At every event very many turns may wait
        like this.
        """
        usual = pending.preferred
        return usual is not None and not self._may_write(usual, pending)

    def _may_write(self, worker: PeerId, pending: PendingSamples) -> bool:
        if pending.named is not None:
            return self._has(worker, pending.named) and self.free_at(worker) > 0
        peer = self._members.get(worker)
        record = None if peer is None else self._versions.live(peer.engine.serving)
        if record is None or (pending.newest is not None and record.version > pending.newest):
            return False
        return record.version >= pending.oldest and self.free_at(worker) > 0

    def _has(self, worker: PeerId, named: VersionKey | None) -> bool:
        """Whether a lease that names this version can be written there."""
        if named is None:
            return True
        peer = self._members.get(worker)
        return peer is not None and named in peer.engine.held

    def _lose(self, lease: Lease, cause: Cause, reason: str, now: float) -> list[Any]:
        if self.leases.get(lease.key) is not lease:
            return []
        self.leases.end(lease)
        return [*self._kinds[lease.kind].lost(lease, cause, reason, now=now)]

    def _blame(
        self, lease: Lease, worker: Peer | None, cause: Cause, reason: str, now: float
    ) -> list[Note]:
        """Let a worker that did not finish its lease rest for a while."""
        if cause == "drained" or not self._kinds[lease.kind].blames(lease, cause):
            return []
        if worker is not None:
            worker.service.rest(now, at_least_s=lease.idle_s(now))
        name = lease.worker if worker is None else worker.name
        return [self._statistics.fault("lease", f"{name}: {reason}", lease.given.group)]

    def _goes_on(self, peer: Peer, key: HeldLease, now: float) -> bool:
        """Whether a worker that comes back with this lease may keep it."""
        lease = self.leases.get(key)
        if lease is not None:
            return lease.worker == peer.peer
        return any(kind.revive(peer, key, now=now) for kind in self._kinds.values())

    def _must_refit(self, peer: Peer) -> bool:
        """Whether the worker does not serve the newest version. In exclusive mode it makes no tokens until it does."""
        newest = self._versions.newest
        return newest is not None and peer.engine.serving != key_of(newest)

    def check(self) -> None:
        self.leases.check()
        for kind in self._kinds.values():
            kind.check()

        self.deliveries.check()
        self._ranking.check([peer.peer for peer in self._members], self._rank)
